//! The only writer to rows that this relay holds: settlements, releases, renewals of leases.
//!
//! One task for all of them: two would lock the same rows in different orders.

use std::{collections::HashSet, sync::Arc, time::Duration};

use tokio::{
    sync::mpsc::Receiver,
    time::{Instant, sleep_until},
};

use super::{
    Shared,
    health::Duty,
    pace,
    report::add,
    settle::{Settled, settle},
};
use crate::{
    publisher::Publisher,
    store::{Fence, Settlement, StoreError},
};

/// How long a settlement waits for others to share its statement.
const GATHER: Duration = Duration::from_millis(5);

/// What is left of the time to settle when the grace period is used up.
const LAST_TRIES: Duration = Duration::from_secs(2);

/// How many settlements one statement writes, and how many are taken from the channel before the clocks are looked
/// at again.
const MOST_AT_ONCE: usize = 1_000;

pub(super) async fn run<P: Publisher>(shared: Arc<Shared<P>>, mut settlements: Receiver<Settlement>) {
    let mut settler = Settler {
        renew_at: Instant::now() + shared.settings.renew_every / 2,
        shared,
        batch: Vec::new(),
        write_at: None,
        failures: 0,
    };
    loop {
        let write_at = settler.write_at;
        // What is received is bounded by what can be held, so it is received even while the database is away:
        // only so is the end of the dispatcher seen.
        tokio::select! {
            biased;
            () = sleep_until(settler.renew_at) => settler.renew().await,
            () = sleep_until(write_at.unwrap_or(settler.renew_at)), if write_at.is_some() => settler.write().await,
            received = settlements.recv_many(&mut settler.batch, MOST_AT_ONCE) => {
                if received == 0 {
                    break;
                }
                settler.gathered();
            }
        }
    }
    settler.finish().await;
}

struct Settler<P> {
    shared: Arc<Shared<P>>,
    batch: Vec<Settlement>,
    /// When the batch is to be written; `None` while it is empty.
    write_at: Option<Instant>,
    renew_at: Instant,
    /// Of the database, one after the other.
    failures: u32,
}

impl<P: Publisher> Settler<P> {
    /// Decides when the batch is written, now that it has grown.
    fn gathered(&mut self) {
        let now = Instant::now();
        let full = self.batch.len() >= self.shared.settings.batch_size.min(MOST_AT_ONCE);
        // Nothing else is under way that could join.
        let complete = self.batch.len() >= self.shared.held.len();
        let at = if self.failures > 0 {
            // The database is away: the batch waits for its next try.
            self.write_at.unwrap_or(now + self.pause())
        } else if full || complete {
            now
        } else {
            now + GATHER
        };
        self.write_at = Some(self.write_at.map_or(at, |earlier| earlier.min(at)));
    }

    /// Tries once to write the oldest part of the batch. The rest follows at once, but a renewal that is due goes
    /// first.
    async fn write(&mut self) {
        self.write_at = None;
        let size = self.batch.len().min(MOST_AT_ONCE);
        let Settled { written, lost, refused, failed } =
            settle(&self.shared.store, self.batch.drain(..size).collect()).await;
        let Shared { counters, held, .. } = &*self.shared;
        for settlement in &written {
            counters.settled(settlement.transition().arrow());
        }
        for settlement in &lost {
            tracing::debug!(id = %settlement.fence().id, "lost: somebody else has the row now");
        }
        add(&counters.lost, lost.len() as u64);
        for (settlement, error) in &refused {
            let id = settlement.fence().id;
            tracing::error!(%id, %error, "a settlement cannot be written; the row waits for the sweep");
        }
        let done = written.iter().chain(&lost).chain(refused.iter().map(|(settlement, _)| settlement));
        held.remove(&done.map(Settlement::fence).collect::<Vec<_>>());
        if let Some((error, rest)) = failed {
            self.batch.extend(rest);
            return self.failed(Duty::Settle, &error);
        }
        self.answered(Duty::Settle);
        if !self.batch.is_empty() {
            self.write_at = Some(Instant::now());
        }
    }

    /// Extends the leases that are older than half the time between renewals. Looking twice in that time, none
    /// becomes older than it; and rows that are settled quickly, which is almost all, are never renewed.
    async fn renew(&mut self) {
        let settings = &self.shared.settings;
        let half = settings.renew_every / 2;
        let before = Instant::now();
        let held = self.shared.held.ending_before(before + settings.lease.saturating_sub(half));
        let lost = match self.shared.store.renew(&held, settings.lease).await {
            Ok(lost) => lost,
            Err(error) => {
                // Sooner than usual: the leases are running out.
                self.renew_at = Instant::now() + half / 2;
                return self.failed(Duty::Renew, &error);
            }
        };
        self.shared.held.renewed(&held, before + settings.lease);
        self.renew_at = Instant::now() + half;
        // A settlement may be under way for them; it will find the same.
        let settling: HashSet<Fence> = self.batch.iter().map(Settlement::fence).collect();
        let gone: Vec<Fence> = lost.fences().iter().copied().filter(|f| !settling.contains(f)).collect();
        if !gone.is_empty() {
            tracing::debug!(rows = gone.len(), "lost: the leases were over and somebody else has the rows");
            self.shared.held.remove(&gone);
        }
        self.answered(Duty::Renew);
    }

    fn failed(&mut self, duty: Duty, error: &StoreError) {
        let pause = if let StoreError::Contention(error) = error {
            // Such things happen between transactions; it is no failure of the database.
            tracing::debug!(%error, "cannot settle now");
            Duration::from_millis(fastrand::u64(1..20))
        } else {
            if self.failures == 0 {
                tracing::warn!(%error, "cannot settle; the relay waits for the database");
            }
            self.failures = self.failures.saturating_add(1);
            self.shared.vitals.note(duty, false);
            self.pause()
        };
        if !self.batch.is_empty() {
            // Not later than it was to be: a renewal that fails must not put off a settlement.
            let at = Instant::now() + pause;
            self.write_at = Some(self.write_at.map_or(at, |earlier| earlier.min(at)));
        }
    }

    fn pause(&self) -> Duration {
        pace().delay(self.failures, fastrand::f64())
    }

    fn answered(&mut self, duty: Duty) {
        self.shared.vitals.note(duty, true);
        if self.failures > 0 {
            tracing::info!("the database answers again; settlements are written");
            self.failures = 0;
            if !self.batch.is_empty() {
                self.write_at = Some(Instant::now());
            }
        }
    }

    /// Writes what is left, and gives back what nobody finished, within the grace period.
    async fn finish(mut self) {
        let (grace_ends, last_tries_end) = (self.shared.grace_ends(), Instant::now() + LAST_TRIES);
        let settling: HashSet<Fence> = self.batch.iter().map(Settlement::fence).collect();
        let unused = self.shared.held.fences().into_iter().filter(|fence| !settling.contains(fence));
        self.batch.extend(unused.map(Settlement::release));
        while !self.batch.is_empty() {
            self.write().await;
            if let Some(at) = self.write_at {
                let now = &self.shared.stop.now;
                now.run_until_cancelled(sleep_until(at)).await;
                let give_up =
                    if now.is_cancelled() { last_tries_end } else { grace_ends.max(last_tries_end) };
                if at >= give_up {
                    let rows = self.batch.len();
                    tracing::warn!(
                        rows,
                        "stopping before everything is settled; the sweep will return the rows"
                    );
                    return;
                }
            }
        }
    }
}
