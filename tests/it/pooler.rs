//! Behind PgBouncer in transaction mode, where each transaction may meet another connection of the server.

use std::{collections::HashSet, sync::Arc, time::Duration};

use futures_util::{StreamExt, TryStreamExt, stream};
use libtest_mimic::Trial;
use sea_orm::{
    ConnectionTrait, DatabaseConnection, DatabaseTransaction, DbBackend, Statement, TransactionTrait,
};
use sea_orm_outbox::{
    BehindFailed, ClaimStrategy, NewMessage, Ordering, Outbox, Relay, RelayBuilder, RelayHandle, Waker,
    entity::Status,
    migration::{MigratorTrait, NotifyingMigrator},
    publisher::RecordingPublisher,
};
use tokio::time::{Instant, sleep};

use crate::support::{
    Kind, TestDatabase,
    database::connect,
    eventually,
    log::Log,
    on_database,
    rows::{LEASE, claim, count, enqueue, rows, store},
    servers::{self, POOLED},
    stuck::Stuck,
};

pub(crate) fn tests() -> Vec<Trial> {
    vec![
        on_database(Kind::Postgres, "pooler::relays_behind_it_send_every_message_once", send_once),
        on_database(Kind::Postgres, "pooler::keys_keep_their_order_behind_it", in_order),
        on_database(
            Kind::Postgres,
            "pooler::leases_are_renewed_and_stale_claims_swept_behind_it",
            renew_and_sweep,
        ),
        on_database(
            Kind::Postgres,
            "pooler::what_our_transactions_set_is_not_there_for_others",
            nothing_leaks,
        ),
        on_database(
            Kind::Postgres,
            "pooler::one_warning_says_that_no_notification_arrives_and_relays_go_on_looking",
            deaf,
        ),
        on_database(Kind::Postgres, "pooler::without_one_notifications_arrive_and_nothing_is_said", hears),
    ]
}

/// The pool of an application behind the pooler.
async fn pooled(database: &TestDatabase) -> DatabaseConnection {
    let pooler = tokio::task::spawn_blocking(servers::pooler_url).await.unwrap();
    let server = pooler.rsplit_once('/').unwrap().0;
    let name = database.url.rsplit_once('/').unwrap().1;
    connect(&format!("{server}/{name}")).await
}

fn quick<P: sea_orm_outbox::Publisher>(db: &DatabaseConnection, publisher: P) -> RelayBuilder<P> {
    Relay::builder(db.clone(), publisher).poll_every(Duration::from_millis(20)).batch_size(50)
}

async fn until_sent(database: &TestDatabase, messages: usize) {
    eventually(&format!("{messages} messages to be sent"), || async {
        (count(&database.db, Status::Sent).await == messages).then_some(())
    })
    .await;
}

async fn shut_down(relays: Vec<RelayHandle>) {
    for relay in relays {
        relay.shutdown().await.unwrap();
    }
}

/// Writes messages in transactions of the application, several at a time.
async fn commit(db: &DatabaseConnection, messages: usize) {
    const AT_ONCE: usize = 20;
    let transactions = stream::iter(0..messages / AT_ONCE).map(|_| async {
        let txn = db.begin().await?;
        for number in 0..AT_ONCE {
            let message = NewMessage::json("t", &number).unwrap();
            Outbox::new().enqueue(&txn, message).await.expect("it is enqueued");
        }
        txn.commit().await
    });
    transactions.buffer_unordered(8).try_collect::<Vec<_>>().await.unwrap();
}

async fn send_once(database: TestDatabase) {
    const MESSAGES: usize = 2_000;
    let publisher = Arc::new(RecordingPublisher::new());
    let mut relays = Vec::new();
    for strategy in [ClaimStrategy::SkipLocked, ClaimStrategy::SkipLocked, ClaimStrategy::Optimistic] {
        let db = pooled(&database).await;
        relays.push(quick(&db, publisher.clone()).strategy(strategy).build().unwrap().spawn());
    }
    commit(&pooled(&database).await, MESSAGES).await;
    until_sent(&database, MESSAGES).await;
    assert!(relays.iter().all(|relay| relay.health().is_ready()));
    shut_down(relays).await;
    for row in rows(&database.db).await {
        assert_eq!((row.version, row.attempts), (2, 1), "claimed once and settled once");
    }
    let mut published: Vec<_> = publisher.messages().iter().map(|message| message.id()).collect();
    published.sort_unstable();
    published.dedup();
    assert_eq!((publisher.messages().len(), published.len()), (MESSAGES, MESSAGES));
}

async fn in_order(database: TestDatabase) {
    const KEYS: usize = 5;
    const MESSAGES: usize = 500;
    let messages = (0..MESSAGES)
        .map(|number| NewMessage::json("t", &number).unwrap().ordering_key(format!("{}", number % KEYS)));
    Outbox::new().enqueue_many(&database.db, messages).await.unwrap();
    let publisher = Arc::new(RecordingPublisher::new());
    let mut relays = Vec::new();
    for _ in 0..3 {
        let db = pooled(&database).await;
        let relay = quick(&db, publisher.clone())
            .ordering(Ordering::PerKey { behind_failed: BehindFailed::Hold })
            .batch_size(20);
        relays.push(relay.build().unwrap().spawn());
    }
    until_sent(&database, MESSAGES).await;
    shut_down(relays).await;
    let numbers: Vec<usize> = publisher
        .messages()
        .iter()
        .map(|message| serde_json::from_slice(message.payload()).unwrap())
        .collect();
    assert_eq!(numbers.len(), MESSAGES);
    for key in 0..KEYS {
        let of_key: Vec<_> = numbers.iter().filter(|number| *number % KEYS == key).collect();
        assert!(of_key.is_sorted(), "{of_key:?}");
    }
}

async fn renew_and_sweep(database: TestDatabase) {
    let db = pooled(&database).await;
    enqueue(&database.db, "t", 5).await;
    let abandoned = claim(&store(&db), 5, Duration::from_millis(100)).await;
    assert_eq!(abandoned.claims.len(), 5);
    enqueue(&database.db, "stuck", 5).await;
    let publisher = Stuck::on("stuck");
    let relay = quick(&db, publisher.clone())
        .lease(Duration::from_secs(5))
        .publish_timeout(Duration::from_secs(4))
        .renew_every(Duration::from_millis(200))
        .sweep_every(Duration::from_millis(50));
    let relay = relay.build().unwrap().spawn();
    publisher.until_waiting(5).await;
    let lease_ends = async || rows(&database.db).await[5..].iter().map(|row| row.lease_until).min().unwrap();
    for _ in 0..3 {
        let before = lease_ends().await;
        eventually("the leases to be renewed", || async { (lease_ends().await > before).then_some(()) })
            .await;
    }
    publisher.let_go();
    until_sent(&database, 10).await;
    relay.shutdown().await.unwrap();
    let attempts: Vec<_> = rows(&database.db).await.iter().map(|row| row.attempts).collect();
    assert_eq!(attempts, [2, 2, 2, 2, 2, 1, 1, 1, 1, 1], "the first five were swept");
}

/// Everything that a session can set except what the pooler does not pass on.
async fn settings(txn: &DatabaseTransaction) -> Vec<(String, String)> {
    let all = "SELECT name, setting FROM pg_settings WHERE context IN ('user', 'superuser')
               AND name NOT IN ('application_name', 'extra_float_digits') ORDER BY name";
    let rows = txn.query_all_raw(Statement::from_string(DbBackend::Postgres, all)).await.unwrap();
    rows.iter().map(|row| (row.try_get_by_index(0).unwrap(), row.try_get_by_index(1).unwrap())).collect()
}

async fn nothing_leaks(database: TestDatabase) {
    let db = pooled(&database).await;
    let expected = settings(&database.db.begin().await.unwrap()).await;
    let publisher = Arc::new(RecordingPublisher::new());
    let relay = quick(&db, publisher.clone())
        .ordering(Ordering::PerKey { behind_failed: BehindFailed::Hold })
        .sweep_every(Duration::from_millis(20))
        .build()
        .unwrap()
        .spawn();
    // While the relay is at work, on whichever connection is free.
    let other = pooled(&database).await;
    for round in 1..=10 {
        enqueue(&database.db, "t", 100).await;
        let txn = other.begin().await.unwrap();
        assert_eq!(differing(&expected, settings(&txn).await), []);
        txn.commit().await.unwrap();
        until_sent(&database, round * 100).await;
    }
    relay.shutdown().await.unwrap();
    // Looks that are given up, at whatever they are.
    let store = store(&db).with_statement_timeout(Duration::from_millis(1));
    for _ in 0..20 {
        let _ = store.stale(None, 1_000).await;
    }
    // Afterwards on each of them.
    for txn in on_each_connection(&other).await {
        assert_eq!(differing(&expected, settings(&txn).await), []);
    }
}

fn differing(expected: &[(String, String)], found: Vec<(String, String)>) -> Vec<(String, String)> {
    found.into_iter().filter(|setting| !expected.contains(setting)).collect()
}

/// A transaction on each of the pooler's connections to the server.
async fn on_each_connection(db: &DatabaseConnection) -> Vec<DatabaseTransaction> {
    let mut transactions = Vec::new();
    for _ in 0..POOLED {
        transactions.push(db.begin().await.unwrap());
    }
    let mut pids = HashSet::new();
    for txn in &transactions {
        let pid = Statement::from_string(DbBackend::Postgres, "SELECT pg_backend_pid()");
        let pid: i32 = txn.query_one_raw(pid).await.unwrap().unwrap().try_get_by_index(0).unwrap();
        pids.insert(pid);
    }
    assert_eq!(pids.len(), POOLED);
    transactions
}

/// How soon it is tried again whether notifications arrive.
const PATIENCE: Duration = Duration::from_millis(300);

async fn deaf(database: TestDatabase) {
    NotifyingMigrator::up(&database.db, None).await.unwrap();
    let log = Log::default();
    let kept = log.clone();
    let database = Arc::new(database);
    let behind = database.clone();
    log.keep(async move || {
        let db = pooled(&behind).await;
        let waker = Waker::listening_impatiently(&db, "outbox_message", PATIENCE).unwrap();
        let relay = Relay::builder(db.clone(), Arc::new(RecordingPublisher::new()))
            .poll_every(Duration::from_millis(500))
            .waker(waker);
        let relay = relay.build().unwrap().spawn();
        eventually("the warning", || async {
            (kept.count("WARN", "no notification arrives") > 0).then_some(())
        })
        .await;
        for round in 1..=3 {
            // Past the looks of the start.
            sleep(Duration::from_millis(700)).await;
            let began = Instant::now();
            commit(&db, 20).await;
            until_sent(&behind, 20 * round).await;
            // Twice the interval and more: the machine may be busy.
            assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        }
        eventually("more tries to listen", || async {
            (kept.count("DEBUG", "still no notification arrives") >= 3).then_some(())
        })
        .await;
        relay.shutdown().await.unwrap();
        // It would stay there, and notifications would come to whoever is given the connection.
        for txn in on_each_connection(&db).await {
            let channels = Statement::from_string(DbBackend::Postgres, "SELECT pg_listening_channels()");
            assert_eq!(txn.query_all_raw(channels).await.unwrap().len(), 0, "nobody listens");
        }
    })
    .await;
    let said = log.text();
    assert_eq!(log.count("WARN", "outbox::wake"), 1, "{said}");
    assert!(rows(&database.db).await.iter().all(|row| (row.version, row.attempts) == (2, 1)));
}

async fn hears(database: TestDatabase) {
    NotifyingMigrator::up(&database.db, None).await.unwrap();
    let log = Log::default();
    log.keep(async move || {
        let db = database.connect_again().await;
        let waker = Waker::listening_impatiently(&db, "outbox_message", 5 * PATIENCE).unwrap();
        let relay = Relay::builder(db.clone(), Arc::new(RecordingPublisher::new()))
            .poll_every(LEASE * 10)
            .sweep_every(LEASE * 10)
            .waker(waker);
        let relay = relay.build().unwrap().spawn();
        // Over several tries whether notifications arrive.
        for round in 1..=5 {
            sleep(3 * PATIENCE).await;
            enqueue(&database.db, "t", 1).await;
            until_sent(&database, round).await;
        }
        relay.shutdown().await.unwrap();
    })
    .await;
    assert_eq!(log.count("WARN", "outbox::wake"), 0, "{}", log.text());
}
