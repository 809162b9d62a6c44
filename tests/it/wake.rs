//! A message need not wait for the next look at the queue.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use libtest_mimic::Trial;
use sea_orm::{DatabaseConnection, DbErr, TransactionError, TransactionTrait};
use sea_orm_outbox::{
    EnqueueError, NewMessage, Outbox, Relay, RelayBuilder, Waker, entity::Status,
    publisher::RecordingPublisher,
};
use tokio::time::Instant;

use crate::support::{
    TestDatabase, eventually, on_each_database,
    rows::{count, enqueue, rows},
};

pub(crate) fn tests() -> Vec<Trial> {
    [
        on_each_database("wake::a_commit_wakes_a_relay_and_a_rollback_does_not", commit),
        on_each_database("wake::the_handle_wakes_its_relay", handle),
        on_each_database("wake::of_fifty_idle_relays_one_looks", fifty),
        on_each_database("wake::a_backlog_wakes_the_others", backlog),
    ]
    .into_iter()
    .flatten()
    .collect()
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
        // Only a claim writes a lease, or locks rows to do so.
        let sql = &info.statement.sql;
        if sql.contains("SKIP LOCKED") && sql.contains("LIMIT")
            || sql.starts_with("UPDATE") && sql.contains("PENDING")
        {
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
