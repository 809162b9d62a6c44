//! Where in the queue the next claim begins.

use std::time::Duration;

use tokio::time::Instant;

use crate::store::{Claimed, Position};

/// How often the head of the queue is looked at, whatever lies further on.
const HEAD_EVERY: Duration = Duration::from_secs(1);

/// A walk that took long begins again after a rest of so many times as long: past a hundred thousand messages that
/// cannot be claimed it is dozens of statements. Meanwhile it stands at the end, where new messages are.
const REST: u32 = 4;

/// But after this long in any case.
const LONGEST_REST: Duration = Duration::from_secs(10);

/// And a walk that meets new messages for as long as it lasts begins again after this long: behind it others have become
/// claimable that no look at the head sees.
const LONGEST_WALK: Duration = Duration::from_secs(10);

/// A walk along the queue, so that what stands at its head and cannot be claimed is not looked at by every claim:
/// messages that others hold, or that are held behind a failed one.
///
/// Messages also become claimable behind the walk: released ones, those of transactions that took long to commit, and
/// with order per key those whose predecessors are through. So every second one claim begins at the head, and with
/// order per key also when enough of what this relay held is through; without ending the walk, which may be a long one.
#[derive(Debug)]
pub(super) struct Walk {
    at: Option<Position>,
    began: Instant,
    /// When it begins again, once it has ended.
    again: Instant,
    looked_at_head: Instant,
    /// There was nothing behind the place where it stands.
    ended: bool,
    /// The claim under way begins at the head beside the walk.
    aside: bool,
    /// How many claims had come to their end when the head was last looked at.
    through: u64,
}

impl Walk {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { at: None, began: now, again: now, looked_at_head: now, ended: false, aside: false, through: 0 }
    }

    /// Where the next claim begins; `None` at the head. `through` counts the claims that have come to their end.
    pub(super) fn next(&mut self, through: u64, head_may_have_moved: bool) -> Option<&Position> {
        let now = Instant::now();
        if self.ended && now >= self.again || now >= self.began + LONGEST_WALK {
            self.at = None;
        }
        // Not twice in a row, or a busy head would keep the walk where it is.
        let due = head_may_have_moved || now >= self.looked_at_head + HEAD_EVERY;
        self.aside = self.at.is_some() && due && (!self.aside || self.ended);
        if self.at.is_none() {
            self.began = now;
            self.ended = false;
        }
        if self.at.is_none() || self.aside {
            self.looked_at_head = now;
            self.through = through;
            return None;
        }
        self.at.as_ref()
    }

    /// How many claims have come to their end since the head was last looked at.
    pub(super) fn through_since(&self, through: u64) -> u64 {
        through.saturating_sub(self.through)
    }

    /// What came of that claim: whether it moved the walk on.
    pub(super) fn claimed(&mut self, claimed: &mut Claimed, full: bool) -> bool {
        let next = claimed.next.take();
        if self.aside && !full {
            // The walk goes on where it was.
            return !self.ended;
        }
        let ended = next.is_none();
        if ended && !self.ended {
            let now = Instant::now();
            let rest = (now - self.began).saturating_mul(REST).min(LONGEST_REST);
            self.again = (self.began + HEAD_EVERY).max(now + rest);
        }
        self.ended = ended;
        if ended {
            return false;
        }
        self.at = next;
        true
    }
}
