//! Relays in processes of their own are killed and frozen; nothing is lost.

use std::{collections::HashMap, time::Duration};

use libtest_mimic::Trial;
use sea_orm_outbox::{NewMessage, Outbox, entity::Status};

use crate::support::{
    Kind, TestDatabase, eventually, eventually_within,
    nats::TestStream,
    on_database, on_each_database,
    process::{Behaviour, LONG_LEASE, RelayProcess, SHORT_LEASE},
    rows::{count, enqueue, row, rows},
};

pub(crate) fn tests() -> Vec<Trial> {
    let mut tests: Vec<Trial> = [
        on_each_database("crash::killed_before_publishing_another_relay_takes_over", before_publish),
        on_each_database("crash::killed_before_settling_it_is_published_again_under_its_id", before_settle),
        on_each_database("crash::frozen_past_its_lease_it_finds_its_rows_lost", frozen),
        on_each_database("crash::a_message_that_kills_its_process_fails_alone", killer),
    ]
    .into_iter()
    .flatten()
    .collect();
    tests.push(on_database(
        Kind::Postgres,
        "crash::ten_thousand_messages_and_eight_relays_in_two_processes",
        ten_thousand,
    ));
    tests
}

async fn until_sent(database: &TestDatabase, expected: usize) {
    eventually(&format!("{expected} rows to be sent"), || async {
        (count(&database.db, Status::Sent).await == expected).then_some(())
    })
    .await;
}

async fn before_publish(database: TestDatabase) {
    let stream = TestStream::create().await;
    enqueue(&database.db, &stream.topic("x"), 10).await;
    let mut killed =
        RelayProcess::start(&database, &stream, Behaviour::HoldBeforePublish, 1, SHORT_LEASE).await;
    for _ in 0..10 {
        killed.says("holding").await;
    }
    killed.kill().await;
    assert_eq!(count(&database.db, Status::Processing).await, 10);
    assert_eq!(stream.count().await, 0);

    let heir = RelayProcess::start(&database, &stream, Behaviour::Publish, 1, SHORT_LEASE).await;
    until_sent(&database, 10).await;
    let report = heir.stop().await.remove(0);
    assert!(report.contains("sent 10 (0 duplicates)") && report.contains("swept 10"), "{report}");
    assert!(rows(&database.db).await.iter().all(|row| row.attempts == 2));
    assert_eq!(stream.count().await, 10);
}

async fn before_settle(database: TestDatabase) {
    let stream = TestStream::create().await;
    enqueue(&database.db, &stream.topic("x"), 10).await;
    let mut killed = RelayProcess::start(&database, &stream, Behaviour::HoldAfterAck, 1, SHORT_LEASE).await;
    for _ in 0..10 {
        killed.says("acknowledged").await;
    }
    killed.kill().await;
    assert_eq!(count(&database.db, Status::Sent).await, 0);
    assert_eq!(stream.count().await, 10);

    let heir = RelayProcess::start(&database, &stream, Behaviour::Publish, 1, SHORT_LEASE).await;
    until_sent(&database, 10).await;
    let report = heir.stop().await.remove(0);
    assert!(report.contains("sent 10 (10 duplicates)"), "{report}");
    let stored: Vec<String> = stream.messages().await.into_iter().map(|message| message.id).collect();
    let ids: Vec<String> = rows(&database.db).await.iter().map(|row| row.message_id.to_string()).collect();
    assert_eq!(stored, ids, "the stream holds one copy of each");
}

async fn frozen(database: TestDatabase) {
    let stream = TestStream::create().await;
    enqueue(&database.db, &stream.topic("x"), 1).await;
    let mut sleeper = RelayProcess::start(&database, &stream, Behaviour::Hesitate, 1, SHORT_LEASE).await;
    sleeper.says("holding").await;
    sleeper.freeze();
    let other = RelayProcess::start(&database, &stream, Behaviour::Publish, 1, SHORT_LEASE).await;
    until_sent(&database, 1).await;
    let before = row(&database.db).await;
    assert_eq!(before.attempts, 2);

    sleeper.thaw();
    let report = sleeper.stop().await.remove(0);
    assert!(report.contains("sent 0") && report.contains(" lost 1,"), "{report}");
    assert_eq!(row(&database.db).await, before, "the newer claim is untouched");
    assert!(other.stop().await.remove(0).contains("sent 1"));
    // It woke up after the other had published, and the stream dropped its copy.
    assert_eq!(stream.count().await, 1);
}

async fn killer(database: TestDatabase) {
    let stream = TestStream::create().await;
    let topic = stream.topic("x");
    enqueue(&database.db, &topic, 250).await;
    let killer = NewMessage::bytes(&topic, "text/plain", "killer");
    Outbox::new().enqueue(&database.db, killer).await.unwrap();
    enqueue(&database.db, &topic, 249).await;

    let mut deaths = 0;
    let mut process = RelayProcess::start(&database, &stream, Behaviour::DieOfKiller, 1, SHORT_LEASE).await;
    let done = |rows: &[_]| {
        rows.iter().all(|row: &sea_orm_outbox::entity::outbox_message::Model| row.status.is_finished())
    };
    while !done(&rows(&database.db).await) {
        // A supervisor starts it again.
        if process.ended().is_some() {
            deaths += 1;
            assert!(deaths <= 5, "it dies more often than a message has attempts");
            process = RelayProcess::start(&database, &stream, Behaviour::DieOfKiller, 1, SHORT_LEASE).await;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    process.stop().await;
    assert_eq!(deaths, 5);
    let rows = rows(&database.db).await;
    let (failed, sent): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row.status == Status::Failed);
    assert_eq!((sent.len(), failed.len()), (499, 1));
    assert_eq!((failed[0].payload.as_slice(), failed[0].attempts), (&b"killer"[..], 5));
    let error = failed[0].last_error.as_deref().unwrap_or_default();
    assert!(error.starts_with("abandoned"), "{error}");
    assert_eq!(stream.count().await, 499);
}

async fn ten_thousand(database: TestDatabase) {
    const MESSAGES: usize = 10_000;
    let stream = TestStream::create().await;
    let topic = stream.topic("x");
    let first = RelayProcess::start(&database, &stream, Behaviour::Publish, 4, LONG_LEASE).await;
    let second = RelayProcess::start(&database, &stream, Behaviour::Publish, 4, LONG_LEASE).await;
    for _ in 0..10 {
        enqueue(&database.db, &topic, MESSAGES / 10).await;
    }
    eventually_within(Duration::from_secs(90), "all rows to be sent", || async {
        (count(&database.db, Status::Sent).await == MESSAGES).then_some(())
    })
    .await;
    assert_eq!(first.stop().await.len() + second.stop().await.len(), 8);
    let mut copies: HashMap<String, usize> = HashMap::new();
    for message in stream.messages().await {
        *copies.entry(message.id).or_default() += 1;
    }
    assert_eq!(copies.len(), MESSAGES);
    for row in rows(&database.db).await {
        assert_eq!(copies.get(&row.message_id.to_string()), Some(&1));
        assert_eq!((row.status, row.attempts), (Status::Sent, 1));
    }
}
