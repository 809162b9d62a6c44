//! Rows of the outbox, as the tests write and see them.

use std::time::Duration;

use sea_orm::{ConnectionTrait, DatabaseConnection, DbBackend, EntityTrait, QueryOrder};
use sea_orm_outbox::{
    NewMessage, Outbox,
    entity::{
        Status,
        outbox_message::{Column, Entity, Model},
    },
    lifecycle::RetryPolicy,
    store::{Claim, ClaimRequest, ClaimStrategy, Claimed, Store},
};

/// Long enough that no test outlives it by accident.
pub(crate) const LEASE: Duration = Duration::from_secs(60);

pub(crate) fn store(db: &DatabaseConnection) -> Store {
    Store::new(db.clone()).expect("the database is supported")
}

/// Enqueues messages with the payloads `0`, `1`, ….
pub(crate) async fn enqueue(db: &DatabaseConnection, topic: &str, count: usize) {
    let messages = (0..count).map(|number| NewMessage::json(topic, &number).expect("a number is JSON"));
    Outbox::new().enqueue_many(db, messages).await.expect("messages are enqueued");
}

/// Inserts many rows with one statement: columns, and an expression for each. `n` counts the rows from 0.
pub(crate) async fn fill(db: &DatabaseConnection, count: u32, columns: &[(&str, &str)]) {
    // SQLite tells texts from bytes.
    let payload = if db.get_database_backend() == DbBackend::Sqlite { "x'30'" } else { "'0'" };
    let mut all = vec![("topic", "'t'"), ("payload", payload)];
    all.extend(columns);
    let (names, values): (Vec<_>, Vec<_>) = all.into_iter().unzip();
    let digits: Vec<(String, String)> = (0..count.max(2).ilog10() + 1)
        .map(|place| (format!("d{place}.d * {}", 10_u32.pow(place)), format!("digit d{place}")))
        .collect();
    let (number, from): (Vec<_>, Vec<_>) = digits.into_iter().unzip();
    // What every database understands; sequences and recursion have limits of their own in each.
    let sql = format!(
        "\
        INSERT INTO outbox_message ({names})
        WITH digit(d) AS (
            SELECT 0 UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4 UNION ALL
            SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9
        )
        SELECT {values} FROM (SELECT {number} AS n FROM {from}) AS numbers WHERE n < {count} ORDER BY n",
        names = names.join(", "),
        values = values.join(", "),
        number = number.join(" + "),
        from = from.join(", "),
    );
    db.execute_unprepared(&sql).await.expect("the rows are written");
}

/// All rows by id.
pub(crate) async fn rows(db: &DatabaseConnection) -> Vec<Model> {
    Entity::find().order_by_asc(Column::Id).all(db).await.expect("the rows can be read")
}

/// The only row.
pub(crate) async fn row(db: &DatabaseConnection) -> Model {
    let mut rows = rows(db).await;
    assert_eq!(rows.len(), 1, "one row is expected");
    rows.remove(0)
}

/// How many rows have this status.
pub(crate) async fn count(db: &DatabaseConnection, status: Status) -> usize {
    rows(db).await.iter().filter(|row| row.status == status).count()
}

pub(crate) async fn claim(store: &Store, rows: u64, lease: Duration) -> Claimed {
    store
        .claim(&request(ClaimStrategy::SkipLocked, rows, "test:1", lease))
        .await
        .expect("the claim is carried out")
}

/// A claim from the head of the queue.
pub(crate) fn request(
    strategy: ClaimStrategy,
    limit: u64,
    claimed_by: &str,
    lease: Duration,
) -> ClaimRequest<'_> {
    ClaimRequest { strategy, limit, claimed_by, lease, after: None, inline_bytes: None }
}

/// Claims the only due row.
pub(crate) async fn claim_one(store: &Store, lease: Duration) -> Claim {
    let mut claimed = claim(store, 1, lease).await;
    assert_eq!(claimed.claims.len(), 1, "one row is due");
    claimed.claims.remove(0)
}

/// Makes every lease end a moment ago, as if its time had passed.
pub(crate) async fn let_leases_end(db: &DatabaseConnection) {
    set(db, "lease_until = available_at", "status = 'PROCESSING'").await;
}

/// Makes every waiting row due, as if its time had come.
pub(crate) async fn let_delays_end(db: &DatabaseConnection) {
    set(db, "available_at = created_at", "status = 'PENDING'").await;
}

async fn set(db: &DatabaseConnection, change: &str, condition: &str) {
    db.execute_unprepared(&format!("UPDATE outbox_message SET {change} WHERE {condition}"))
        .await
        .expect("the rows are changed");
}

/// Sweeps everything that is stale; how many rows were written.
pub(crate) async fn sweep(store: &Store) -> usize {
    let stale = store.stale(None, 10_000).await.expect("stale claims are read").stale;
    let settlements: Vec<_> = stale.into_iter().map(|stale| stale.settle(&RetryPolicy::default())).collect();
    let lost = store.settle(&settlements).await.expect("the sweep is written");
    settlements.len() - lost.len()
}
