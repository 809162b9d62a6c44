//! What a relay did, in numbers.

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::lifecycle::Arrow;

/// What a relay did since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Rows claimed.
    pub claimed: u64,
    /// Claims settled as sent.
    pub sent: u64,
    /// Acknowledgements saying that the broker had the message already.
    pub duplicates: u64,
    /// Claims settled to be tried again.
    pub retried: u64,
    /// Claims settled as failed.
    pub failed: u64,
    /// Claims given back unused.
    pub released: u64,
    /// Claims that somebody else had taken over when they were settled or renewed.
    pub lost: u64,
    /// Rows that another relay claimed first.
    pub lost_races: u64,
    /// Stale claims returned to the queue, whoever had held them.
    pub returned: u64,
    /// Stale claims whose attempts were spent.
    pub buried: u64,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "claimed {}, sent {} ({} duplicates), retried {}, failed {}, released {}, lost {}, \
             lost races {}, swept {} (of them buried {})",
            self.claimed,
            self.sent,
            self.duplicates,
            self.retried,
            self.failed,
            self.released,
            self.lost,
            self.lost_races,
            self.returned + self.buried,
            self.buried,
        )
    }
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) claimed: AtomicU64,
    pub(super) duplicates: AtomicU64,
    pub(super) lost: AtomicU64,
    pub(super) lost_races: AtomicU64,
    sent: AtomicU64,
    retried: AtomicU64,
    failed: AtomicU64,
    released: AtomicU64,
    returned: AtomicU64,
    buried: AtomicU64,
}

impl Counters {
    /// Counts a settlement that was written.
    pub(super) fn settled(&self, arrow: Arrow) {
        let counter = match arrow {
            Arrow::Acknowledge => &self.sent,
            Arrow::Retry => &self.retried,
            Arrow::Fail => &self.failed,
            Arrow::Release => &self.released,
            Arrow::Return => &self.returned,
            Arrow::Bury => &self.buried,
            // No settlement.
            Arrow::Claim | Arrow::Renew | Arrow::Requeue | Arrow::Discard | Arrow::Cancel | Arrow::Retire => {
                return;
            }
        };
        add(counter, 1);
    }

    pub(super) fn report(&self) -> Report {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Report {
            claimed: read(&self.claimed),
            sent: read(&self.sent),
            duplicates: read(&self.duplicates),
            retried: read(&self.retried),
            failed: read(&self.failed),
            released: read(&self.released),
            lost: read(&self.lost),
            lost_races: read(&self.lost_races),
            returned: read(&self.returned),
            buried: read(&self.buried),
        }
    }
}

pub(super) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}
