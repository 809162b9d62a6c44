//! PostgreSQL's `LISTEN`, turned into wakes.

use std::{io, time::Duration};

use sea_orm::{
    ConnectionTrait, DatabaseConnection, DbBackend, Statement,
    sqlx::{
        Error, Executor, PgConnection, Row,
        postgres::{PgListener, PgPoolOptions},
    },
};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use uuid::Uuid;

use super::WeakWaker;
use crate::lifecycle::RetryPolicy;

/// How long after a wake notifications are gathered before the next one: many small commits make one claim.
const GATHER: Duration = Duration::from_millis(3);

/// How long it may take until a connection listens.
const LONGEST_CONNECT: Duration = Duration::from_secs(30);

/// How often it is looked which connections of the server two clients are given.
const SHARING_ROUNDS: usize = 5;

/// When it is tried whether notifications arrive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Probing {
    /// How long a notification of our own may take to come back.
    pub(super) limit: Duration,
    /// How often it is tried: a connection can be cut without a word.
    pub(super) every: Duration,
    /// How long until listening is tried again where no notification arrives.
    pub(super) deaf_pause: Duration,
}

impl Default for Probing {
    fn default() -> Self {
        Self {
            limit: Duration::from_secs(2),
            every: Duration::from_secs(60),
            deaf_pause: Duration::from_secs(300),
        }
    }
}

/// Listens until nobody has the waker any more.
pub(super) async fn run(db: DatabaseConnection, channel: String, waker: WeakWaker, probing: Probing) {
    let pace = RetryPolicy::default().with_initial_delay(Duration::from_millis(200)).with_jitter(0.5);
    let pace = pace.with_max_delay(Duration::from_secs(30));
    let (mut failures, mut was_deaf, mut was_broken) = (0_u32, false, false);
    loop {
        let ended = tokio::select! {
            () = waker.gone() => return,
            ended = listen(&db, &channel, &waker, probing, &mut failures) => ended,
        };
        let pause = match ended {
            Ended::Deaf => {
                if was_deaf {
                    tracing::debug!(channel, "still no notification arrives");
                } else {
                    tracing::warn!(
                        channel,
                        "no notification arrives, as behind a pooler of transactions: relays find messages by looking"
                    );
                }
                was_deaf = true;
                probing.deaf_pause
            }
            Ended::Broken(error) => {
                failures = failures.saturating_add(1);
                if !was_broken && failures > 1 {
                    tracing::warn!(channel, %error, "cannot listen; relays find messages by looking");
                }
                was_broken = failures > 1;
                pace.delay(failures, fastrand::f64())
            }
        };
        tokio::select! {
            () = waker.gone() => return,
            () = sleep(pause) => {}
        }
    }
}

/// Why a connection is not listened to any more.
enum Ended {
    /// It answers, and passes no notification on.
    Deaf,
    Broken(Error),
}

async fn listen(
    db: &DatabaseConnection,
    channel: &str,
    waker: &WeakWaker,
    probing: Probing,
    failures: &mut u32,
) -> Ended {
    let mut listener = match timeout(LONGEST_CONNECT, connect(db, channel)).await {
        Ok(Ok(Some(listener))) => listener,
        Ok(Ok(None)) => return Ended::Deaf,
        Ok(Err(error)) => return Ended::Broken(error),
        Err(_) => return Ended::Broken(silent()),
    };
    // What was committed while nobody listened.
    waker.wake();
    let mut woke = Instant::now();
    let probe = format!("probe:{}", Uuid::now_v7());
    let (mut answer_by, mut answered) = (None, false);
    let mut probe_at = Instant::now();
    loop {
        let notification = tokio::select! {
            notification = listener.try_recv() => notification,
            () = sleep_until(answer_by.unwrap_or(probe_at)) => {
                if answer_by.is_some() {
                    // What has passed notifications on does not stop to: the connection is cut.
                    return if answered { Ended::Broken(silent()) } else { Ended::Deaf };
                }
                match send(db, channel, &probe, probing.limit).await {
                    Ok(()) => answer_by = Some(Instant::now() + probing.limit),
                    // The pool is not there, or is busy: that says nothing about this connection.
                    Err(()) => probe_at = Instant::now() + probing.every,
                }
                continue;
            }
        };
        match notification {
            Ok(Some(notification)) if notification.payload() == probe => {
                if *failures > 0 {
                    tracing::info!(channel, "listening again");
                }
                if !answered {
                    tracing::debug!(channel, "notifications arrive");
                }
                *failures = 0;
                answered = true;
                answer_by = None;
                probe_at = Instant::now() + probing.every;
            }
            // That of another listener.
            Ok(Some(notification)) if notification.payload().starts_with("probe:") => {}
            Ok(Some(_)) => {
                // The first one after a quiet time is passed on at once, more that come soon after it together.
                sleep_until(woke + GATHER).await;
                let mut buffered = listener.next_buffered();
                while let Some(notification) = buffered {
                    if notification.payload() == probe {
                        answered = true;
                        answer_by = None;
                        probe_at = Instant::now() + probing.every;
                    }
                    buffered = listener.next_buffered();
                }
                waker.wake();
                woke = Instant::now();
            }
            Ok(None) => return Ended::Broken(Error::WorkerCrashed),
            Err(error) => return Ended::Broken(error),
        }
    }
}

fn silent() -> Error {
    Error::Io(io::Error::new(io::ErrorKind::TimedOut, "the server does not answer"))
}

/// A connection of its own, beside the pool of the application, with the same settings. `None` where it is not
/// really of its own.
async fn connect(db: &DatabaseConnection, channel: &str) -> Result<Option<PgListener>, Error> {
    let options = db.get_postgres_connection_pool().connect_options();
    let pool = PgPoolOptions::new()
        .max_connections(2)
        .acquire_timeout(Duration::from_secs(10))
        .connect_lazy_with((*options).clone());
    let mut listener = PgListener::connect_with(&pool).await?;
    // Told of a lost connection, we look at the queue before we listen again.
    listener.eager_reconnect(false);
    let mut other = pool.acquire().await?;
    let shared = is_shared(&mut listener, &mut other).await?;
    other.close().await?;
    if shared {
        return Ok(None);
    }
    listener.listen(channel).await?;
    Ok(Some(listener))
}

/// Whether a pooler hands the server's connections round between transactions. Then `LISTEN` must not be said at all:
/// it would stay on one of them, and notifications would come to whoever uses it at that moment, whose driver may not
/// expect them.
///
/// Two clients in turn: one is given the connection that the other has just had, or another than before.
async fn is_shared(listener: &mut PgListener, other: &mut PgConnection) -> Result<bool, Error> {
    const PID: &str = "SELECT pg_backend_pid()";
    let mut before = None;
    for _ in 0..SHARING_ROUNDS {
        let ours: i32 = listener.fetch_one(PID).await?.try_get(0)?;
        let others: i32 = other.fetch_one(PID).await?.try_get(0)?;
        if ours == others || before.is_some_and(|before| before != (ours, others)) {
            return Ok(true);
        }
        before = Some((ours, others));
    }
    Ok(false)
}

async fn send(db: &DatabaseConnection, channel: &str, payload: &str, limit: Duration) -> Result<(), ()> {
    let values = [channel.into(), payload.into()];
    let statement = Statement::from_sql_and_values(DbBackend::Postgres, "SELECT pg_notify($1, $2)", values);
    match timeout(limit, db.execute_raw(statement)).await {
        Ok(Ok(_)) => Ok(()),
        _ => Err(()),
    }
}
