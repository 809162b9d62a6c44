//! The database goes away and comes back.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use libtest_mimic::Trial;
use sea_orm::{ConnectOptions, ConnectionTrait, Database, DatabaseConnection};
use sea_orm_outbox::{
    DestinationCheck, Relay, RelayBuilder, RelayHandle, Waker,
    entity::Status,
    migration::{MigratorTrait, NotifyingMigrator},
    publisher::RecordingPublisher,
    store::{ClaimStrategy, Store, StoreError},
};

use crate::support::{
    Kind, TestDatabase, eventually,
    log::Log,
    on_database,
    proxy::Proxy,
    rows::{LEASE, count, enqueue, request, rows},
    servers,
    stuck::Stuck,
    within,
};

pub(crate) fn tests() -> Vec<Trial> {
    vec![
        on_database(
            Kind::Postgres,
            "outage::a_statement_given_up_leaves_no_transaction_in_the_pool",
            given_up,
        ),
        on_database(Kind::Postgres, "outage::a_listener_that_is_cut_off_listens_again", cut_listener),
        on_database(Kind::Postgres, "outage::a_claim_whose_answer_is_lost_is_given_back", lost_answer),
        on_database(
            Kind::Postgres,
            "outage::a_claim_whose_answer_is_lost_is_given_back_by_a_relay_that_stops",
            lost_answer_and_stop,
        ),
        on_database(Kind::Postgres, "outage::a_claim_that_cannot_be_renewed_is_not_published", not_renewed),
        on_database(Kind::Postgres, "outage::a_database_that_comes_back_costs_no_attempt", comes_back),
        on_database(Kind::Postgres, "outage::a_relay_stops_although_the_database_is_gone", stops_without),
        on_database(Kind::Postgres, "outage::a_relay_waits_for_a_database_that_is_not_there_yet", not_yet),
    ]
}

fn quick(
    db: &DatabaseConnection,
    publisher: Arc<RecordingPublisher>,
) -> RelayBuilder<Arc<RecordingPublisher>> {
    Relay::builder(db.clone(), publisher)
        .poll_every(Duration::from_millis(20))
        .sweep_every(Duration::from_millis(50))
        .statement_timeout(Duration::from_secs(1))
        .grace(Duration::from_secs(1))
}

/// A pool that does not wait long.
async fn pool(url: &str, connections: u32) -> DatabaseConnection {
    let mut options = ConnectOptions::new(url);
    options
        .sqlx_logging(false)
        .max_connections(connections)
        .acquire_timeout(Duration::from_secs(1))
        .test_before_acquire(false);
    Database::connect(options).await.unwrap()
}

/// Lets nobody into the database any more, and throws out whoever is in it.
async fn take_away(admin: &DatabaseConnection, name: &str) {
    allow(admin, name, false).await;
    let sql = format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'");
    admin.execute_unprepared(&sql).await.unwrap();
}

async fn allow(admin: &DatabaseConnection, name: &str, allowed: bool) {
    let sql = format!("ALTER DATABASE {name} ALLOW_CONNECTIONS {allowed}");
    admin.execute_unprepared(&sql).await.unwrap();
}

async fn admin(database: &TestDatabase) -> (DatabaseConnection, String) {
    let name = database.url.rsplit_once('/').unwrap().1.to_owned();
    (pool(&servers::postgres_url(), 2).await, name)
}

/// A pool whose connections go through a proxy.
async fn proxied(database: &TestDatabase, connections: u32) -> (Proxy, DatabaseConnection) {
    let (_, address) = database.url.rsplit_once('@').unwrap();
    let (server, name) = address.split_once('/').unwrap();
    let proxy = Proxy::to(server).await;
    let url = format!("postgres://postgres:postgres@127.0.0.1:{}/{name}", proxy.port);
    let db = pool(&url, connections).await;
    (proxy, db)
}

async fn cut_listener(database: TestDatabase) {
    NotifyingMigrator::up(&database.db, None).await.unwrap();
    let log = Log::default();
    let kept = log.clone();
    log.keep(async move || {
        let (proxy, db) = proxied(&database, 5).await;
        let waker = Waker::listening_impatiently(&db, "outbox_message", Duration::from_millis(300)).unwrap();
        let relay = quick(&db, Arc::new(RecordingPublisher::new())).waker(waker);
        let relay = relay.poll_every(Duration::from_secs(600)).build().unwrap().spawn();
        for round in 1..=3 {
            // Only a notification, or the look after listening again, finds it.
            enqueue(&database.db, "t", 1).await;
            eventually("the message to be sent", || async {
                (count(&database.db, Status::Sent).await == round).then_some(())
            })
            .await;
            eventually("it to hear itself", || async {
                (kept.count("DEBUG", "notifications arrive") == round).then_some(())
            })
            .await;
            proxy.cut_listeners();
        }
        relay.shutdown().await.unwrap();
    })
    .await;
    assert_eq!(log.count("WARN", "no notification arrives"), 0, "{}", log.text());
}

/// A relay whose claim of ten messages is made, and whose answer does not arrive.
async fn lose_answer(
    database: &TestDatabase,
    publisher: Arc<RecordingPublisher>,
) -> (Proxy, DatabaseConnection, RelayHandle) {
    enqueue(&database.db, "t", 10).await;
    let (proxy, db) = proxied(database, 5).await;
    let relay = quick(&db, publisher).sweep_every(Duration::from_secs(60)).grace(Duration::from_secs(10));
    let relay = relay.destination_check(DestinationCheck::Skip).build().unwrap().spawn();
    // The looks at the table come first, and are let through.
    relay.pause();
    eventually("the relay to be at work", || async { relay.health().running.then_some(()) }).await;
    proxy.freeze_at_commit(1);
    relay.resume();
    eventually("the claim to be made and its answer to be lost", || async {
        (proxy.is_frozen() && count(&database.db, Status::Processing).await == 10).then_some(())
    })
    .await;
    eventually("the relay to give up waiting", || async { (!relay.health().database).then_some(()) }).await;
    (proxy, db, relay)
}

async fn lost_answer(database: TestDatabase) {
    let publisher = Arc::new(RecordingPublisher::new());
    let (proxy, _db, relay) = lose_answer(&database, publisher.clone()).await;
    assert_eq!(publisher.messages().len(), 0, "nothing is published without a claim");
    proxy.thaw();
    eventually("the messages to be sent", || async {
        (count(&database.db, Status::Sent).await == 10).then_some(())
    })
    .await;
    let report = relay.shutdown().await.unwrap();
    assert_eq!((report.released, report.returned), (10, 0), "{report}");
    assert!(rows(&database.db).await.iter().all(|row| row.attempts == 1), "no attempt was spent");
}

async fn lost_answer_and_stop(database: TestDatabase) {
    let (proxy, _db, relay) = lose_answer(&database, Arc::default()).await;
    // It is told to stop before it can know that the database answers again.
    let (report, ()) = tokio::join!(relay.shutdown(), async { proxy.thaw() });
    let report = report.unwrap();
    assert_eq!((report.released, report.sent), (10, 0), "{report}");
    assert!(rows(&database.db).await.iter().all(|row| row.status == Status::Pending && row.attempts == 0));
}

/// Somebody else may have swept it by the time that the broker answers.
async fn not_renewed(database: TestDatabase) {
    enqueue(&database.db, "stuck", 1).await;
    enqueue(&database.db, "t", 3).await;
    let (proxy, db) = proxied(&database, 5).await;
    let publisher = Stuck::on("stuck");
    let relay = Relay::builder(db, publisher.clone())
        .max_in_flight(1)
        .poll_every(Duration::from_millis(20))
        .lease(Duration::from_secs(3))
        .publish_timeout(Duration::from_millis(2_500))
        .renew_every(Duration::from_millis(200))
        .sweep_every(Duration::from_secs(60))
        .statement_timeout(Duration::from_secs(1))
        .build()
        .unwrap()
        .spawn();
    publisher.until_waiting(1).await;
    proxy.freeze();
    // Less than a publish may take is left of every lease.
    tokio::time::sleep(Duration::from_secs(1)).await;
    publisher.let_go();
    publisher.until_waiting(0).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(publisher.others.load(Ordering::SeqCst), 0, "a row was published that may be lost");
    proxy.thaw();
    eventually("everything to be sent", || async {
        (count(&database.db, Status::Sent).await == 4).then_some(())
    })
    .await;
    relay.shutdown().await.unwrap();
    assert!(rows(&database.db).await.iter().all(|row| row.attempts == 1));
}

/// The next user of the connection must not find itself in a transaction that nobody commits.
async fn given_up(database: TestDatabase) {
    let (proxy, db) = proxied(&database, 1).await;
    enqueue(&db, "t", 1).await;
    let store = Store::new(db.clone()).unwrap().with_statement_timeout(Duration::from_millis(200));
    // The pool looks at a connection when it comes back; the statement is to find it idle.
    eventually("the connection to be idle", || async {
        (db.get_postgres_connection_pool().num_idle() == 1).then_some(())
    })
    .await;
    proxy.freeze();
    let error = store.claim(&request(ClaimStrategy::SkipLocked, 1, "test:1", LEASE)).await.unwrap_err();
    assert!(matches!(error, StoreError::Timeout { .. }), "{error}");
    proxy.thaw();
    eventually("the connection to be of use again", || async {
        db.execute_unprepared("SELECT 1").await.ok().map(|_| ())
    })
    .await;
    enqueue(&db, "t", 1).await;
    assert_eq!(rows(&database.db).await.len(), 2, "the message was not committed");
}

async fn comes_back(database: TestDatabase) {
    const MESSAGES: usize = 500;
    let (admin, name) = admin(&database).await;
    let db = pool(&database.url, 10).await;
    enqueue(&db, "t", MESSAGES / 2).await;
    let publisher = Arc::new(RecordingPublisher::new());
    let relay = quick(&db, publisher.clone()).batch_size(10).lease(LEASE).build().unwrap().spawn();
    for round in 1..=3 {
        take_away(&admin, &name).await;
        // Long enough for several tries of everything.
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        allow(&admin, &name, true).await;
        eventually("the database to be of use again", || async {
            db.execute_unprepared("SELECT 1").await.ok().map(|_| ())
        })
        .await;
        if round == 2 {
            enqueue(&db, "t", MESSAGES / 2).await;
        }
    }
    eventually("everything to be sent", || async {
        (count(&db, Status::Sent).await == MESSAGES).then_some(())
    })
    .await;
    let report = relay.shutdown().await.unwrap();
    assert_eq!((report.failed, report.retried, report.returned), (0, 0, 0), "{report}");
    assert!(rows(&db).await.iter().all(|row| row.attempts == 1));
    let mut published: Vec<_> = publisher.messages().iter().map(|message| message.id()).collect();
    published.sort_unstable();
    published.dedup();
    assert_eq!(published.len(), MESSAGES);
}

async fn stops_without(database: TestDatabase) {
    let (admin, name) = admin(&database).await;
    let db = pool(&database.url, 10).await;
    // A batch of one is always full: the settler must still see that it is over.
    let publisher = Arc::new(RecordingPublisher::answering(|_| {
        std::thread::sleep(Duration::from_millis(5));
        Ok(sea_orm_outbox::Ack::new())
    }));
    enqueue(&db, "t", 1_000).await;
    let relay = quick(&db, publisher.clone()).batch_size(1).build().unwrap().spawn();
    eventually("the relay to work", || async { (publisher.messages().len() > 10).then_some(()) }).await;
    take_away(&admin, &name).await;
    let stopped = within(Duration::from_secs(8), "the relay to stop", relay.shutdown()).await;
    stopped.unwrap();
    allow(&admin, &name, true).await;
}

async fn not_yet(database: TestDatabase) {
    let (admin, name) = admin(&database).await;
    let db = pool(&database.url, 2).await;
    enqueue(&db, "t", 1).await;
    take_away(&admin, &name).await;
    let relay = quick(&db, Arc::new(RecordingPublisher::new())).build().unwrap().spawn();
    tokio::time::sleep(Duration::from_millis(500)).await;
    allow(&admin, &name, true).await;
    eventually("the message to be sent", || async {
        (count(&database.connect_again().await, Status::Sent).await == 1).then_some(())
    })
    .await;
    relay.shutdown().await.unwrap();
}
