//! What the statements cost, by the database's own count, where its statistics or its indexes could mislead it.

use std::time::Duration;

use libtest_mimic::Trial;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DbBackend, EntityTrait, IsolationLevel, PaginatorTrait, QueryFilter,
    Statement, TransactionTrait,
};
use sea_orm_outbox::{
    Relay,
    entity::{OutboxMessage, Status, outbox_message::Column},
    lifecycle::{Outcome, RetryPolicy},
    publisher::RecordingPublisher,
    store::{BehindFailed, Claim, ClaimRequest, ClaimStrategy, Fence, Ordering, Position, Settlement, Store},
};
use tokio::time::{Instant, sleep};

use crate::support::{
    Kind, TestDatabase,
    cost::Meter,
    eventually, is_long, on_database, on_each_contract_database,
    rows::{LEASE, count, enqueue, fill, request, store},
};

pub(crate) fn tests() -> Vec<Trial> {
    let mut tests =
        on_each_contract_database("plans::finished_and_delayed_rows_cost_nothing", finished_and_delayed);
    for kind in Kind::CONTRACT {
        if kind != Kind::Sqlite {
            tests.push(on_database(kind, "plans::statistics_of_a_drained_queue_mislead_nobody", drained));
            tests.push(on_database(kind, "plans::statistics_of_few_keys_mislead_nobody", few_keys));
            tests.push(on_database(kind, "plans::a_plan_made_on_an_empty_table_is_not_kept", empty));
            tests.push(on_database(kind, "plans::an_idle_transaction_elsewhere_slows_nothing_down", idle));
            if is_long() {
                let name = "plans::a_relay_keeps_up_beside_a_transaction_of_ten_minutes";
                tests.push(on_database(kind, name, ten_minutes));
            }
        }
    }
    tests
}

const BATCH: u32 = 100;
/// Pages, rows or index entries for one row of a batch: more than any statement needs, and next to nothing of what
/// the table holds.
const FOR_EACH_ROW: u64 = 40;

/// Rows in every other state, each of them hundreds of times as many as a batch.
async fn finished_and_delayed(database: TestDatabase) {
    let db = &database.db;
    fill(
        db,
        if is_long() { 2_000_000 } else { 200_000 },
        &[
            ("status", "'SENT'"),
            ("available_at", "NULL"),
            ("sent_at", now(database.kind)),
            ("ordering_key", "CASE WHEN n < 100000 THEN 'hot' END"),
        ],
    )
    .await;
    let delayed = if is_long() { 1_000_000 } else { 30_000 };
    fill(db, delayed, &[("available_at", tomorrow(database.kind)), ("ordering_key", "'delayed'")]).await;

    let meter = Meter::new(&database).await;
    let unordered = store(&meter.db);
    for strategy in [ClaimStrategy::SkipLocked, ClaimStrategy::Optimistic] {
        // Fewer than a batch: nothing ends the search but the end of what is due.
        fill(db, BATCH - 50, &[]).await;
        let name = format!("{strategy:?}");
        let claims = affordable(&meter, &name, claim(&unordered, strategy, "test:1", None)).await;
        assert_eq!(claims.len(), 50, "{name}");
        let fences: Vec<Fence> = claims.iter().map(Claim::fence).collect();
        let found =
            affordable(&meter, "read claims back", unordered.claims_of("test:1", None)).await.unwrap();
        assert_eq!(found.len(), 50);
        let lost = affordable(&meter, "renew", unordered.renew(&fences, LEASE)).await.unwrap();
        assert!(lost.is_empty());
        let sweep = affordable(&meter, "look for stale claims", unordered.stale(None, 10_000)).await.unwrap();
        assert_eq!((sweep.stale.len(), sweep.next), (0, None));
        affordable(&meter, "settle", settle(&unordered, claims)).await;
    }
    for behind_failed in [BehindFailed::Hold, BehindFailed::Skip] {
        // One row of a key that has sent 100,000, the others of keys of their own.
        fill(db, BATCH - 50, &[("ordering_key", key(database.kind))]).await;
        let ordered = store(&meter.db).with_ordering(Ordering::PerKey { behind_failed }).unwrap();
        let name = format!("{behind_failed:?}");
        let claims =
            affordable(&meter, &name, claim(&ordered, ClaimStrategy::SkipLocked, "test:1", None)).await;
        assert_eq!(claims.len(), 50, "{name}");
        affordable(&meter, "settle", settle(&ordered, claims)).await;
    }
    let nothing = meter.cost(claim(&unordered, ClaimStrategy::SkipLocked, "test:1", None)).await;
    assert!(nothing.0.is_empty() && nothing.1 < 50, "a claim of nothing costs {}", nothing.1);
}

async fn affordable<T>(meter: &Meter, what: &str, work: impl Future<Output = T>) -> T {
    let (result, cost) = meter.cost(work).await;
    let limit = FOR_EACH_ROW * u64::from(BATCH);
    assert!(cost < limit, "{what} costs {cost}, more than {limit}");
    result
}

fn now(kind: Kind) -> &'static str {
    match kind {
        Kind::Sqlite => "strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now')",
        Kind::Postgres | Kind::OldestPostgres => "statement_timestamp()",
        Kind::MySql | Kind::MariaDb => "UTC_TIMESTAMP(6)",
    }
}

fn tomorrow(kind: Kind) -> &'static str {
    match kind {
        Kind::Sqlite => "strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now', '+1 day')",
        Kind::Postgres | Kind::OldestPostgres => "statement_timestamp() + interval '1 day'",
        Kind::MySql | Kind::MariaDb => "UTC_TIMESTAMP(6) + INTERVAL 1 DAY",
    }
}

fn key(kind: Kind) -> &'static str {
    match kind.backend() {
        DbBackend::MySql => "CASE WHEN n = 0 THEN 'hot' ELSE CONCAT('key-', n) END",
        _ => "CASE WHEN n = 0 THEN 'hot' ELSE 'key-' || n END",
    }
}

async fn claim(store: &Store, strategy: ClaimStrategy, name: &str, after: Option<&Position>) -> Vec<Claim> {
    let request = ClaimRequest { after, ..request(strategy, BATCH.into(), name, LEASE) };
    store.claim(&request).await.expect("the claim is carried out").claims
}

async fn settle(store: &Store, claims: Vec<Claim>) {
    let policy = RetryPolicy::default();
    let sent: Vec<_> =
        claims.into_iter().map(|claim| claim.settle(Outcome::Acknowledged, &policy, 0.0)).collect();
    let lost = store.settle(&sent).await.expect("the batch is settled");
    assert!(lost.is_empty());
}

/// What ten batches cost on their way from claim to settle.
async fn ten_batches(meter: &Meter, strategy: ClaimStrategy) -> u64 {
    let store = store(&meter.db);
    let (mut total, mut after) = (0, None);
    for batch in 0..10 {
        let name = format!("test:{batch}");
        let request = ClaimRequest { after: after.as_ref(), ..request(strategy, BATCH.into(), &name, LEASE) };
        let (claimed, cost) = meter.cost(store.claim(&request)).await;
        let claimed = claimed.expect("the claim is carried out");
        assert_eq!(claimed.claims.len(), BATCH as usize);
        after = claimed.next;
        total += cost + meter.cost(settle(&store, claimed.claims)).await.1;
    }
    let for_each_row = match strategy {
        // It looks at up to sixteen batches to take one, as chance has it.
        ClaimStrategy::Optimistic => 150,
        _ => FOR_EACH_ROW,
    };
    let limit = 10 * for_each_row * u64::from(BATCH);
    assert!(total < limit, "{strategy:?}: ten batches cost {total}, more than {limit}");
    total
}

/// The statistics change only when the test says so.
async fn freeze_statistics(database: &TestDatabase) {
    let sql = match database.kind {
        Kind::Postgres | Kind::OldestPostgres => "ALTER TABLE outbox_message SET (autovacuum_enabled = off)",
        Kind::MySql | Kind::MariaDb => {
            "ALTER TABLE outbox_message STATS_PERSISTENT = 1, STATS_AUTO_RECALC = 0"
        }
        Kind::Sqlite => return,
    };
    database.db.execute_unprepared(sql).await.unwrap();
}

async fn analyze(database: &TestDatabase) {
    let sql = match database.kind {
        Kind::MySql | Kind::MariaDb => "ANALYZE TABLE outbox_message",
        _ => "ANALYZE outbox_message",
    };
    // It answers with rows on MySQL.
    let statement = Statement::from_string(database.kind.backend(), sql);
    database.db.query_all_raw(statement).await.unwrap();
}

/// Whether two runs cannot be compared, each costing what chance has it.
fn by_chance(strategy: ClaimStrategy) -> bool {
    strategy == ClaimStrategy::Optimistic
}

async fn drained(database: TestDatabase) {
    let sent = [("status", "'SENT'"), ("available_at", "NULL"), ("sent_at", now(database.kind))];
    freeze_statistics(&database).await;
    // Somebody's own index, which looks as if it led straight to the few rows of a status.
    let index = match database.kind.backend() {
        DbBackend::MySql => "CREATE INDEX for_a_dashboard ON outbox_message (status)",
        _ => {
            "CREATE INDEX for_a_dashboard ON outbox_message (available_at, id) WHERE status = 'PENDING';
             CREATE INDEX for_another ON outbox_message (lease_until) WHERE status = 'PROCESSING'"
        }
    };
    database.db.execute_unprepared(index).await.unwrap();
    fill(&database.db, 20_000, &sent).await;
    analyze(&database).await;
    fill(&database.db, 20_000, &[]).await;
    for strategy in [ClaimStrategy::SkipLocked, ClaimStrategy::Optimistic] {
        let misled = ten_batches(&Meter::new(&database).await, strategy).await;
        analyze(&database).await;
        let fresh = ten_batches(&Meter::new(&database).await, strategy).await;
        assert!(
            by_chance(strategy) || misled * 4 <= fresh * 5,
            "{strategy:?}: {misled} with old statistics, {fresh} with new ones"
        );
    }
}

/// Statistics that promise a message of the key soon, wherever the search begins.
async fn few_keys(database: TestDatabase) {
    const SENT: u32 = 20_000;
    let db = &database.db;
    freeze_statistics(&database).await;
    let key = match database.kind.backend() {
        DbBackend::MySql => "CONCAT('key-', n % 5)",
        _ => "'key-' || n % 5",
    };
    fill(db, SENT, &[("ordering_key", key)]).await;
    analyze(&database).await;
    let now = now(database.kind);
    let sent = format!(
        "UPDATE outbox_message SET status = 'SENT', version = 2, available_at = NULL, sent_at = {now}"
    );
    db.execute_unprepared(&sent).await.unwrap();
    if database.kind.backend() == DbBackend::Postgres {
        // Old versions have a cost of their own.
        db.execute_unprepared("VACUUM outbox_message").await.unwrap();
    }
    for behind_failed in [BehindFailed::Hold, BehindFailed::Skip] {
        fill(db, BATCH / 4, &[("ordering_key", key)]).await;
        let meter = Meter::new(&database).await;
        let ordered = store(&meter.db).with_ordering(Ordering::PerKey { behind_failed }).unwrap();
        let name = format!("{behind_failed:?}");
        let claims =
            affordable(&meter, &name, claim(&ordered, ClaimStrategy::SkipLocked, "test:1", None)).await;
        assert_eq!(claims.len(), BATCH as usize / 4, "{name}");
        affordable(&meter, "settle", settle(&ordered, claims)).await;
    }
}

async fn empty(database: TestDatabase) {
    freeze_statistics(&database).await;
    for strategy in [ClaimStrategy::SkipLocked, ClaimStrategy::Optimistic] {
        database.db.execute_unprepared("DELETE FROM outbox_message").await.unwrap();
        let old = Meter::new(&database).await;
        let old_store = store(&old.db);
        // Often enough that PostgreSQL thinks of keeping a plan.
        for _ in 0..10 {
            assert_eq!(claim(&old_store, strategy, "test:1", None).await.len(), 0);
            let lost = old_store.settle(&[Settlement::release(Fence::new(1, 0))]).await;
            assert_eq!(lost.unwrap().len(), 1);
        }
        fill(&database.db, 20_000, &[]).await;
        let kept = ten_batches(&old, strategy).await;
        let fresh = ten_batches(&Meter::new(&database).await, strategy).await;
        assert!(
            by_chance(strategy) || kept * 4 <= fresh * 5,
            "{strategy:?}: {kept} on an old connection, {fresh} on a new one"
        );
    }
}

/// It keeps the server from removing what the batches leave behind, row versions and index entries.
async fn idle(database: TestDatabase) {
    const BATCHES: u64 = 30;
    let other = database.connect_again().await;
    let snapshot = other
        .begin_with_config(Some(IsolationLevel::RepeatableRead), None)
        .await
        .expect("a transaction begins");
    // The snapshot is taken by the first query, of whatever table.
    snapshot.execute_unprepared("SELECT * FROM outbox_message").await.unwrap();
    fill(&database.db, BATCH * 30, &[]).await;

    let meter = Meter::new(&database).await;
    let store = store(&meter.db);
    let (mut costs, mut after): (Vec<u64>, Option<Position>) = (Vec::new(), None);
    for batch in 0..BATCHES {
        let name = format!("test:{batch}");
        let request = ClaimRequest {
            after: after.as_ref(),
            ..request(ClaimStrategy::SkipLocked, BATCH.into(), &name, LEASE)
        };
        let (claimed, cost) = meter.cost(store.claim(&request)).await;
        let claimed = claimed.unwrap();
        assert_eq!(claimed.claims.len(), BATCH as usize);
        costs.push(cost);
        after = claimed.next;
        settle(&store, claimed.claims).await;
    }
    let (first, last): (u64, u64) = (costs[..5].iter().sum(), costs[costs.len() - 5..].iter().sum());
    assert!(last <= first * 2, "the claims cost more and more: {costs:?}");
    assert_eq!(count(&database.db, Status::Sent).await, (BATCH * 30) as usize);
    snapshot.rollback().await.unwrap();
}

/// Fifty messages a second, and a snapshot that keeps every version of them.
async fn ten_minutes(database: TestDatabase) {
    let other = database.connect_again().await;
    let snapshot = other
        .begin_with_config(Some(IsolationLevel::RepeatableRead), None)
        .await
        .expect("a transaction begins");
    snapshot.execute_unprepared("SELECT * FROM outbox_message").await.unwrap();
    let relay = Relay::builder(database.db.clone(), RecordingPublisher::new());
    let relay = relay.poll_every(Duration::from_millis(100)).build().unwrap().spawn();
    let begun = Instant::now();
    let mut enqueued = 0;
    while begun.elapsed() < Duration::from_secs(600) {
        for _ in 0..50 {
            enqueue(&database.db, "t", 5).await;
            enqueued += 5;
            sleep(Duration::from_millis(100)).await;
        }
        // All but the last few are out, five seconds later.
        eventually("the relay to keep up", || async {
            let waiting = OutboxMessage::find().filter(Column::Status.ne(Status::Sent)).count(&database.db);
            (waiting.await.unwrap() < 100).then_some(())
        })
        .await;
    }
    snapshot.rollback().await.unwrap();
    eventually("all to be sent", || async {
        (count(&database.db, Status::Sent).await == enqueued).then_some(())
    })
    .await;
    let report = relay.shutdown().await.unwrap();
    assert_eq!((report.sent, report.lost, report.returned), (enqueued as u64, 0, 0), "{report}");
}
