//! Where in the queue the next claim begins.

use std::time::Duration;

use tokio::time::Instant;

use crate::store::{Claimed, Position};

/// How often the head of the queue is looked at, whatever lies further on.
const HEAD_EVERY: Duration = Duration::from_secs(1);

/// A walk along the queue, so that what stands at its head and cannot be claimed is not looked at by every claim:
/// messages that others hold, or that are held behind a failed one.
///
/// Messages also become claimable behind the walk: released ones, and those of transactions that took long to commit.
/// So every second one claim begins at the head, without ending the walk, which may be a long one.
#[derive(Debug)]
pub(super) struct Walk {
    at: Option<Position>,
    began: Instant,
    looked_at_head: Instant,
    /// There was nothing behind the place where it stands.
    ended: bool,
    /// The claim under way begins at the head beside the walk.
    aside: bool,
}

impl Walk {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { at: None, began: now, looked_at_head: now, ended: false, aside: false }
    }

    /// Where the next claim begins; `None` at the head.
    pub(super) fn next(&mut self) -> Option<&Position> {
        let now = Instant::now();
        if self.ended && now >= self.began + HEAD_EVERY {
            self.at = None;
        }
        self.aside = self.at.is_some() && now >= self.looked_at_head + HEAD_EVERY;
        if self.at.is_none() {
            self.began = now;
            self.ended = false;
        }
        if self.at.is_none() || self.aside {
            self.looked_at_head = now;
            return None;
        }
        self.at.as_ref()
    }

    /// What came of that claim: whether it moved the walk on.
    pub(super) fn claimed(&mut self, claimed: &mut Claimed, full: bool) -> bool {
        let next = claimed.next.take();
        if self.aside && !full {
            // The walk goes on where it was.
            return !self.ended;
        }
        self.ended = next.is_none();
        if next.is_none() {
            return false;
        }
        self.at = next;
        true
    }
}
