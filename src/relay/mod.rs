//! The relay: moves messages from the outbox to a broker.
//!
//! Five tasks, joined by bounded channels, so that one batch is claimed while another waits for its
//! acknowledgements and a third is settled:
//!
//! - the **claimer** wins batches of rows, as long as there is room for another one;
//! - the **dispatcher** keeps up to `max_in_flight` publishes under way;
//! - the **loader** reads payloads that were too large to come with their claims, within the budget of memory;
//! - the **settler** alone writes to claimed rows: settlements, releases and renewals of leases;
//! - the **sweeper** returns or buries claims whose lease is over, whoever held them.
//!
//! No transaction and no row lock is held while a message is being published.

mod builder;
mod claimer;
mod destination;
mod dispatcher;
mod gate;
mod handle;
mod health;
mod held;
mod keys;
mod loader;
mod report;
mod resting;
mod settle;
mod settler;
mod start;
mod suspects;
mod sweeper;
mod walk;

use std::{
    fmt,
    future::Future,
    sync::{Arc, OnceLock},
    time::Duration,
};

use sea_orm::DatabaseConnection;
use tokio::{
    sync::mpsc,
    task::{JoinError, JoinSet},
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

pub use builder::{ConfigError, RelayBuilder};
pub use destination::DestinationCheck;
pub use handle::RelayHandle;
pub use health::Health;
pub use report::Report;

use crate::{
    Waker,
    lifecycle::RetryPolicy,
    publisher::Publisher,
    store::{Store, StoreError},
};
use builder::Settings;
use gate::Gate;
use health::Vitals;
use held::Held;
use loader::Loader;
use report::Counters;
use suspects::Suspects;

/// Moves messages to a broker until it is told to stop.
///
/// Any number of relays may run side by side, in one process or in many: who publishes a row is decided by its
/// version. A relay uses at most four connections of the pool at a time (claim, load, settle, sweep), and at its start a
/// fifth, to see which topics are in use.
///
/// ```no_run
/// # use sea_orm::Database;
/// # use sea_orm_outbox::{NatsPublisher, Relay};
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let db = Database::connect("postgres://localhost/shop").await?;
/// let client = async_nats::connect("nats://localhost:4222").await?;
///
/// let relay = Relay::builder(db, NatsPublisher::jetstream(client)).build()?;
/// let report = relay.run(async { tokio::signal::ctrl_c().await.unwrap_or_default() }).await?;
/// println!("{report}");
/// # Ok(())
/// # }
/// ```
pub struct Relay<P> {
    store: Store,
    publisher: P,
    settings: Settings,
    waker: Waker,
    vitals: Arc<Vitals>,
}

/// Why a relay ended on its own. Losing the database or the broker is not among them: the relay waits.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RelayError {
    /// The table is missing or lacks what the relay needs, or the server is too old.
    #[error(transparent)]
    Table(Arc<StoreError>),
    /// The strategy [`SkipLocked`](crate::ClaimStrategy::SkipLocked) was asked for, or order per key, which stands on it, and
    /// the server does not have it.
    #[error("the server has no SKIP LOCKED: set the strategy Optimistic, and no order per key")]
    NoSkipLocked,
    /// The destination is not set up as the promises ask for, and [`DestinationCheck::Refuse`] was set.
    #[error("the destination is not set up as the promises ask for: {}", .0.join("; "))]
    Destination(Arc<[String]>),
    /// A task of the relay panicked: a bug. Rows it held go back with the sweep.
    #[error("a task of the relay ended unexpectedly: {0}")]
    Task(Arc<JoinError>),
    /// The runtime was shut down under it. Rows it held go back with the sweep.
    #[error("the relay is gone: its runtime was shut down")]
    Gone,
}

/// What the tasks of a relay share.
struct Shared<P> {
    store: Store,
    publisher: P,
    settings: Settings,
    counters: Counters,
    held: Held,
    gate: Gate,
    suspects: Suspects,
    waker: Waker,
    vitals: Arc<Vitals>,
    stop: Stop,
    grace_ends: OnceLock<Instant>,
}

/// What a relay is told in the end.
#[derive(Clone, Debug, Default)]
struct Stop {
    /// To claim no more, and to finish what is in flight within the grace period.
    token: CancellationToken,
    /// To give back what is in flight at once.
    now: CancellationToken,
}

impl<P> Shared<P> {
    /// When to give up what is not finished, reckoned from the first time that anybody asks.
    fn grace_ends(&self) -> Instant {
        *self.grace_ends.get_or_init(|| Instant::now() + self.settings.grace)
    }

    /// Waits until what is not finished is to be given up.
    async fn grace_over(&self) {
        self.stop.now.run_until_cancelled(sleep_until(self.grace_ends())).await;
    }
}

/// The pace at which anything is tried again that the database or the broker refused.
fn pace() -> RetryPolicy {
    RetryPolicy::default()
        .with_initial_delay(Duration::from_millis(200))
        .with_max_delay(Duration::from_secs(5))
        .with_jitter(0.5)
}

/// The duration, 20 % more or less, so that relays which started together do not stay together.
fn jittered(duration: Duration) -> Duration {
    duration.mul_f64(0.8 + 0.4 * fastrand::f64())
}

impl<P: Publisher> Relay<P> {
    /// A relay between a database and a publisher, with the defaults that the setters of
    /// [`RelayBuilder`] name.
    pub fn builder(db: DatabaseConnection, publisher: P) -> RelayBuilder<P> {
        RelayBuilder::new(db, publisher)
    }

    /// Relays until `shutdown` is ready, then stops and says what it did.
    ///
    /// Stopping means: claim no more, finish what is in flight within the grace period, give the rest back
    /// without spending attempts, settle what was acknowledged. It takes at most the grace period plus two
    /// statement timeouts.
    ///
    /// While the database or the broker cannot be reached, at the start or later, the relay waits and goes on
    /// by itself. Dropping the future stops everything at once; the rows it held come back with the sweep.
    ///
    /// # Errors
    /// [`RelayError::Table`] when the database answers but the table is not there.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<Report, RelayError> {
        let stop = Stop::default();
        let relay = self.run_until(stop.clone());
        tokio::pin!(relay, shutdown);
        tokio::select! {
            biased;
            ended = &mut relay => return ended,
            () = &mut shutdown => stop.token.cancel(),
        }
        relay.await
    }

    /// What is wrong with the destination, as it is looked at when the relay starts, each fault with what to do.
    ///
    /// # Errors
    /// When the database or the broker does not say.
    pub async fn check_destination(&self) -> Result<Vec<String>, String> {
        destination::faults(&self.store, &self.publisher, &self.settings, &CancellationToken::new()).await
    }

    /// Relays in the background, on the current Tokio runtime.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub fn spawn(self) -> RelayHandle {
        RelayHandle::spawn(self)
    }

    async fn run_until(self, stop: Stop) -> Result<Report, RelayError> {
        let Self { store, publisher, mut settings, waker, vitals } = self;
        let Some((table, waited)) = start::wait_for_table(&store, &vitals, &stop.token).await? else {
            return Ok(Report::default());
        };
        for (status, rows) in &table.unknown_statuses {
            tracing::warn!(status, rows, "rows have a status that means nothing: no relay touches them");
        }
        settings.strategy = Some(start::strategy(settings.strategy, settings.ordering, &table)?);
        if settings.destination == DestinationCheck::Refuse {
            match destination::refuse(&store, &publisher, &settings, &vitals, &stop.token).await {
                Ok(true) => {}
                Ok(false) => return Ok(Report::default()),
                Err(error) => return Err(error),
            }
        }
        tracing::info!(relay = settings.name, "relay started");
        let (to_dispatcher, claims) = mpsc::channel(settings.queued_batches);
        // Room for every row that can be held, so that no outcome of a publish ever waits for the settler.
        let (to_settler, settlements) = mpsc::channel(settings.most_held());
        let shared = Arc::new(Shared {
            store,
            publisher,
            settings,
            counters: Counters::default(),
            held: Held::default(),
            gate: Gate::new(vitals.clone()),
            suspects: Suspects::default(),
            waker,
            vitals,
            stop: stop.clone(),
            grace_ends: OnceLock::new(),
        });

        shared.vitals.running(true);
        let mut tasks = JoinSet::new();
        tasks.spawn(claimer::run(shared.clone(), to_dispatcher, to_settler.clone()));
        let (loader, payloads) = Loader::new(shared.settings.loaded_budget());
        tasks.spawn(dispatcher::run(shared.clone(), claims, to_settler, loader));
        tasks.spawn(loader::run(shared.clone(), payloads));
        tasks.spawn(settler::run(shared.clone(), settlements));
        // Owners could not renew their leases while the database was away: let them first.
        let sweep_after = if waited { shared.settings.lease } else { Duration::ZERO };
        if shared.settings.sweeps {
            tasks.spawn(sweeper::run(shared.clone(), sweep_after));
        } else {
            tasks.spawn(sweeper::watch(shared.clone()));
        }
        if shared.settings.destination == DestinationCheck::Warn {
            tasks.spawn(destination::warn(shared.clone()));
        }
        let mut failure = None;
        while let Some(ended) = tasks.join_next().await {
            if let Err(error) = ended {
                stop.token.cancel();
                tracing::error!(%error, "a task of the relay ended unexpectedly");
                failure.get_or_insert(RelayError::Task(Arc::new(error)));
            }
        }
        shared.vitals.running(false);
        let report = shared.counters.report();
        tracing::info!(relay = shared.settings.name, %report, "relay stopped");
        failure.map_or(Ok(report), Err)
    }
}

impl<P> fmt::Debug for Relay<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay").field("settings", &self.settings).finish_non_exhaustive()
    }
}
