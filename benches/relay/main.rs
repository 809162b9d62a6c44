//! One relay against the loop that most people write first, how soon it finds a message, and what that costs writers,
//! on PostgreSQL and NATS JetStream.
//!
//! ```sh
//! cargo bench --bench relay [-- --quick] [-- --json]
//! ```
//!
//! The servers run in containers, with fsync on; `BENCH_POSTGRES_URL` and `BENCH_NATS_URL` replace them. Both
//! candidates drain a backlog of 512-byte messages in the same run, in turn, five rounds. Only the ratio means
//! anything: on a shared machine the absolute figures do not repeat.

#[path = "../../examples/shared/interrupt.rs"]
mod interrupt;
#[path = "../shared/mod.rs"]
mod shared;
mod wakeup;

use std::{
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
use interrupt::Interrupt;
use sea_orm::{ConnectionTrait, DatabaseConnection, DbBackend, QueryResult, Statement, prelude::Uuid};
use sea_orm_outbox::{Ack, Message, NatsPublisher, NewMessage, Outbox, PublishError, Publisher, Relay};
use serde::Serialize;
use shared::{
    PAYLOAD, Result, median, print_json, rate, rounded,
    servers::{Kind, Server, connect},
};
use tokio::{sync::Notify, time::timeout};

const BATCH: usize = 500;
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

/// A line of the result.
#[derive(Serialize)]
struct Figure {
    name: &'static str,
    value: f64,
    unit: &'static str,
    database: &'static str,
    relays: u64,
    payload: usize,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut interrupt = Interrupt::listen()?;
    let mut postgres = Server::start(Kind::Postgres).await?;
    let nats = Server::start(Kind::Nats).await?;
    let measured = tokio::select! {
        biased;
        () = interrupt.wait() => Err("interrupted".into()),
        measured = measure(&arguments, &mut postgres, &nats) => measured,
    };
    let stopped = postgres.stop().await.and(nats.stop().await);
    measured.and(stopped)
}

async fn measure(arguments: &Arguments, postgres: &mut Server, nats: &Server) -> Result<()> {
    let (rounds, by_row, by_relay) = if arguments.quick { (3, 500, 10_000) } else { (5, 2_000, 50_000) };
    let bench = Bench {
        db: connect(&postgres.database().await?, 10).await?,
        client: async_nats::connect(&nats.url).await?,
    };
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
    let mut figures = vec![
        ("row_at_a_time_per_s", median(row_at_a_time), "messages/s"),
        ("relay_per_s", median(relay), "messages/s"),
        ("relay_ratio_to_row_at_a_time", median(ratio), "ratio"),
    ];
    figures.extend(wakeup::measure(arguments.quick, postgres, nats).await?);
    for (name, value, unit) in figures {
        let value = rounded(value);
        if arguments.json {
            print_json(&Figure { name, value, unit, database: "postgres", relays: 1, payload: PAYLOAD })?;
        } else {
            println!("{name:35} {value:10.2} {unit}");
        }
    }
    Ok(())
}

struct Bench {
    db: DatabaseConnection,
    client: async_nats::Client,
}

impl Bench {
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
