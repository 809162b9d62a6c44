//! One relay against the loop that most people write first, on PostgreSQL and NATS JetStream.
//!
//! ```sh
//! cargo bench --bench relay [-- --quick] [-- --json]
//! ```
//!
//! The servers run in containers, with fsync on; `BENCH_POSTGRES_URL` and `BENCH_NATS_URL` replace them. Both
//! candidates drain a backlog of 512-byte messages in the same run, in turn, five rounds. Only the ratio means
//! anything: on a shared machine the absolute figures do not repeat.

use std::{
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use async_nats::{
    HeaderMap,
    jetstream::{self, stream},
};
use clap::Parser;
use sea_orm::{
    ConnectOptions, ConnectionTrait, Database, DatabaseConnection, DbBackend, QueryResult, Statement,
    prelude::Uuid,
};
use sea_orm_outbox::{Ack, Message, NatsPublisher, NewMessage, Outbox, PublishError, Publisher, Relay};
use sea_orm_outbox_migration::{Migrator, MigratorTrait};
use testcontainers_modules::{
    nats::{Nats, NatsServerCmd},
    postgres::Postgres,
    testcontainers::{ContainerAsync, ImageExt, runners::AsyncRunner},
};
use tokio::{sync::Notify, time::timeout};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const BATCH: usize = 500;
const PAYLOAD: usize = 512;
const SUBJECT: &str = "bench.orders";

#[derive(Parser)]
struct Arguments {
    /// Fewer messages and rounds.
    #[arg(long)]
    quick: bool,
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
    /// What `cargo bench` passes to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let (rounds, by_row, by_relay) = if arguments.quick { (3, 500, 10_000) } else { (5, 2_000, 50_000) };
    let servers = Servers::start().await?;
    let bench = Bench::prepare(&servers).await?;

    let (mut row_at_a_time, mut relay, mut ratio) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=rounds {
        bench.fill(by_row).await?;
        let slow = rate(by_row, bench.row_at_a_time(by_row).await?);
        bench.fill(by_relay).await?;
        let fast = rate(by_relay, bench.relay(by_relay).await?);
        eprintln!("round {round}: row at a time {slow:.0}/s, relay {fast:.0}/s, ratio {:.1}", fast / slow);
        row_at_a_time.push(slow);
        relay.push(fast);
        ratio.push(fast / slow);
    }
    for (name, values, unit) in [
        ("row_at_a_time_per_s", row_at_a_time, "messages/s"),
        ("relay_per_s", relay, "messages/s"),
        ("relay_ratio_to_row_at_a_time", ratio, "ratio"),
    ] {
        let value = median(values);
        if arguments.json {
            println!(
                r#"{{"name":"{name}","value":{value:.3},"unit":"{unit}","database":"postgres","relays":1,"payload":{PAYLOAD}}}"#
            );
        } else {
            println!("{name:30} {value:10.1} {unit}");
        }
    }
    servers.stop().await
}

fn rate(messages: u64, elapsed: Duration) -> f64 {
    messages as f64 / elapsed.as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Servers {
    postgres_url: String,
    nats_url: String,
    postgres: Option<ContainerAsync<Postgres>>,
    nats: Option<ContainerAsync<Nats>>,
}

impl Servers {
    async fn start() -> Result<Self> {
        let (postgres_url, postgres) = match std::env::var("BENCH_POSTGRES_URL") {
            Ok(url) => (url, None),
            Err(_) => {
                let container = Postgres::default()
                    .with_fsync_enabled()
                    .with_tag("18")
                    .with_cmd(["-c", "shared_buffers=512MB", "-c", "max_wal_size=4GB"])
                    .start()
                    .await?;
                let port = container.get_host_port_ipv4(5432).await?;
                (format!("postgres://postgres:postgres@127.0.0.1:{port}/postgres"), Some(container))
            }
        };
        let (nats_url, nats) = match std::env::var("BENCH_NATS_URL") {
            Ok(url) => (url, None),
            Err(_) => {
                let command = NatsServerCmd::default().with_jetstream();
                let container = Nats::default().with_cmd(&command).with_tag("2").start().await?;
                let port = container.get_host_port_ipv4(4222).await?;
                (format!("nats://127.0.0.1:{port}"), Some(container))
            }
        };
        Ok(Self { postgres_url, nats_url, postgres, nats })
    }

    async fn stop(self) -> Result<()> {
        if let Some(container) = self.postgres {
            container.rm().await?;
        }
        if let Some(container) = self.nats {
            container.rm().await?;
        }
        Ok(())
    }
}

struct Bench {
    db: DatabaseConnection,
    client: async_nats::Client,
}

impl Bench {
    async fn prepare(servers: &Servers) -> Result<Self> {
        let mut options = ConnectOptions::new(&servers.postgres_url);
        options
            .sqlx_logging(false)
            .max_connections(10)
            .test_before_acquire_if_idle_for(Duration::from_secs(30));
        let db = Database::connect(options).await?;
        Migrator::up(&db, None).await?;
        let client = async_nats::connect(&servers.nats_url).await?;
        Ok(Self { db, client })
    }

    /// A backlog in a fresh table, and an empty stream.
    async fn fill(&self, messages: u64) -> Result<()> {
        self.db.execute_unprepared("TRUNCATE outbox_message").await?;
        let new = (0..messages).map(|_| NewMessage::bytes(SUBJECT, "text/plain", vec![b'x'; PAYLOAD]));
        Outbox::new().enqueue_many(&self.db, new).await?;
        self.db.execute_unprepared("VACUUM ANALYZE outbox_message").await?;
        self.db.execute_unprepared("CHECKPOINT").await?;
        let context = jetstream::new(self.client.clone());
        let _ = context.delete_stream("BENCH").await;
        let subjects = vec!["bench.>".to_owned()];
        context
            .create_stream(stream::Config { name: "BENCH".to_owned(), subjects, ..Default::default() })
            .await?;
        Ok(())
    }

    async fn relay(&self, messages: u64) -> Result<Duration> {
        let publisher = Arc::new(Counting {
            inner: NatsPublisher::jetstream(self.client.clone()),
            left: AtomicU64::new(messages),
            done: Notify::new(),
        });
        let relay = Relay::builder(self.db.clone(), publisher.clone()).batch_size(BATCH).build()?;
        let began = Instant::now();
        let relay = relay.spawn();
        timeout(Duration::from_secs(600), publisher.done.notified()).await?;
        // Stopping settles what was acknowledged: it belongs to the work.
        let report = relay.shutdown().await?;
        let elapsed = began.elapsed();
        if report.sent != messages {
            return Err(format!("{report}").into());
        }
        Ok(elapsed)
    }

    /// Read a hundred; claim, publish and settle each by itself.
    async fn row_at_a_time(&self, messages: u64) -> Result<Duration> {
        let context = jetstream::new(self.client.clone());
        let began = Instant::now();
        let mut sent = 0;
        while sent < messages {
            let read = "SELECT id, version, message_id, payload FROM outbox_message \
                        WHERE status = 'PENDING' AND available_at <= now() ORDER BY available_at, id LIMIT 100";
            for row in self.db.query_all_raw(Statement::from_string(DbBackend::Postgres, read)).await? {
                let (id, version): (i64, i64) = (row.try_get("", "id")?, row.try_get("", "version")?);
                let claim = "UPDATE outbox_message SET status = 'PROCESSING', version = version + 1, \
                             attempts = attempts + 1, claimed_by = 'bench', \
                             lease_until = now() + interval '30 s' WHERE id = $1 AND version = $2";
                if !self.one(claim, id, version).await? {
                    continue;
                }
                publish_and_wait(&context, &row).await?;
                let settle = "UPDATE outbox_message SET status = 'SENT', version = version + 1, \
                              sent_at = now(), available_at = NULL, claimed_by = NULL, lease_until = NULL \
                              WHERE id = $1 AND version = $2";
                if self.one(settle, id, version + 1).await? {
                    sent += 1;
                }
            }
        }
        Ok(began.elapsed())
    }

    async fn one(&self, sql: &str, id: i64, version: i64) -> Result<bool> {
        let statement = Statement::from_sql_and_values(DbBackend::Postgres, sql, [id.into(), version.into()]);
        Ok(self.db.execute_raw(statement).await?.rows_affected() == 1)
    }
}

async fn publish_and_wait(context: &jetstream::Context, row: &QueryResult) -> Result<()> {
    let mut headers = HeaderMap::new();
    headers.insert("Nats-Msg-Id", row.try_get::<Uuid>("", "message_id")?.to_string());
    let payload: Vec<u8> = row.try_get("", "payload")?;
    context.publish_with_headers(SUBJECT, headers, payload.into()).await?.await?;
    Ok(())
}

/// Says when the last message is acknowledged.
struct Counting {
    inner: NatsPublisher,
    left: AtomicU64,
    done: Notify,
}

impl Publisher for Counting {
    async fn publish(&self, message: &Message) -> std::result::Result<Ack, PublishError> {
        let ack = self.inner.publish(message).await?;
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.done.notify_one();
        }
        Ok(ack)
    }
}
