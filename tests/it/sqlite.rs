//! Several processes on one SQLite file wait for each other, and nobody hears that the database is locked.

use std::time::Duration;

use libtest_mimic::Trial;
use sea_orm::TransactionTrait;
use sea_orm_outbox::{NewMessage, Outbox, entity::Status};
use tokio::task::JoinSet;

use crate::support::{
    Kind, TestDatabase, eventually_within,
    nats::TestStream,
    on_database,
    process::{Behaviour, LONG_LEASE, RelayProcess},
    rows::{count, rows},
};

pub(crate) fn tests() -> Vec<Trial> {
    vec![on_database(Kind::Sqlite, "processes_that_share_a_file_wait_for_each_other", share)]
}

/// Four writers with connections of their own, as in other processes, and two processes with two relays each.
async fn share(database: TestDatabase) {
    const WRITERS: usize = 4;
    const EACH: usize = 250;
    let stream = TestStream::create().await;
    let first = RelayProcess::start(&database, &stream, Behaviour::Publish, 2, LONG_LEASE).await;
    let second = RelayProcess::start(&database, &stream, Behaviour::Publish, 2, LONG_LEASE).await;
    let mut writers = JoinSet::new();
    for _ in 0..WRITERS {
        let (db, topic) = (database.connect_again().await, stream.topic("x"));
        writers.spawn(async move {
            for number in 0..EACH {
                let txn = db.begin().await?;
                let message = NewMessage::json(&topic, &number).expect("a number is JSON");
                Outbox::new().enqueue(&txn, message).await.expect("it is enqueued");
                txn.commit().await?;
            }
            Ok::<_, sea_orm::DbErr>(())
        });
    }
    for written in writers.join_all().await {
        written.unwrap();
    }
    eventually_within(Duration::from_secs(60), "all rows to be sent", || async {
        (count(&database.db, Status::Sent).await == WRITERS * EACH).then_some(())
    })
    .await;
    for process in [first, second] {
        let (reports, complaints) = process.stop_and_tell().await;
        assert_eq!(reports.len(), 2);
        assert_eq!(complaints, [""; 0]);
    }
    assert_eq!(stream.count().await, (WRITERS * EACH) as u64);
    assert!(rows(&database.db).await.iter().all(|row| (row.version, row.attempts) == (2, 1)));
}
