//! How long a message takes from its commit to a subscriber when a notification wakes the relay, and what the
//! notifications cost those who write.

use std::time::{Duration, Instant};

use futures_util::{StreamExt, future::try_join_all};
use sea_orm::{ConnectionTrait, DatabaseConnection, TransactionTrait};
use sea_orm_outbox::{NatsPublisher, NewMessage, Outbox, Relay, Waker};
use sea_orm_outbox_migration::{MigratorTrait, NotifyingMigrator};
use tokio::time::{interval, timeout};

use crate::shared::{
    PAYLOAD, Result, median, rate,
    servers::{Server, connect},
};

const SUBJECT: &str = "wakeup.orders";

/// How often a message is committed.
const EVERY: Duration = Duration::from_millis(20);

pub(crate) async fn measure(
    quick: bool,
    postgres: &mut Server,
    nats: &Server,
) -> Result<Vec<(&'static str, f64, &'static str)>> {
    let (messages, writes, rounds) = if quick { (250, 2_000, 3) } else { (1_000, 10_000, 5) };
    let plain = connect(&postgres.database().await?, 4).await?;
    let notifying = connect(&postgres.database().await?, 10).await?;
    NotifyingMigrator::up(&notifying, None).await?;

    let (mut in_twenties, mut single) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        for (rows, writers, ratios) in [(20, 1, &mut in_twenties), (1, 4, &mut single)] {
            // In turn: whoever comes second finds the server as the first one left it.
            let mut both = [&plain, &notifying].map(|db| (db, 0.0));
            both.rotate_left(round % 2);
            for (db, rate) in &mut both {
                *rate = write(db, writes, rows, writers).await?;
            }
            both.rotate_left(round % 2);
            let [(_, without), (_, with)] = both;
            eprintln!(
                "round {round}: {writers} writers of {rows}: {with:.0}/s notifying, {without:.0}/s not"
            );
            ratios.push(with / without);
        }
    }
    notifying.execute_unprepared("TRUNCATE outbox_message").await?;
    let latencies = latencies(&notifying, nats, messages).await?;
    let quantile = |q: f64| latencies[((latencies.len() - 1) as f64 * q).round() as usize];
    Ok(vec![
        ("wakeup_p50_ms", quantile(0.5), "ms"),
        ("wakeup_p99_ms", quantile(0.99), "ms"),
        ("enqueue_ratio_notifying_20_rows", median(in_twenties), "ratio"),
        ("enqueue_ratio_notifying_4_writers", median(single), "ratio"),
    ])
}

fn message() -> NewMessage {
    NewMessage::bytes(SUBJECT, "text/plain", vec![b'x'; PAYLOAD])
}

/// Messages a second, by so many writers in transactions of so many rows.
async fn write(db: &DatabaseConnection, messages: u64, rows: u64, writers: u64) -> Result<f64> {
    db.execute_unprepared("TRUNCATE outbox_message").await?;
    db.execute_unprepared("CHECKPOINT").await?;
    let began = Instant::now();
    try_join_all((0..writers).map(async |_| {
        for _ in 0..messages / rows / writers {
            let txn = db.begin().await?;
            for _ in 0..rows {
                Outbox::new().enqueue(&txn, message()).await?;
            }
            txn.commit().await?;
        }
        Result::Ok(())
    }))
    .await?;
    Ok(rate(messages, began.elapsed()))
}

/// From commit to subscriber on an idle system, in ms, in ascending order.
async fn latencies(db: &DatabaseConnection, nats: &Server, messages: u64) -> Result<Vec<f64>> {
    let client = async_nats::connect(&nats.url).await?;
    let context = async_nats::jetstream::new(client.clone());
    let config = async_nats::jetstream::stream::Config {
        name: "WAKEUP".to_owned(),
        subjects: vec![SUBJECT.to_owned()],
        ..Default::default()
    };
    context.create_stream(config).await?;
    let mut subscriber = client.subscribe(SUBJECT).await?;
    client.flush().await?;
    let relay = Relay::builder(db.clone(), NatsPublisher::jetstream(client.clone()));
    let relay = relay.waker(Waker::listening(db)?).poll_every(Duration::from_secs(60)).build()?.spawn();
    let mut latencies = Vec::new();
    let mut ticks = interval(EVERY);
    // The first ones wake nobody that listens yet.
    let first = 25;
    for number in 0..messages + first {
        ticks.tick().await;
        Outbox::new().enqueue(db, message()).await?;
        let committed = Instant::now();
        timeout(Duration::from_secs(70), subscriber.next()).await?.ok_or("the subscription ended")?;
        if number >= first {
            latencies.push(committed.elapsed().as_secs_f64() * 1e3);
        }
    }
    relay.shutdown().await?;
    context.delete_stream("WAKEUP").await?;
    latencies.sort_by(f64::total_cmp);
    Ok(latencies)
}
