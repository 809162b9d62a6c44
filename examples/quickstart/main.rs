//! Three relays race for the messages of an order service; one of them is killed in the middle.
//!
//! ```sh
//! cargo run --example quickstart
//! ```
//!
//! It needs nothing but Rust: the database is a SQLite file of its own, the broker whatever it finds, and it says
//! what that is. You will see 1,000 orders being placed, the kill, and in the end a table of what each relay did, and
//! that every message arrived.

mod broker;
#[path = "../shared/interrupt.rs"]
mod interrupt;
#[path = "../shared/orders.rs"]
mod orders;

use std::{env, error::Error, path::Path, process::ExitCode, sync::Arc, time::Duration};

use broker::Broker;
use interrupt::Interrupt;
use sea_orm::{
    ColumnTrait, ConnectOptions, Database, DatabaseConnection, EntityTrait, PaginatorTrait, QueryFilter,
    QuerySelect, sqlx::sqlite::SqliteJournalMode, sqlx::sqlite::SqliteSynchronous,
};
use sea_orm_outbox::{
    Outbox, Relay, Report,
    entity::{Status, outbox_message},
    store::ClaimStrategy,
};
use sea_orm_outbox_migration::{Migrator, MigratorTrait};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const ORDERS: u64 = 1_000;

const LEASE: Duration = Duration::from_secs(3);

#[tokio::main]
async fn main() -> ExitCode {
    let file = env::temp_dir().join(format!("outbox-quickstart-{}.sqlite", std::process::id()));
    let outcome = quickstart(&file).await;
    for suffix in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{suffix}", file.display()));
    }
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn quickstart(file: &Path) -> Result<()> {
    // From here on, so that what was started goes however it ends.
    let mut interrupt = Interrupt::listen()?;
    println!("database   a SQLite file");
    let broker = Broker::find().await?;
    println!("broker     {}", broker.describe());
    let url = format!("sqlite://{}?mode=rwc", file.display());
    let outcome = tokio::select! {
        outcome = run(&url, &broker) => outcome,
        () = interrupt.wait() => Err("interrupted".into()),
    };
    broker.close().await;
    outcome
}

async fn run(url: &str, broker: &Arc<Broker>) -> Result<()> {
    let db = connect(url).await?;
    Migrator::up(&db, None).await?;
    orders::create_table(&db).await?;

    let writing = tokio::spawn(place_orders(db.clone(), broker.topic()));
    let (first, second) = (relay("relay-1", &db, broker)?.spawn(), relay("relay-2", &db, broker)?.spawn());
    // Not stopped but killed: nothing of it runs any further, as if its process had died.
    let doomed = relay("relay-3", &db, broker)?;
    let doomed = tokio::spawn(doomed.run(std::future::pending()));
    let in_hand = kill_in_the_middle(&db, doomed).await?;
    println!(
        "           relay-3 is killed with {in_hand} messages in its hands; its lease lasts for {LEASE:?}"
    );

    let deadline = Instant::now() + Duration::from_secs(120);
    writing.await??;
    let mut shown = 0;
    while shown < ORDERS {
        if Instant::now() > deadline {
            return Err("the relays did not finish within two minutes".into());
        }
        sleep(Duration::from_millis(500)).await;
        let sent = sent(&db).await?;
        if sent > shown {
            println!("           {sent} of {ORDERS} sent");
        }
        shown = sent;
    }
    let (first, second) = (first.shutdown().await?, second.shutdown().await?);

    println!(
        "\n{:10} {:>8} {:>8} {:>11} {:>8} {:>11}",
        "", "claimed", "sent", "lost races", "swept", "duplicates"
    );
    for (name, Report { claimed, sent, lost_races, returned, buried, duplicates, .. }) in
        [("relay-1", first), ("relay-2", second)]
    {
        let swept = returned + buried;
        println!("{name:10} {claimed:>8} {sent:>8} {lost_races:>11} {swept:>8} {duplicates:>11}");
    }
    let by_the_killed = ORDERS - first.sent - second.sent;
    println!(
        "{:10} {:>8} {by_the_killed:>8}   then killed with {in_hand} messages in its hands",
        "relay-3", ""
    );
    println!(
        "\nlost races: rows that another relay claimed first; swept: claims of the killed relay, returned when \
         their lease\nwas over; duplicates: messages that the broker had already"
    );
    let delivered = broker.delivered().await?;
    let expected = message_ids(&db).await?;
    let missing = expected.iter().filter(|id| !delivered.contains(*id)).count();
    if missing > 0 {
        return Err(format!("{missing} of {} messages are missing at the broker", expected.len()).into());
    }
    println!("\neach message delivered: {} of {}", expected.len(), expected.len());
    Ok(())
}

async fn connect(url: &str) -> Result<DatabaseConnection> {
    let mut options = ConnectOptions::new(url);
    options.sqlx_logging(false).max_connections(10).map_sqlx_sqlite_opts(|options| {
        options
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Normal)
            .busy_timeout(Duration::from_secs(10))
    });
    Ok(Database::connect(options).await?)
}

fn relay(name: &str, db: &DatabaseConnection, broker: &Arc<Broker>) -> Result<Relay<Arc<Broker>>> {
    // Without row locks, so that there are races to lose; small batches and a short lease, so that there is
    // something to see.
    let relay = Relay::builder(db.clone(), broker.clone())
        .name(name)
        .strategy(ClaimStrategy::Optimistic)
        .batch_size(20)
        .poll_every(Duration::from_millis(50))
        .lease(LEASE)
        .publish_timeout(Duration::from_secs(1))
        .renew_every(Duration::from_secs(1))
        .sweep_every(Duration::from_millis(500))
        .build()?;
    Ok(relay)
}

async fn place_orders(db: DatabaseConnection, topic: String) -> Result<()> {
    let outbox = Outbox::new();
    for number in 1..=ORDERS {
        orders::place_order(&db, &outbox, &topic, "tea").await?;
        if number % 250 == 0 {
            println!("           {number} orders placed");
        }
    }
    Ok(())
}

/// Kills the relay when a third is sent and it has some messages in its hands; how many.
async fn kill_in_the_middle<T>(db: &DatabaseConnection, doomed: JoinHandle<T>) -> Result<u64> {
    let in_hand = || {
        outbox_message::Entity::find()
            .filter(outbox_message::Column::Status.eq(Status::Processing))
            .filter(outbox_message::Column::ClaimedBy.starts_with("relay-3:"))
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    while (sent(db).await? < ORDERS / 3 || in_hand().count(db).await? < 5) && Instant::now() < deadline {
        sleep(Duration::from_millis(1)).await;
    }
    doomed.abort();
    let _ = doomed.await;
    // A statement that was under way is still carried out.
    sleep(Duration::from_millis(200)).await;
    Ok(in_hand().count(db).await?)
}

async fn sent(db: &DatabaseConnection) -> Result<u64> {
    let sent = outbox_message::Column::Status.eq(Status::Sent);
    Ok(outbox_message::Entity::find().filter(sent).count(db).await?)
}

async fn message_ids(db: &DatabaseConnection) -> Result<Vec<String>> {
    let ids = outbox_message::Entity::find().select_only().column(outbox_message::Column::MessageId);
    let ids: Vec<sea_orm::prelude::Uuid> = ids.into_tuple().all(db).await?;
    Ok(ids.iter().map(ToString::to_string).collect())
}
