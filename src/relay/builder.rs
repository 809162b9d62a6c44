//! The settings of a relay, and which of them cannot be safe together.

use std::{fmt, time::Duration};

use sea_orm::DatabaseConnection;

use super::{DestinationCheck, Relay, health::Vitals};
use crate::{
    Waker,
    lifecycle::RetryPolicy,
    publisher::Publisher,
    store::{ClaimStrategy, Ordering, OutboxTable, Roles, Store, StoreError},
};

const MIB: u64 = 1024 * 1024;

/// How a relay behaves. Every setting has a default that suits most services.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) name: String,
    /// `None` until the server has said what it is able to do.
    pub(super) strategy: Option<ClaimStrategy>,
    pub(super) ordering: Ordering,
    pub(super) batch_size: usize,
    pub(super) queued_batches: usize,
    pub(super) max_in_flight: usize,
    pub(super) memory_budget: u64,
    pub(super) lease: Duration,
    pub(super) renew_every: Duration,
    pub(super) publish_timeout: Duration,
    pub(super) sweeps: bool,
    pub(super) sweep_every: Duration,
    pub(super) poll_every: Duration,
    pub(super) rest: Duration,
    pub(super) grace: Duration,
    pub(super) retry: RetryPolicy,
    pub(super) destination: DestinationCheck,
}

impl Settings {
    /// The most rows that a relay holds: in flight, in the batch that is being dispatched, in the queue, and in
    /// the claim under way.
    pub(super) fn most_held(&self) -> usize {
        self.batch_size * (self.queued_batches + 2) + self.max_in_flight
    }

    /// The part of the memory for payloads that come with their claims.
    pub(super) fn inline_budget(&self) -> u64 {
        self.memory_budget / 4 * 3
    }

    /// The part for those that are loaded when it is their turn.
    pub(super) fn loaded_budget(&self) -> u64 {
        self.memory_budget / 4
    }
}

/// Makes a [`Relay`]; [`build`](Self::build) refuses settings that cannot be safe.
#[must_use = "a builder does nothing until it builds"]
pub struct RelayBuilder<P> {
    db: DatabaseConnection,
    roles: Roles,
    publisher: P,
    statement_timeout: Duration,
    settings: Settings,
    waker: Waker,
}

/// Why a relay was not built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A setting makes no sense on its own.
    #[error("{setting} is {value}: it {rule}")]
    Setting {
        /// Which setting.
        setting: &'static str,
        /// What it was set to.
        value: String,
        /// What it must be.
        rule: &'static str,
    },
    /// A worker could lose its lease while its publish is still in flight.
    #[error(
        "lease is {lease:?}, publish_timeout {publish_timeout:?} and renew_every {renew_every:?}: \
         the lease must be longer than the other two together, or a worker could lose a row that it is \
         publishing"
    )]
    LeaseTooShort {
        /// The lease.
        lease: Duration,
        /// The publish timeout.
        publish_timeout: Duration,
        /// The time between renewals.
        renew_every: Duration,
    },
    /// Order per key stands on what only row locks or a single writer can give.
    #[error(
        "strategy is Optimistic and ordering is {ordering:?}: order per key needs the strategy SkipLocked"
    )]
    OptimisticOrder {
        /// The ordering.
        ordering: Ordering,
    },
    /// The database is not supported, or the entity cannot be an outbox.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl<P: Publisher> RelayBuilder<P> {
    pub(super) fn new(db: DatabaseConnection, publisher: P) -> Self {
        let settings = Settings {
            name: format!("relay-{}-{:08x}", std::process::id(), fastrand::u32(..)),
            strategy: None,
            ordering: Ordering::Unordered,
            batch_size: 1_000,
            queued_batches: 2,
            max_in_flight: 1_024,
            memory_budget: 32 * MIB,
            lease: Duration::from_secs(30),
            renew_every: Duration::from_secs(10),
            publish_timeout: Duration::from_secs(5),
            sweeps: true,
            sweep_every: Duration::from_secs(5),
            poll_every: Duration::from_secs(1),
            rest: Duration::from_secs(30),
            grace: Duration::from_secs(10),
            retry: RetryPolicy::default(),
            destination: DestinationCheck::default(),
        };
        let (roles, statement_timeout, waker) = (Roles::default(), Duration::from_secs(10), Waker::default());
        Self { db, roles, publisher, statement_timeout, settings, waker }
    }

    /// The name of this relay in `claimed_by` and in the log, 1 to 64 characters. It need not be unique: the
    /// version is what counts. Default: the process id and a random number.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.settings.name = name.into();
        self
    }

    /// Relays an application's own table. Default: the table `outbox_message`.
    pub fn table<E: OutboxTable>(mut self) -> Self {
        self.roles = Roles::of::<E>();
        self
    }

    /// How relays keep out of each other's way. Default: [`ClaimStrategy::SkipLocked`] where the server has it, which
    /// is found out when the relay starts, otherwise [`ClaimStrategy::Optimistic`].
    pub fn strategy(mut self, strategy: ClaimStrategy) -> Self {
        self.settings.strategy = Some(strategy);
        self
    }

    /// Whether messages with the same ordering key are published one after the other, in order. All relays of a table
    /// must agree on it. Default: [`Ordering::Unordered`].
    pub fn ordering(mut self, ordering: Ordering) -> Self {
        self.settings.ordering = ordering;
        self
    }

    /// The most rows in one claim, 1 to 10,000. More make fewer statements per message; up to four batches are
    /// held in memory. Default: 1,000, beyond which little is gained.
    pub fn batch_size(mut self, rows: usize) -> Self {
        self.settings.batch_size = rows;
        self
    }

    /// The most messages waiting for the broker's acknowledgement at a time, 1 to 65,536. Default: 1,024.
    pub fn max_in_flight(mut self, messages: usize) -> Self {
        self.settings.max_in_flight = messages;
        self
    }

    /// The most bytes of payloads in memory, 1 MiB to 1 TiB. Small payloads come with their claims; those for which there
    /// is no room, and those above 64 KiB, are loaded when it is their turn, many with one statement. A single one that
    /// is larger than a quarter of this is loaded all the same, alone. Default: 32 MiB.
    pub fn memory_budget(mut self, bytes: u64) -> Self {
        self.settings.memory_budget = bytes;
        self
    }

    /// How long a claim is trusted without being renewed. A shorter one brings the messages of a worker that
    /// died back sooner; a longer one forgives longer pauses of a worker that lives. Default: 30 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        // Whole milliseconds, as in the database: it must not be trusted for longer here than there.
        self.settings.lease = Duration::from_millis(u64::try_from(lease.as_millis()).unwrap_or(u64::MAX));
        self
    }

    /// How often leases are renewed. Default: 10 s.
    pub fn renew_every(mut self, interval: Duration) -> Self {
        self.settings.renew_every = interval;
        self
    }

    /// How long one publish may take. Default: 5 s.
    pub fn publish_timeout(mut self, limit: Duration) -> Self {
        self.settings.publish_timeout = limit;
        self
    }

    /// How often to look for claims whose lease is over. Default: 5 s.
    pub fn sweep_every(mut self, interval: Duration) -> Self {
        self.settings.sweep_every = interval;
        self
    }

    /// Whether this relay returns the stale claims of workers that died, and publishes suspects. At least one relay of a
    /// table must, or those messages stay `PROCESSING`: a relay that does not says so at its start, and again when it
    /// sees a claim that nobody sweeps. Default: `true`.
    pub fn sweep(mut self, sweeps: bool) -> Self {
        self.settings.sweeps = sweeps;
        self
    }

    /// How often to look for messages when there were fewer than a batch; after a full batch the next is
    /// claimed at once. It is the longest that a message waits in an idle system. Default: 1 s.
    pub fn poll_every(mut self, interval: Duration) -> Self {
        self.settings.poll_every = interval;
        self
    }

    /// What wakes the relay before its next look, shared with other relays and with those who commit messages.
    /// Default: one of its own, see [`RelayHandle::wake`](crate::RelayHandle::wake).
    pub fn waker(mut self, waker: Waker) -> Self {
        self.waker = waker;
        self
    }

    /// How long at most the messages of a topic rest whose destination is not set up, before it is tried again. At first
    /// it is half a second, then each time twice as long: a stream that is without a leader soon has one.
    /// Default: 30 s.
    pub fn rest(mut self, rest: Duration) -> Self {
        self.settings.rest = rest;
        self
    }

    /// How long a stopping relay waits for the messages in flight before it gives them back. Default: 10 s.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.settings.grace = grace;
        self
    }

    /// How long one statement may take, waiting for a connection included. Default: 10 s.
    pub fn statement_timeout(mut self, limit: Duration) -> Self {
        self.statement_timeout = limit;
        self
    }

    /// How often a message is tried, and after what delays. Default: 5 attempts, 1 s doubling to 5 min.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.settings.retry = policy;
        self
    }

    /// What to do when the destination is found not to be set up as the promises ask for. Default:
    /// [`DestinationCheck::Warn`].
    pub fn destination_check(mut self, check: DestinationCheck) -> Self {
        self.settings.destination = check;
        self
    }

    /// The relay.
    ///
    /// # Errors
    /// When a setting makes no sense, when two cannot be safe together, or when the database is not supported.
    pub fn build(self) -> Result<Relay<P>, ConfigError> {
        let Self { db, roles, publisher, statement_timeout, settings, waker } = self;
        check(&settings, statement_timeout)?;
        let store = Store::with_roles(db, roles)?
            .with_ordering(settings.ordering)?
            .with_statement_timeout(statement_timeout);
        Ok(Relay { store, publisher, settings, waker, vitals: Vitals::new() })
    }
}

impl<P> fmt::Debug for RelayBuilder<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RelayBuilder").field("settings", &self.settings).finish_non_exhaustive()
    }
}

fn check(settings: &Settings, statement_timeout: Duration) -> Result<(), ConfigError> {
    let refuse = |setting, value: String, rule| Err(ConfigError::Setting { setting, value, rule });
    let name = &settings.name;
    if !(1..=64).contains(&name.chars().count()) || name.chars().any(char::is_control) {
        return refuse("name", format!("{name:?}"), "must have 1 to 64 characters, none a control character");
    }
    if !(1..=10_000).contains(&settings.batch_size) {
        return refuse("batch_size", settings.batch_size.to_string(), "must be from 1 to 10,000");
    }
    if !(1..=65_536).contains(&settings.max_in_flight) {
        return refuse("max_in_flight", settings.max_in_flight.to_string(), "must be from 1 to 65,536");
    }
    if !(MIB..=MIB << 20).contains(&settings.memory_budget) {
        return refuse("memory_budget", settings.memory_budget.to_string(), "must be from 1 MiB to 1 TiB");
    }
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    for (setting, value) in [
        ("lease", settings.lease),
        ("renew_every", settings.renew_every),
        ("publish_timeout", settings.publish_timeout),
        ("sweep_every", settings.sweep_every),
        ("poll_every", settings.poll_every),
        ("rest", settings.rest),
        ("statement_timeout", statement_timeout),
    ] {
        if !(Duration::from_millis(1)..=DAY).contains(&value) {
            return refuse(setting, format!("{value:?}"), "must be from 1 ms to a day");
        }
    }
    if settings.grace > DAY {
        return refuse("grace", format!("{:?}", settings.grace), "must be at most a day");
    }
    if let Some((setting, value, rule)) = settings.retry.fault() {
        return refuse(setting, value, rule);
    }
    let Settings { lease, publish_timeout, renew_every, .. } = *settings;
    if lease <= publish_timeout + renew_every {
        return Err(ConfigError::LeaseTooShort { lease, publish_timeout, renew_every });
    }
    let ordering = settings.ordering;
    if ordering != Ordering::Unordered && settings.strategy == Some(ClaimStrategy::Optimistic) {
        return Err(ConfigError::OptimisticOrder { ordering });
    }
    Ok(())
}
