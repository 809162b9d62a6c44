//! How a relay is doing, for a readiness probe.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{sync::watch, time::Instant};

/// How a relay is doing. A look at memory: nothing is asked of the database or the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// Whether it is at work: the table was found, and it was not told to stop.
    pub running: bool,
    /// Whether it was told to [pause](crate::RelayHandle::pause).
    pub paused: bool,
    /// Whether the last statement of every kind was carried out.
    pub database: bool,
    /// Whether the broker was there when it was last needed.
    pub broker: bool,
    /// How long ago the last look for stale claims was finished, or since the start.
    pub swept: Duration,
    /// Whether that is longer ago than it should be: three intervals, or a lease after an error of the database.
    pub sweep_is_late: bool,
    /// Whether leases could not be renewed when they were to be.
    pub renewal_is_late: bool,
}

impl Health {
    /// Whether nothing is wrong. A relay that is paused, or waits for the database or the broker, is not ready, and
    /// goes on by itself: restarting it helps nothing.
    pub fn is_ready(&self) -> bool {
        self.running
            && !self.paused
            && self.database
            && self.broker
            && !self.sweep_is_late
            && !self.renewal_is_late
    }
}

/// What the tasks of a relay note, and what they are told.
#[derive(Debug)]
pub(super) struct Vitals {
    began: Instant,
    running: AtomicBool,
    claiming_fails: AtomicBool,
    settling_fails: AtomicBool,
    renewing_fails: AtomicBool,
    sweeping_fails: AtomicBool,
    broker_is_away: AtomicBool,
    /// In milliseconds since it began.
    swept_at: AtomicU64,
    /// By when the next look must be finished, in milliseconds since it began.
    sweep_by: AtomicU64,
    paused: watch::Sender<bool>,
}

/// What can be carried out, or not.
#[derive(Clone, Copy, Debug)]
pub(super) enum Duty {
    Claim,
    Settle,
    Renew,
    Sweep,
    Publish,
}

impl Vitals {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            began: Instant::now(),
            running: AtomicBool::new(false),
            claiming_fails: AtomicBool::new(false),
            settling_fails: AtomicBool::new(false),
            renewing_fails: AtomicBool::new(false),
            sweeping_fails: AtomicBool::new(false),
            broker_is_away: AtomicBool::new(false),
            swept_at: AtomicU64::new(0),
            sweep_by: AtomicU64::new(u64::MAX),
            paused: watch::Sender::new(false),
        })
    }

    pub(super) fn running(&self, running: bool) {
        self.running.store(running, Ordering::Relaxed);
    }

    /// Notes whether a duty was carried out the last time.
    pub(super) fn note(&self, duty: Duty, done: bool) {
        let fails = match duty {
            Duty::Claim => &self.claiming_fails,
            Duty::Settle => &self.settling_fails,
            Duty::Renew => &self.renewing_fails,
            Duty::Sweep => &self.sweeping_fails,
            Duty::Publish => &self.broker_is_away,
        };
        fails.store(!done, Ordering::Relaxed);
    }

    /// Notes that a look for stale claims is finished, or failed, and by when the next one should be.
    pub(super) fn swept(&self, done: bool, next_within: Duration) {
        let now = self.now();
        if done {
            self.swept_at.store(now, Ordering::Relaxed);
        }
        let within = u64::try_from(next_within.as_millis()).unwrap_or(u64::MAX);
        self.sweep_by.store(now.saturating_add(within), Ordering::Relaxed);
        self.note(Duty::Sweep, done);
    }

    pub(super) fn pause(&self, pause: bool) {
        self.paused.send_replace(pause);
    }

    pub(super) fn is_paused(&self) -> bool {
        *self.paused.borrow()
    }

    /// Waits until it is not paused.
    pub(super) async fn resumed(&self) {
        // The sender lives as long as this does.
        let _ = self.paused.subscribe().wait_for(|paused| !paused).await;
    }

    pub(super) fn health(&self) -> Health {
        let on = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        let now = self.now();
        let fails = [&self.claiming_fails, &self.settling_fails, &self.renewing_fails, &self.sweeping_fails];
        Health {
            running: on(&self.running),
            paused: self.is_paused(),
            database: !fails.into_iter().any(on),
            broker: !on(&self.broker_is_away),
            swept: Duration::from_millis(now.saturating_sub(self.swept_at.load(Ordering::Relaxed))),
            sweep_is_late: now > self.sweep_by.load(Ordering::Relaxed),
            renewal_is_late: on(&self.renewing_fails),
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}
