//! The same story as `quickstart` with the real servers: PostgreSQL and NATS JetStream in containers, three
//! relays as processes of their own, one of them killed with SIGKILL.
//!
//! ```sh
//! make demo
//! ```
//!
//! You will see 5,000 orders being placed, the kill, what each relay says it did, and that every message is in
//! the stream.

#[path = "shared/interrupt.rs"]
mod interrupt;
#[path = "shared/orders.rs"]
mod orders;

use std::{
    collections::HashSet,
    error::Error,
    path::PathBuf,
    process::{ExitCode, Stdio},
    time::{Duration, Instant},
};

use async_nats::jetstream::{self, consumer, stream};
use futures_util::{StreamExt, future::try_join_all};
use interrupt::Interrupt;
use sea_orm::{
    ColumnTrait, ConnectOptions, Database, DatabaseConnection, EntityTrait, PaginatorTrait, QueryFilter,
};
use sea_orm_outbox::{
    Outbox,
    entity::{Status, outbox_message},
};
use sea_orm_outbox_migration::{Migrator, MigratorTrait};
use testcontainers_modules::{
    nats::{Nats, NatsServerCmd},
    postgres::Postgres,
    testcontainers::{ImageExt, runners::AsyncRunner},
};
use tokio::{
    process::{Child, Command},
    time::{sleep, timeout},
};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const ORDERS: u64 = 5_000;
const STREAM: &str = "ORDERS";

#[tokio::main]
async fn main() -> ExitCode {
    match demo().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn demo() -> Result<()> {
    // From here on, so that the containers go however it ends.
    let mut interrupt = Interrupt::listen()?;
    println!("starting PostgreSQL and NATS in containers");
    let postgres = Postgres::default().with_tag("18").start().await?;
    let nats =
        Nats::default().with_cmd(&NatsServerCmd::default().with_jetstream()).with_tag("2").start().await?;
    let database_url = format!(
        "postgres://postgres:postgres@127.0.0.1:{}/postgres",
        postgres.get_host_port_ipv4(5432).await?
    );
    let nats_url = format!("nats://127.0.0.1:{}", nats.get_host_port_ipv4(4222).await?);
    let outcome = tokio::select! {
        outcome = run(&database_url, &nats_url) => outcome,
        () = interrupt.wait() => Err("interrupted".into()),
    };
    postgres.rm().await?;
    nats.rm().await?;
    outcome
}

async fn run(database_url: &str, nats_url: &str) -> Result<()> {
    let mut options = ConnectOptions::new(database_url);
    options.sqlx_logging(false);
    let db = Database::connect(options).await?;
    Migrator::up(&db, None).await?;
    orders::create_table(&db).await?;
    let context = jetstream::new(async_nats::connect(nats_url).await?);
    let subjects = vec!["orders.>".to_owned()];
    // Repeats are dropped for as long as they can come.
    let duplicate_window = Duration::from_secs(300);
    let config = stream::Config { name: STREAM.to_owned(), subjects, duplicate_window, ..Default::default() };
    context.create_stream(config).await?;

    println!("starting three relays as processes of their own");
    let relay = |name: &str| relay(name, database_url, nats_url);
    let (first, second, mut doomed) = (relay("relay-1")?, relay("relay-2")?, relay("relay-3")?);
    let writing = tokio::spawn(place_orders(db.clone()));
    wait(&db, "the third relay to have messages in its hands", async |db| {
        Ok(sent(db).await? > ORDERS / 5 && in_hand(db, "relay-3").await? > 0)
    })
    .await?;
    doomed.kill().await?;
    println!("relay-3 is killed with {} messages in its hands", in_hand(&db, "relay-3").await?);

    writing.await??;
    let began = Instant::now();
    wait(&db, "all messages to be sent", async |db| Ok(sent(db).await? == ORDERS)).await?;
    println!("all {ORDERS} messages are SENT, {:?} after the last order", began.elapsed());
    for (name, process) in [("relay-1", first), ("relay-2", second)] {
        println!("{name}: {}", stop(process).await?);
    }
    println!("relay-3: killed");

    let (copies, ids) = stored(&context).await?;
    println!("the stream holds {copies} messages with {} different ids", ids.len());
    let rows = outbox_message::Entity::find().all(&db).await?;
    let delivered = rows.iter().filter(|row| ids.contains(&row.message_id.to_string())).count();
    if delivered != rows.len() {
        return Err(format!("{} messages are missing", rows.len() - delivered).into());
    }
    println!("each message delivered: {delivered} of {}", rows.len());
    Ok(())
}

fn relay(name: &str, database_url: &str, nats_url: &str) -> Result<Child> {
    // Cargo puts the examples into one folder.
    let program: PathBuf = std::env::current_exe()?.with_file_name("nats_relay");
    Command::new(&program)
        .args([
            "--name",
            name,
            "--stream",
            STREAM,
            "--batch-size",
            "100",
            "--poll-every",
            "50ms",
            "--log",
            "warn",
        ])
        .args(["--lease", "4s", "--renew-every", "1s", "--publish-timeout", "2s", "--sweep-every", "500ms"])
        .env("DATABASE_URL", database_url)
        .env("NATS_URL", nats_url)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("{}: {error}; build it with `make demo`", program.display()).into())
}

/// SIGTERM, as a container engine would; what the relay says it did.
async fn stop(process: Child) -> Result<String> {
    let pid = process.id().ok_or("a relay ended on its own")?.to_string();
    Command::new("kill").arg(pid).status().await?;
    let output = timeout(Duration::from_secs(30), process.wait_with_output()).await??;
    if !output.status.success() {
        return Err(format!("a relay ended with {}", output.status).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

async fn place_orders(db: DatabaseConnection) -> Result<()> {
    let placing = (0..4).map(async |_| {
        let outbox = Outbox::new();
        for _ in 0..ORDERS / 4 {
            orders::place_order(&db, &outbox, "orders.created", "tea").await?;
        }
        Result::Ok(())
    });
    try_join_all(placing).await?;
    println!("{ORDERS} orders placed");
    Ok(())
}

async fn wait(
    db: &DatabaseConnection,
    what: &str,
    condition: impl AsyncFn(&DatabaseConnection) -> Result<bool>,
) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(120);
    let mut shown = Instant::now();
    while !condition(db).await? {
        if Instant::now() > deadline {
            return Err(format!("waited two minutes for {what}").into());
        }
        if shown.elapsed() > Duration::from_secs(1) {
            println!("  {} of {ORDERS} sent", sent(db).await?);
            shown = Instant::now();
        }
        sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}

async fn sent(db: &DatabaseConnection) -> Result<u64> {
    let sent = outbox_message::Column::Status.eq(Status::Sent);
    Ok(outbox_message::Entity::find().filter(sent).count(db).await?)
}

async fn in_hand(db: &DatabaseConnection, relay: &str) -> Result<u64> {
    let claimed = outbox_message::Entity::find()
        .filter(outbox_message::Column::Status.eq(Status::Processing))
        .filter(outbox_message::Column::ClaimedBy.starts_with(relay));
    Ok(claimed.count(db).await?)
}

/// How many messages the stream holds, and their ids.
async fn stored(context: &jetstream::Context) -> Result<(u64, HashSet<String>)> {
    let mut stream = context.get_stream(STREAM).await?;
    let copies = stream.info().await?.state.messages;
    let config = consumer::pull::Config { ack_policy: consumer::AckPolicy::None, ..Default::default() };
    let mut messages = stream.create_consumer(config).await?.messages().await?;
    let mut ids = HashSet::new();
    for _ in 0..copies {
        let message =
            timeout(Duration::from_secs(10), messages.next()).await?.ok_or("the stream ended early")??;
        let id = message.headers.as_ref().and_then(|headers| headers.get("Nats-Msg-Id"));
        ids.insert(id.ok_or("a message has no id")?.to_string());
    }
    Ok((copies, ids))
}
