//! The relay as a program of its own: from a database to NATS, until it is told to stop.
//!
//! ```sh
//! cargo run --example nats_relay -- --help
//! DATABASE_URL=postgres://localhost/shop cargo run --example nats_relay -- --migrate
//! ```
//!
//! It logs to standard error what happens, stops cleanly on Ctrl-C and SIGTERM (at once on a second one), prints what it
//! did, and exits with 0; with 1 when it could not start, with 2 when its arguments cannot be read.

#[path = "shared/interrupt.rs"]
mod interrupt;

use std::{io::IsTerminal, process::ExitCode, time::Duration};

use async_nats::jetstream;
use clap::{Parser, ValueEnum};
use futures_util::future::join_all;
use interrupt::Interrupt;
use sea_orm::{ConnectOptions, Database, DatabaseConnection};
use sea_orm_outbox::{
    BehindFailed, ClaimStrategy, NatsPublisher, Ordering, Relay, RelayHandle, Waker,
    lifecycle::RetryPolicy,
    store::{Store, StoreError},
};
use sea_orm_outbox_migration::{Migrator, MigratorTrait, NotifyingMigrator};

/// Relays the messages of a SeaORM outbox to NATS.
#[derive(Parser)]
#[command(after_help = "Durations are written like 500ms, 30s or 5m.")]
struct Arguments {
    /// The database: postgres://…, sqlite://… (with ?mode=rwc to make the file), or with the feature mysql: mysql://…
    #[arg(long, env, hide_env_values = true)]
    database_url: String,
    /// The NATS server
    #[arg(long, env, hide_env_values = true, default_value = "nats://localhost:4222")]
    nats_url: String,
    /// The only stream that may take the messages [default: any]
    #[arg(long, env = "NATS_STREAM", conflicts_with = "core")]
    stream: Option<String>,
    /// Publish to core NATS, without JetStream: only who listens gets the messages
    #[arg(long)]
    core: bool,
    /// Make the table first, if it is not there
    #[arg(long)]
    migrate: bool,
    /// The name in the log and in `claimed_by` [default: process id and a random number]
    #[arg(long, env = "RELAY_NAME")]
    name: Option<String>,
    /// How many relays run in this process
    #[arg(long, env = "RELAY_WORKERS", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    workers: u16,
    /// How relays keep out of each other's way [default: skip-locked, where the server has it]
    #[arg(long, env = "RELAY_STRATEGY", value_enum)]
    strategy: Option<Strategy>,
    /// Publish messages with the same ordering key in order; what becomes of those behind a failed one
    #[arg(long, env = "RELAY_ORDER_PER_KEY", value_enum, value_name = "BEHIND_FAILED")]
    order_per_key: Option<Behind>,
    /// The most rows in one claim
    #[arg(long, env = "RELAY_BATCH_SIZE", default_value_t = 1_000)]
    batch_size: usize,
    /// The most messages waiting for an acknowledgement
    #[arg(long, env = "RELAY_MAX_IN_FLIGHT", default_value_t = 1_024)]
    max_in_flight: usize,
    /// How long a claim is trusted without being renewed
    #[arg(long, env = "RELAY_LEASE", default_value = "30s", value_parser = humantime::parse_duration)]
    lease: Duration,
    /// How often leases are renewed
    #[arg(long, env = "RELAY_RENEW_EVERY", default_value = "10s", value_parser = humantime::parse_duration)]
    renew_every: Duration,
    /// How long one publish may take
    #[arg(long, env = "RELAY_PUBLISH_TIMEOUT", default_value = "5s", value_parser = humantime::parse_duration)]
    publish_timeout: Duration,
    /// How often to look for messages when there are few
    #[arg(long, env = "RELAY_POLL_EVERY", default_value = "1s", value_parser = humantime::parse_duration)]
    poll_every: Duration,
    /// Look as soon as messages are committed: PostgreSQL only, with a trigger that --migrate makes
    #[arg(long, env = "RELAY_LISTEN")]
    listen: bool,
    /// How often to look for claims whose lease is over
    #[arg(long, env = "RELAY_SWEEP_EVERY", default_value = "5s", value_parser = humantime::parse_duration)]
    sweep_every: Duration,
    /// How often a message is tried before it fails
    #[arg(long, env = "RELAY_MAX_ATTEMPTS", default_value_t = 5)]
    max_attempts: u32,
    /// How long to wait for messages in flight when stopping
    #[arg(long, env = "RELAY_GRACE", default_value = "10s", value_parser = humantime::parse_duration)]
    grace: Duration,
    /// What to log: error, warn, info, debug, or a filter of tracing
    #[arg(long, env = "RUST_LOG", default_value = "info,async_nats=off,sqlx=warn,sea_orm_migration=warn")]
    log: String,
}

#[derive(Clone, Copy, ValueEnum)]
enum Strategy {
    /// Pass over rows that another relay is claiming
    SkipLocked,
    /// No row locks: compare versions, and lose a race now and then
    Optimistic,
}

#[derive(Clone, Copy, ValueEnum)]
enum Behind {
    /// They wait until it is requeued or discarded
    Hold,
    /// They go on
    Skip,
}

impl Arguments {
    fn ordering(&self) -> Ordering {
        let behind_failed = match self.order_per_key {
            None => return Ordering::Unordered,
            Some(Behind::Hold) => BehindFailed::Hold,
            Some(Behind::Skip) => BehindFailed::Skip,
        };
        Ordering::PerKey { behind_failed }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_env_filter(&arguments.log)
        .with_target(false)
        .init();
    match run(arguments).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: Arguments) -> Result<(), String> {
    let mut interrupt = Interrupt::listen().map_err(|error| error.to_string())?;
    let relays = tokio::select! {
        relays = start(&arguments) => relays?,
        () = interrupt.wait() => return Ok(()),
    };
    tokio::select! {
        () = interrupt.wait() => {}
        // None ends unless something is wrong that waiting does not mend.
        ended = relays[0].wait() => { ended.map_err(|error| error.to_string())?; }
    }
    let reports = tokio::select! {
        reports = join_all(relays.iter().map(RelayHandle::shutdown)) => reports,
        () = interrupt.wait() => {
            tracing::warn!("told to stop again: not waiting for what is in flight");
            join_all(relays.iter().map(RelayHandle::shutdown_now)).await
        }
    };
    for report in reports {
        println!("{}", report.map_err(|error| error.to_string())?);
    }
    Ok(())
}

async fn start(arguments: &Arguments) -> Result<Vec<RelayHandle>, String> {
    let db = connect(&arguments.database_url).await?;
    let client = async_nats::ConnectOptions::new()
        .name("sea-orm-outbox")
        .ping_interval(Duration::from_secs(10))
        .connect(&arguments.nats_url)
        .await
        .map_err(|error| format!("cannot connect to NATS ({}): {error}", place(&arguments.nats_url)))?;
    if let Some(stream) = &arguments.stream {
        jetstream::new(client.clone()).get_stream(stream).await.map_err(|error| {
            format!("the stream {stream} cannot be used: {error}; create it with `nats stream add {stream}`")
        })?;
    }
    let waker = match arguments.listen {
        true => Waker::listening(&db).map_err(|error| format!("--listen: {error}"))?,
        false => Waker::new(),
    };
    let relays: Vec<Relay<NatsPublisher>> = (1..=arguments.workers)
        .map(|worker| {
            let publisher = match (&arguments.stream, arguments.core) {
                (_, true) => NatsPublisher::core(client.clone()),
                (None, _) => NatsPublisher::jetstream(client.clone()),
                (Some(stream), _) => NatsPublisher::jetstream(client.clone()).with_expected_stream(stream),
            };
            relay(arguments, worker, &db, &waker, publisher)
        })
        .collect::<Result<_, String>>()?;
    // Nothing is changed before all else is known to be right.
    if arguments.migrate {
        let failed = |error| format!("the migration failed: {error}");
        Migrator::up(&db, None).await.map_err(failed)?;
        if arguments.listen {
            NotifyingMigrator::up(&db, None).await.map_err(failed)?;
        }
    }
    let store = Store::new(db).and_then(|store| store.with_ordering(arguments.ordering()));
    store.map_err(|error| error.to_string())?.check_table().await.map_err(|error| match error {
        StoreError::Table(_) => format!("{error}, or start with --migrate"),
        error => error.to_string(),
    })?;
    let (database, nats) = (place(&arguments.database_url), place(&arguments.nats_url));
    tracing::info!(database, nats, stream = arguments.stream, core = arguments.core, "connected");
    Ok(relays.into_iter().map(Relay::spawn).collect())
}

fn relay(
    arguments: &Arguments,
    worker: u16,
    db: &DatabaseConnection,
    waker: &Waker,
    publisher: NatsPublisher,
) -> Result<Relay<NatsPublisher>, String> {
    // The server's answer has to come before the relay gives up, so that an outage is known as one.
    let publisher = publisher.with_ack_timeout(arguments.publish_timeout.mul_f64(0.8));
    let mut builder = Relay::builder(db.clone(), publisher)
        .ordering(arguments.ordering())
        .waker(waker.clone())
        .batch_size(arguments.batch_size)
        .max_in_flight(arguments.max_in_flight)
        .lease(arguments.lease)
        .renew_every(arguments.renew_every)
        .publish_timeout(arguments.publish_timeout)
        .poll_every(arguments.poll_every)
        .sweep_every(arguments.sweep_every)
        .grace(arguments.grace)
        .retry(RetryPolicy::default().with_max_attempts(arguments.max_attempts));
    if let Some(strategy) = arguments.strategy {
        builder = builder.strategy(match strategy {
            Strategy::SkipLocked => ClaimStrategy::SkipLocked,
            Strategy::Optimistic => ClaimStrategy::Optimistic,
        });
    }
    if let Some(name) = &arguments.name {
        let name = if arguments.workers == 1 { name.clone() } else { format!("{name}-{worker}") };
        builder = builder.name(name);
    }
    builder.build().map_err(|error| error.to_string())
}

async fn connect(url: &str) -> Result<DatabaseConnection, String> {
    if url.starts_with("mysql://") && !cfg!(feature = "mysql") {
        return Err(
            "this program was built without the feature mysql: build it with `--features mysql`".to_owned()
        );
    }
    if !["postgres://", "postgresql://", "mysql://", "sqlite:"].iter().any(|scheme| url.starts_with(scheme)) {
        return Err("the database URL must begin with postgres://, mysql:// or sqlite:".to_owned());
    }
    let mut options = ConnectOptions::new(url);
    options.sqlx_logging(false).acquire_timeout(Duration::from_secs(5));
    Database::connect(options).await.map_err(|error| {
        let error = error.to_string();
        // SeaORM's error may quote the whole URL, with the password.
        let reason = if error.contains("connection string") {
            "the URL cannot be parsed; write special characters in name and password as %40 and the like"
        } else if error.contains("timed out") {
            "no connection within 5 s; is the server running there?"
        } else {
            &error
        };
        format!("cannot connect to the database ({}): {reason}", place(url))
    })
}

/// A URL without what must not be printed.
fn place(url: &str) -> &str {
    let rest = url.split_once('?').map_or(url, |(rest, _)| rest);
    let rest = rest.split_once("://").map_or(rest, |(_, rest)| rest);
    rest.rsplit_once('@').map_or(rest, |(_, rest)| rest)
}
