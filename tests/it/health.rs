//! A relay is paused, and asked how it is doing.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use libtest_mimic::Trial;
use sea_orm::ConnectionTrait;
use sea_orm_outbox::{
    Ack, Health, Message, PublishError, Publisher, Relay, RelayBuilder, RelayHandle, entity::Status,
};

use crate::support::{
    TestDatabase, eventually,
    log::Log,
    on_each_database,
    rows::{LEASE, claim, count, enqueue, let_leases_end, store},
    stuck::Stuck,
};

pub(crate) fn tests() -> Vec<Trial> {
    [
        on_each_database("health::a_paused_relay_finishes_what_it_holds_and_claims_no_more", pauses),
        on_each_database("health::what_is_away_is_named_and_comes_back", names),
        on_each_database("health::a_relay_that_does_not_sweep_says_when_nobody_does", nobody_sweeps),
        on_each_database("health::it_is_ready_again_a_lease_after_the_database_failed", ready_again),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn quick<P: Publisher>(database: &TestDatabase, publisher: P) -> RelayBuilder<P> {
    Relay::builder(database.db.clone(), publisher)
        .poll_every(Duration::from_millis(20))
        .sweep_every(Duration::from_millis(50))
}

async fn until(relay: &RelayHandle, what: &str, condition: fn(&Health) -> bool) -> Health {
    eventually(what, || async { Some(relay.health()).filter(condition) }).await
}

async fn until_sent(database: &TestDatabase, expected: usize) {
    eventually(&format!("{expected} messages to be sent"), || async {
        (count(&database.db, Status::Sent).await == expected).then_some(())
    })
    .await;
}

async fn nobody_sweeps(database: TestDatabase) {
    enqueue(&database.db, "t", 1).await;
    assert_eq!(claim(&store(&database.db), 1, LEASE).await.claims.len(), 1);
    let_leases_end(&database.db).await;
    let log = Log::default();
    let kept = log.clone();
    log.keep(async move || {
        let relay = quick(&database, Stuck::on("stuck")).sweep(false).build().unwrap().spawn();
        eventually("the warning", || async { (kept.count("WARN", "stale claims stay") == 1).then_some(()) })
            .await;
        assert_eq!(count(&database.db, Status::Processing).await, 1);
        assert!(relay.health().is_ready());
        let sweeping = quick(&database, Stuck::on("stuck")).build().unwrap().spawn();
        until_sent(&database, 1).await;
        for relay in [relay, sweeping] {
            relay.shutdown().await.unwrap();
        }
    })
    .await;
    assert_eq!(log.count("WARN", "does not sweep"), 1, "{}", log.text());
    assert_eq!(log.count("WARN", "stale claims stay"), 1, "{}", log.text());
}

async fn pauses(database: TestDatabase) {
    enqueue(&database.db, "stuck", 1).await;
    let publisher = Stuck::on("stuck");
    let relay = quick(&database, publisher.clone()).build().unwrap().spawn();
    publisher.until_waiting(1).await;
    relay.pause();
    assert!(relay.health().paused && !relay.health().is_ready());
    enqueue(&database.db, "t", 5).await;
    publisher.let_go();
    until_sent(&database, 1).await;
    // Claims of others are swept all the same; several sweeps later nothing has been claimed.
    let stale = "UPDATE outbox_message SET status = 'PROCESSING', attempts = 1, version = 1, claimed_by = 'dead:1', \
                 lease_until = available_at WHERE topic = 't'";
    for _ in 0..3 {
        database.db.execute_unprepared(stale).await.unwrap();
        let_leases_end(&database.db).await;
        eventually("a sweep", || async { (count(&database.db, Status::Pending).await == 5).then_some(()) })
            .await;
    }
    relay.resume();
    until_sent(&database, 6).await;
    until(&relay, "the relay to be ready", Health::is_ready).await;
    assert!(!relay.health().paused);
    relay.pause();
    let report = relay.shutdown().await.unwrap();
    assert_eq!((report.claimed, report.returned), (6, 15), "{report}");
    assert!(!relay.health().running);
}

/// A broker that comes and goes.
struct Broker(AtomicBool);

impl Publisher for Broker {
    async fn publish(&self, _: &Message) -> Result<Ack, PublishError> {
        if self.0.load(Ordering::SeqCst) { Ok(Ack::new()) } else { Err(PublishError::unavailable("away")) }
    }

    fn is_connected(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

async fn names(database: TestDatabase) {
    let broker = Arc::new(Broker(AtomicBool::new(true)));
    let relay = quick(&database, broker.clone()).build().unwrap().spawn();
    until(&relay, "the relay to be ready", Health::is_ready).await;
    broker.0.store(false, Ordering::SeqCst);
    let health = until(&relay, "the broker to be missed", |health| !health.broker).await;
    assert!(health.database && !health.is_ready(), "{health:?}");
    enqueue(&database.db, "t", 1).await;
    broker.0.store(true, Ordering::SeqCst);
    until(&relay, "the broker to be back", |health| health.broker).await;
    until_sent(&database, 1).await;

    let rename = async |from: &str, to: &str| {
        database.db.execute_unprepared(&format!("ALTER TABLE {from} RENAME TO {to}")).await.unwrap();
    };
    rename("outbox_message", "elsewhere").await;
    let health = until(&relay, "the table to be missed", |health| !health.database).await;
    assert!(health.broker && !health.is_ready(), "{health:?}");
    rename("elsewhere", "outbox_message").await;
    // The sweep waits for a lease before it looks again; what claims and settles does not.
    enqueue(&database.db, "t", 1).await;
    until_sent(&database, 2).await;
    relay.shutdown().await.unwrap();
}

async fn ready_again(database: TestDatabase) {
    let lease = Duration::from_millis(400);
    let relay = quick(&database, Arc::new(Broker(AtomicBool::new(true))));
    let relay = relay.lease(lease).publish_timeout(lease / 4).renew_every(lease / 4);
    let relay = relay.statement_timeout(Duration::from_secs(20)).build().unwrap().spawn();
    until(&relay, "the relay to be ready", Health::is_ready).await;
    database.db.execute_unprepared("ALTER TABLE outbox_message RENAME TO elsewhere").await.unwrap();
    let health = until(&relay, "the sweep to fail", |health| !health.database).await;
    assert!(!health.is_ready(), "{health:?}");
    database.db.execute_unprepared("ALTER TABLE elsewhere RENAME TO outbox_message").await.unwrap();
    // It looks again after a lease.
    let health = until(&relay, "the relay to be ready again", Health::is_ready).await;
    assert!(health.swept < Duration::from_secs(10), "{health:?}");
    relay.shutdown().await.unwrap();
}
