//! PostgreSQL's `LISTEN`, turned into wakes.

use std::time::Duration;

use sea_orm::{
    ConnectionTrait, DatabaseConnection, DbBackend, Statement,
    sqlx::{
        Error,
        postgres::{PgListener, PgPoolOptions},
    },
};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use uuid::Uuid;

use super::WeakWaker;
use crate::lifecycle::RetryPolicy;

/// How long notifications are gathered before a relay is woken: many small commits make one claim.
const GATHER: Duration = Duration::from_millis(2);

/// How long a notification of our own may take to come back.
const PROBE_LIMIT: Duration = Duration::from_secs(2);

/// How often it is tried whether notifications still arrive: a connection can be cut without a word.
const PROBE_EVERY: Duration = Duration::from_secs(60);

/// How long until listening is tried again where no notification arrives.
const DEAF_PAUSE: Duration = Duration::from_secs(300);

/// Listens until nobody has the waker any more.
pub(super) async fn run(db: DatabaseConnection, channel: String, waker: WeakWaker) {
    let pace = RetryPolicy::default().with_initial_delay(Duration::from_millis(200)).with_jitter(0.5);
    let pace = pace.with_max_delay(Duration::from_secs(30));
    let (mut failures, mut was_deaf, mut was_broken) = (0_u32, false, false);
    loop {
        let ended = tokio::select! {
            () = waker.gone() => return,
            ended = listen(&db, &channel, &waker, &mut failures) => ended,
        };
        let pause = match ended {
            Ended::Deaf => {
                if !was_deaf {
                    tracing::warn!(
                        channel,
                        "no notification arrives, as behind a pooler of transactions: relays find messages by looking"
                    );
                }
                was_deaf = true;
                DEAF_PAUSE
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

async fn listen(db: &DatabaseConnection, channel: &str, waker: &WeakWaker, failures: &mut u32) -> Ended {
    let mut listener = match connect(db, channel).await {
        Ok(listener) => listener,
        Err(error) => return Ended::Broken(error),
    };
    // What was committed while nobody listened.
    waker.wake();
    let probe = format!("probe:{}", Uuid::now_v7());
    let mut answer_by = None;
    let mut probe_at = Instant::now();
    loop {
        let notification = tokio::select! {
            notification = listener.try_recv() => notification,
            () = sleep_until(answer_by.unwrap_or(probe_at)) => {
                if answer_by.is_some() {
                    return Ended::Deaf;
                }
                match send(db, channel, &probe).await {
                    Ok(()) => answer_by = Some(Instant::now() + PROBE_LIMIT),
                    // The pool is not there, or is busy: that says nothing about this connection.
                    Err(()) => probe_at = Instant::now() + PROBE_EVERY,
                }
                continue;
            }
        };
        match notification {
            Ok(Some(notification)) if notification.payload() == probe => {
                if *failures > 0 {
                    tracing::info!(channel, "listening again");
                }
                *failures = 0;
                answer_by = None;
                probe_at = Instant::now() + PROBE_EVERY;
            }
            // That of another listener.
            Ok(Some(notification)) if notification.payload().starts_with("probe:") => {}
            Ok(Some(_)) => {
                sleep(GATHER).await;
                let mut buffered = listener.next_buffered();
                while let Some(notification) = buffered {
                    if notification.payload() == probe {
                        answer_by = None;
                        probe_at = Instant::now() + PROBE_EVERY;
                    }
                    buffered = listener.next_buffered();
                }
                waker.wake();
            }
            Ok(None) => return Ended::Broken(Error::WorkerCrashed),
            Err(error) => return Ended::Broken(error),
        }
    }
}

/// A connection of its own, beside the pool of the application, with the same settings.
async fn connect(db: &DatabaseConnection, channel: &str) -> Result<PgListener, Error> {
    let options = db.get_postgres_connection_pool().connect_options();
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(Duration::from_secs(10))
        .connect_lazy_with((*options).clone());
    let mut listener = PgListener::connect_with(&pool).await?;
    // Told of a lost connection, we look at the queue before we listen again.
    listener.eager_reconnect(false);
    listener.listen(channel).await?;
    Ok(listener)
}

async fn send(db: &DatabaseConnection, channel: &str, payload: &str) -> Result<(), ()> {
    let values = [channel.into(), payload.into()];
    let statement = Statement::from_sql_and_values(DbBackend::Postgres, "SELECT pg_notify($1, $2)", values);
    match timeout(PROBE_LIMIT, db.execute_raw(statement)).await {
        Ok(Ok(_)) => Ok(()),
        _ => Err(()),
    }
}
