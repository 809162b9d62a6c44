//! A message need not wait for the next look at the queue.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use libtest_mimic::Trial;
use sea_orm::{
    ConnectionTrait, DatabaseConnection, DbBackend, DbErr, Statement, TransactionError, TransactionTrait,
};
use sea_orm_outbox::{
    EnqueueError, NewMessage, Outbox, Relay, RelayBuilder, Waker,
    entity::Status,
    migration::{MigratorTrait, NotifyingMigrator},
    publisher::RecordingPublisher,
};
use tokio::time::Instant;

use crate::support::{
    Kind, TestDatabase, eventually, on_database, on_each_database,
    rows::{count, enqueue, rows},
};

pub(crate) fn tests() -> Vec<Trial> {
    let mut tests: Vec<Trial> = [
        on_each_database("wake::a_commit_wakes_a_relay_and_a_rollback_does_not", commit),
        on_each_database("wake::the_handle_wakes_its_relay", handle),
        on_each_database("wake::of_fifty_idle_relays_one_looks", fifty),
        on_each_database("wake::a_backlog_wakes_the_others", backlog),
    ]
    .into_iter()
    .flatten()
    .collect();
    for kind in [Kind::Postgres, Kind::OldestPostgres] {
        tests.push(on_database(
            kind,
            "wake::a_commit_of_another_process_wakes_one_of_those_that_listen",
            listens,
        ));
    }
    tests
}

/// A relay that would not look again while a test lasts.
fn sleepy(
    db: &DatabaseConnection,
    publisher: Arc<RecordingPublisher>,
) -> RelayBuilder<Arc<RecordingPublisher>> {
    Relay::builder(db.clone(), publisher)
        .poll_every(Duration::from_secs(600))
        .sweep_every(Duration::from_secs(600))
}

fn message() -> NewMessage {
    NewMessage::bytes("t", "text/plain", "x")
}

/// A pool that counts the claims that go through it.
async fn counting(database: &TestDatabase) -> (DatabaseConnection, Arc<AtomicUsize>) {
    let mut db = database.connect_again().await;
    let claims = Arc::new(AtomicUsize::new(0));
    let counted = claims.clone();
    db.set_metric_callback(move |info| {
        // Only a claim looks for so many that are pending; the sweep looks for stale ones as well.
        let sql = &info.statement.sql;
        if sql.contains("LIMIT") && sql.contains("PENDING") && !sql.contains("stale") {
            counted.fetch_add(1, Ordering::SeqCst);
        }
    });
    (db, claims)
}

/// Waits until nobody claims any more.
async fn until_idle(claims: &AtomicUsize) -> usize {
    let (mut seen, mut since) = (claims.load(Ordering::SeqCst), Instant::now());
    eventually("the relays to become idle", || {
        let now = claims.load(Ordering::SeqCst);
        if now != seen {
            (seen, since) = (now, Instant::now());
        }
        let idle = since.elapsed() > Duration::from_millis(300);
        async move { idle.then_some(now) }
    })
    .await
}

async fn commit(database: TestDatabase) {
    let (db, claims) = counting(&database).await;
    let publisher = Arc::new(RecordingPublisher::new());
    let waker = Waker::new();
    let relay = sleepy(&db, publisher.clone()).waker(waker.clone()).build().unwrap().spawn();
    eventually("the first look", || async { (claims.load(Ordering::SeqCst) > 0).then_some(()) }).await;
    let looks = until_idle(&claims).await;

    let outbox = Outbox::new().with_waker(waker);
    let rolled_back = outbox
        .transaction(&database.db, async |txn| {
            outbox.enqueue(txn, message()).await.expect("it is enqueued");
            Err::<(), _>(DbErr::Custom("changed my mind".to_owned()))
        })
        .await;
    assert!(matches!(rolled_back, Err(TransactionError::Transaction(_))));
    assert_eq!(until_idle(&claims).await, looks, "nobody was woken");

    let committed = outbox
        .transaction(&database.db, async |txn| {
            let savepoint = txn.begin().await?;
            outbox.enqueue(&savepoint, message()).await?;
            savepoint.rollback().await?;
            outbox.enqueue(txn, message()).await
        })
        .await;
    let id =
        committed.map_err(|error: TransactionError<EnqueueError>| error.to_string()).unwrap().message_id();
    eventually("the message to be sent", || async {
        (count(&database.db, Status::Sent).await == 1).then_some(())
    })
    .await;
    let published: Vec<_> = publisher.messages().iter().map(|message| message.id()).collect();
    assert_eq!(published, [id]);
    relay.shutdown().await.unwrap();
}

async fn handle(database: TestDatabase) {
    let relay = sleepy(&database.db, Arc::default()).build().unwrap().spawn();
    // Whether it comes before the relay's first look, or after.
    enqueue(&database.db, "t", 1).await;
    relay.wake();
    for round in 1..=3 {
        eventually("the message to be sent", || async {
            (count(&database.db, Status::Sent).await == round).then_some(())
        })
        .await;
        enqueue(&database.db, "t", 1).await;
        relay.wake();
    }
    relay.shutdown().await.unwrap();
}

async fn fifty(database: TestDatabase) {
    let (db, claims) = counting(&database).await;
    let (publisher, waker) = (Arc::new(RecordingPublisher::new()), Waker::new());
    let relays: Vec<_> = (0..50)
        .map(|_| sleepy(&db, publisher.clone()).waker(waker.clone()).build().unwrap().spawn())
        .collect();
    eventually("every relay to look once", || async { (claims.load(Ordering::SeqCst) >= 50).then_some(()) })
        .await;
    let looks = until_idle(&claims).await;
    enqueue(&database.db, "t", 1).await;
    waker.wake();
    eventually("the message to be sent", || async {
        (count(&database.db, Status::Sent).await == 1).then_some(())
    })
    .await;
    let looks = until_idle(&claims).await - looks;
    assert!(looks <= 2, "{looks} relays looked");
    for relay in relays {
        relay.shutdown().await.unwrap();
    }
}

async fn backlog(database: TestDatabase) {
    let (db, claims) = counting(&database).await;
    let (publisher, waker) = (Arc::new(RecordingPublisher::new()), Waker::new());
    let relays: Vec<_> = (0..4)
        .map(|_| {
            let relay = sleepy(&db, publisher.clone()).waker(waker.clone()).batch_size(10);
            relay.build().unwrap().spawn()
        })
        .collect();
    eventually("every relay to look once", || async { (claims.load(Ordering::SeqCst) >= 4).then_some(()) })
        .await;
    until_idle(&claims).await;
    enqueue(&database.db, "t", 2_000).await;
    waker.wake();
    eventually("the backlog to be sent", || async {
        (count(&database.db, Status::Sent).await == 2_000).then_some(())
    })
    .await;
    assert!(rows(&database.db).await.iter().all(|row| row.attempts == 1));
    let mut helped = 0;
    for relay in relays {
        helped += usize::from(relay.shutdown().await.unwrap().sent > 0);
    }
    assert!(helped > 1, "the others were woken");
}

/// Messages are committed by another process, as far as the relay knows.
async fn listens(database: TestDatabase) {
    NotifyingMigrator::up(&database.db, None).await.unwrap();
    let other = database.connect_again().await;
    let (db, claims) = counting(&database).await;
    let waker = Waker::listening(&db).unwrap();
    let relays: Vec<_> =
        (0..5).map(|_| sleepy(&db, Arc::default()).waker(waker.clone()).build().unwrap().spawn()).collect();
    drop(waker);
    let sent = async |expected: usize| {
        eventually(&format!("{expected} messages to be sent"), || async {
            (count(&other, Status::Sent).await == expected).then_some(())
        })
        .await;
    };
    for round in 1..=3 {
        until_idle(&claims).await;
        enqueue(&other, "t", 1).await;
        sent(round).await;
    }
    // A rollback tells nobody.
    let looks = until_idle(&claims).await;
    let txn = other.begin().await.unwrap();
    Outbox::new().enqueue(&txn, message()).await.unwrap();
    txn.rollback().await.unwrap();
    assert_eq!(until_idle(&claims).await, looks);
    // Many statements of one transaction are one notification.
    let txn = other.begin().await.unwrap();
    for _ in 0..100 {
        Outbox::new().enqueue(&txn, message()).await.unwrap();
    }
    txn.commit().await.unwrap();
    sent(103).await;
    let looks = until_idle(&claims).await - looks;
    assert!(looks <= 3, "{looks} looks for one transaction");

    // The connection is cut; what is committed meanwhile is found as well.
    let listener = "FROM pg_stat_activity WHERE query LIKE 'LISTEN %' AND datname = current_database()";
    for lost in [104, 105] {
        let cut = format!("SELECT pg_terminate_backend(pid) {listener}");
        let cut = other.query_all_raw(Statement::from_string(DbBackend::Postgres, cut)).await.unwrap();
        assert_eq!(cut.len(), 1, "one connection listens for five relays");
        enqueue(&other, "t", 1).await;
        sent(lost).await;
    }
    for relay in relays {
        relay.shutdown().await.unwrap();
    }
    eventually("the listener to go with the last relay", || async {
        let list = Statement::from_string(DbBackend::Postgres, format!("SELECT pid {listener}"));
        other.query_all_raw(list).await.unwrap().is_empty().then_some(())
    })
    .await;
}
