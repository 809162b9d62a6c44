//! Whether the broker is there: an outage pauses the relay and costs no attempts.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep};

use super::{
    health::{Duty, Vitals},
    pace,
};
use crate::publisher::Publisher;

/// How often a connection that is down is looked at again. No query and no request: a look at a flag.
const LOOK: Duration = Duration::from_millis(50);

/// Open while the broker acknowledges. Closed from the first publish that says it is away until one is
/// acknowledged again; meanwhile one message at a time tries.
#[derive(Debug)]
pub(super) struct Gate {
    outage: Mutex<Option<Outage>>,
    vitals: Arc<Vitals>,
}

#[derive(Debug)]
struct Outage {
    since: Instant,
    failures: u32,
    try_again: Instant,
}

/// How many messages may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passage {
    /// As many as there is room for.
    Free,
    /// One, to see whether the broker is back.
    One,
}

impl Gate {
    pub(super) fn new(vitals: Arc<Vitals>) -> Self {
        Self { outage: Mutex::default(), vitals }
    }

    /// A publish found the broker away.
    pub(super) fn close(&self, reason: &str) {
        let now = Instant::now();
        let mut outage = self.lock();
        let outage = outage.get_or_insert_with(|| {
            tracing::warn!(reason, "the broker is away; the relay pauses");
            self.vitals.note(Duty::Publish, false);
            Outage { since: now, failures: 0, try_again: now }
        });
        // Those that were in flight together fail together, and count as one.
        if now >= outage.try_again {
            outage.failures = outage.failures.saturating_add(1);
            outage.try_again = now + pace().delay(outage.failures, fastrand::f64());
        }
    }

    /// The broker answered.
    pub(super) fn open(&self) {
        if let Some(outage) = self.lock().take() {
            tracing::info!(after = ?outage.since.elapsed(), "the broker is back; the relay goes on");
            self.vitals.note(Duty::Publish, true);
        }
    }

    /// How long until a message may be tried again.
    pub(super) fn pause(&self) -> Duration {
        self.lock()
            .as_ref()
            .map_or(Duration::ZERO, |outage| outage.try_again.saturating_duration_since(Instant::now()))
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().is_some()
    }

    /// Waits until a message may be tried.
    pub(super) async fn pass(&self, publisher: &impl Publisher) -> Passage {
        loop {
            if !publisher.is_connected() {
                if !self.is_closed() {
                    self.close("not connected");
                }
                sleep(LOOK).await;
                continue;
            }
            if !self.is_closed() {
                return Passage::Free;
            }
            match self.pause() {
                Duration::ZERO => return Passage::One,
                // In steps: an acknowledgement that was still under way may open it sooner.
                pause => sleep(pause.min(LOOK)).await,
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Outage>> {
        self.outage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
