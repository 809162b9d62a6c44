//! A message exists if and only if the transaction that enqueued it committed.

use std::time::Duration;

use libtest_mimic::Trial;
use sea_orm::{ConnectionTrait, DatabaseExecutor, SqlErr, TransactionTrait};
use sea_orm_outbox::{
    EnqueueError, Enqueued, InvalidMessage, MessageId, NewMessage, Outbox,
    entity::Status,
    store::{ClaimStrategy, Fence, StoreError},
};

use crate::support::{
    Kind, TestDatabase, on_database, on_each_contract_database,
    rows::{LEASE, claim, request, row, rows, store},
};

pub(crate) fn tests() -> Vec<Trial> {
    let mut tests: Vec<Trial> = [
        on_each_contract_database("enqueue::a_message_lives_and_dies_with_its_transaction", transactions),
        on_each_contract_database("enqueue::a_nested_transaction_takes_only_its_own_messages_away", nested),
        on_each_contract_database("enqueue::everything_that_is_given_is_stored_and_claimed", round_trip),
        on_each_contract_database("enqueue::a_delay_counts_from_now_by_the_database", delay),
        on_each_contract_database("enqueue::the_same_id_with_the_same_content_is_one_message", same_content),
        on_each_contract_database("enqueue::the_same_id_with_another_content_is_an_error", other_content),
        on_each_contract_database(
            "enqueue::ids_that_were_given_may_repeat_within_a_call",
            repeats_in_one_call,
        ),
        on_each_contract_database("enqueue::another_error_than_a_known_id_is_not_swallowed", other_errors),
        on_each_contract_database("enqueue::a_missing_table_is_an_error_that_says_what_to_do", missing_table),
        on_each_contract_database("enqueue::a_refused_message_writes_nothing", refused),
        on_each_contract_database("enqueue::many_messages_keep_their_order", many),
        on_each_contract_database("enqueue::the_id_of_a_deleted_row_is_not_given_out_again", ids_rise),
        on_each_contract_database("enqueue::large_payloads_are_stored_as_they_are", large),
    ]
    .into_iter()
    .flatten()
    .collect();
    tests.push(on_database(
        Kind::Postgres,
        "enqueue::the_same_id_from_two_transactions_at_once_is_one_message",
        two_transactions_at_once,
    ));
    tests
}

fn message(payload: &str) -> NewMessage {
    NewMessage::bytes("orders.created", "text/plain", payload.to_owned())
}

async fn transactions(database: TestDatabase) {
    let (db, outbox) = (&database.db, Outbox::new());
    let txn = db.begin().await.unwrap();
    outbox.enqueue(&txn, message("rolled back")).await.unwrap();
    txn.rollback().await.unwrap();
    assert_eq!(rows(db).await.len(), 0);

    let txn = db.begin().await.unwrap();
    outbox.enqueue(&txn, message("dropped")).await.unwrap();
    drop(txn);
    assert_eq!(rows(db).await.len(), 0);

    let txn = db.begin().await.unwrap();
    let enqueued = outbox.enqueue(&DatabaseExecutor::from(&txn), message("committed")).await.unwrap();
    txn.commit().await.unwrap();
    let row = row(db).await;
    assert_eq!(row.message_id, enqueued.message_id().as_uuid());
    assert_eq!(row.payload, b"committed");
}

async fn nested(database: TestDatabase) {
    let (db, outbox) = (&database.db, Outbox::new());
    let outer = db.begin().await.unwrap();
    outbox.enqueue(&outer, message("outer")).await.unwrap();
    let inner = outer.begin().await.unwrap();
    outbox.enqueue(&inner, message("inner, rolled back")).await.unwrap();
    inner.rollback().await.unwrap();
    let inner = outer.begin().await.unwrap();
    outbox.enqueue(&inner, message("inner, committed")).await.unwrap();
    inner.commit().await.unwrap();
    outer.commit().await.unwrap();
    let payloads: Vec<Vec<u8>> = rows(db).await.into_iter().map(|row| row.payload).collect();
    assert_eq!(payloads, [b"outer".to_vec(), b"inner, committed".to_vec()]);

    let outer = db.begin().await.unwrap();
    let inner = outer.begin().await.unwrap();
    outbox.enqueue(&inner, message("committed inside, rolled back outside")).await.unwrap();
    inner.commit().await.unwrap();
    outer.rollback().await.unwrap();
    assert_eq!(rows(db).await.len(), 2);
}

async fn round_trip(database: TestDatabase) {
    let (db, outbox) = (&database.db, Outbox::new());
    let id = MessageId::new();
    let full = NewMessage::json("orders.größe", &serde_json::json!({"a": [1, null, "ü"]}))
        .unwrap()
        .message_id(id)
        .aggregate("order", 4711)
        .event_type("order-created")
        .header("tenant", "acme ü '; DROP TABLE outbox_message; --")
        .header("empty", "");
    let bare =
        NewMessage::bytes("t", "application/octet-stream", vec![0, 255, 128, 0]).message_id(MessageId::new());
    let expected = [full.clone().into_message(), bare.clone().into_message()];
    assert_eq!(outbox.enqueue(db, full).await.unwrap(), Enqueued::New(id));
    outbox.enqueue(db, bare).await.unwrap();

    let stored = rows(db).await;
    assert_eq!(stored[0].ordering_key.as_deref(), Some("order:4711"));
    assert_eq!((stored[0].status, stored[0].version), (Status::Pending, 0));
    assert_eq!((stored[0].attempts, stored[0].requeues), (0, 0));
    for strategy in [ClaimStrategy::SkipLocked, ClaimStrategy::Optimistic] {
        let store = store(db);
        let claimed = store.claim(&request(strategy, 10, "test:1", LEASE)).await.unwrap();
        assert!(claimed.unreadable.is_empty());
        let messages: Vec<_> = claimed.claims.iter().map(|claim| claim.message().clone()).collect();
        assert_eq!(messages, expected, "{strategy:?}");
        let release = sea_orm_outbox::lifecycle::Outcome::Unused;
        let back = claimed.claims.into_iter().map(|c| c.settle(release.clone(), &Default::default(), 0.0));
        assert!(store.settle(&back.collect::<Vec<_>>()).await.unwrap().is_empty());
    }
}

async fn delay(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    let later = message("later").delay(Duration::from_millis(60_500));
    Outbox::new().enqueue_many(db, [later, message("now")]).await.unwrap();
    assert_eq!(store.candidates(10).await.unwrap().len(), 1, "the delayed message is no candidate");
    let claimed = claim(&store, 10, LEASE).await.claims;
    assert_eq!(claimed.len(), 1, "the delayed message is not due");
    assert_eq!(&claimed[0].message().payload()[..], b"now");
    let row = rows(db).await.remove(0);
    let delay = (row.available_at.unwrap() - row.created_at).as_seconds_f64();
    assert!((60.499..60.7).contains(&delay), "{delay}");
}

async fn same_content(database: TestDatabase) {
    let (db, outbox) = (&database.db, Outbox::new());
    let id = MessageId::from_name("order-placed/1");
    let new = || message("x").message_id(id).header("a", "b").aggregate("order", 1);
    assert_eq!(outbox.enqueue(db, new()).await.unwrap(), Enqueued::New(id));
    let before = row(db).await;
    // The delay is no content.
    let again = new().delay(Duration::from_secs(10));
    assert_eq!(outbox.enqueue(db, again).await.unwrap(), Enqueued::Existing(id));
    assert_eq!(row(db).await, before, "nothing was written");

    let txn = db.begin().await.unwrap();
    let other = outbox.enqueue_many(&txn, [message("y"), new()]).await.unwrap();
    assert_eq!(other.iter().map(Enqueued::is_existing).collect::<Vec<_>>(), [false, true]);
    txn.commit().await.unwrap();
    assert_eq!(rows(db).await.len(), 2);
}

async fn other_content(database: TestDatabase) {
    let (db, outbox) = (&database.db, Outbox::new());
    let id = MessageId::from_name("order-placed/1");
    let new = || message("x").message_id(id).header("a", "b");
    outbox.enqueue(db, new()).await.unwrap();
    let before = row(db).await;
    let html = NewMessage::bytes("orders.created", "text/html", "x").message_id(id).header("a", "b");
    let topic = NewMessage::bytes("other", "text/plain", "x").message_id(id).header("a", "b");
    for (field, other) in [
        ("topic", topic),
        ("content type", html),
        ("payload", message("y").message_id(id).header("a", "b")),
        ("headers", new().header("a", "c")),
        ("headers", new().header("c", "b")),
        ("event type", new().event_type("e")),
        ("ordering key", new().ordering_key("k")),
        ("aggregate", new().aggregate("order", 1)),
    ] {
        let txn = db.begin().await.unwrap();
        match outbox.enqueue(&txn, other).await {
            Err(EnqueueError::IdTaken { id: taken, field: differs }) => {
                assert_eq!((taken, differs), (id, field));
            }
            other => panic!("{field}: {other:?}"),
        }
        // The transaction is still of use.
        outbox.enqueue(&txn, new()).await.unwrap();
        txn.commit().await.unwrap();
        assert_eq!(row(db).await, before);
    }
}

async fn repeats_in_one_call(database: TestDatabase) {
    let (db, outbox) = (&database.db, Outbox::new());
    let id = MessageId::new();
    let twice = [message("x").message_id(id), message("x").message_id(id)];
    let answers = outbox.enqueue_many(db, twice).await.unwrap();
    assert_eq!(answers, [Enqueued::New(id), Enqueued::Existing(id)]);
    let id = MessageId::new();
    let differing = [message("x").message_id(id), message("y").message_id(id)];
    let error = outbox.enqueue_many(db, differing).await.unwrap_err();
    assert!(matches!(error, EnqueueError::IdTaken { .. }), "{error}");
    assert_eq!(rows(db).await.len(), 1);
}

/// `INSERT IGNORE` and a bare `ON CONFLICT DO NOTHING` would say that all is well.
async fn other_errors(database: TestDatabase) {
    let db = &database.db;
    db.execute_unprepared("CREATE UNIQUE INDEX one_topic ON outbox_message (topic)").await.unwrap();
    let outbox = Outbox::new();
    outbox.enqueue(db, message("x").message_id(MessageId::new())).await.unwrap();
    let error = outbox.enqueue(db, message("x").message_id(MessageId::new())).await.unwrap_err();
    let EnqueueError::Database(error) = error else { panic!("{error}") };
    assert!(matches!(error.sql_err(), Some(SqlErr::UniqueConstraintViolation(_))), "{error}");
    assert_eq!(rows(db).await.len(), 1);
}

async fn missing_table(database: TestDatabase) {
    database.db.execute_unprepared("DROP TABLE outbox_message").await.unwrap();
    let error = Outbox::new().enqueue(&database.db, message("x")).await.unwrap_err();
    assert!(matches!(error, EnqueueError::Store(StoreError::Table(_))), "{error}");
    assert!(error.to_string().contains("run the migrations"), "{error}");
}

async fn refused(database: TestDatabase) {
    let db = &database.db;
    let outbox = Outbox::new().with_max_message_bytes(1_000);
    for bad in [
        NewMessage::bytes("orders.*", "text/plain", "x"),
        message("x").header("Nats-Msg-Id", "x"),
        message("x").header("a", "b\r\nNats-Msg-Id: c"),
        message(&"x".repeat(1_000)),
    ] {
        let txn = db.begin().await.unwrap();
        let error = outbox.enqueue_many(&txn, [message("good"), bad]).await.unwrap_err();
        assert!(matches!(error, EnqueueError::Invalid(_)), "{error}");
        txn.commit().await.unwrap();
        assert_eq!(rows(db).await.len(), 0, "{error}");
    }
    let error = outbox.enqueue(db, message(&"x".repeat(1_000))).await.unwrap_err();
    let EnqueueError::Invalid(InvalidMessage::TooLarge { size, limit: 1_000 }) = error else {
        panic!("{error}")
    };
    assert!(size > 1_000);
}

async fn many(database: TestDatabase) {
    let (db, outbox) = (&database.db, Outbox::new());
    let txn = db.begin().await.unwrap();
    let messages = (0..1_234).map(|number| message(&number.to_string()));
    let answers = outbox.enqueue_many(&txn, messages).await.unwrap();
    txn.commit().await.unwrap();
    let stored = rows(db).await;
    assert_eq!(answers.len(), 1_234);
    for (number, (row, answer)) in stored.iter().zip(&answers).enumerate() {
        assert_eq!(row.payload, number.to_string().into_bytes());
        assert_eq!(row.message_id, answer.message_id().as_uuid());
    }
    assert_eq!(outbox.enqueue_many(db, []).await.unwrap(), []);
}

/// A late settlement would otherwise change another message.
async fn ids_rise(database: TestDatabase) {
    let (db, outbox) = (&database.db, Outbox::new());
    outbox.enqueue(db, message("x")).await.unwrap();
    let first = row(db).await;
    assert!(store(db).cancel(&[Fence::from(&first)]).await.unwrap().is_empty());
    outbox.enqueue(db, message("y")).await.unwrap();
    assert!(row(db).await.id > first.id);
}

async fn large(database: TestDatabase) {
    let db = &database.db;
    let outbox = Outbox::new().with_max_message_bytes(8 * 1024 * 1024);
    let payload: Vec<u8> = (0..5 * 1024 * 1024).map(|i| (i % 251) as u8).collect();
    let large = || NewMessage::bytes("t", "application/octet-stream", payload.clone());
    outbox.enqueue_many(db, [large(), large(), large()]).await.unwrap();
    for row in rows(db).await {
        assert!(row.payload == payload);
    }
}

/// The second waits for the first, and then finds its message.
async fn two_transactions_at_once(database: TestDatabase) {
    let (db, outbox) = (&database.db, Outbox::new());
    for commits in [true, false] {
        let id = MessageId::new();
        let first = db.begin().await.unwrap();
        outbox.enqueue(&first, message("x").message_id(id)).await.unwrap();
        let second = {
            let (db, outbox) = (db.clone(), outbox.clone());
            tokio::spawn(async move {
                let txn = db.begin().await.unwrap();
                let enqueued = outbox.enqueue(&txn, message("x").message_id(id)).await.unwrap();
                txn.commit().await.unwrap();
                enqueued
            })
        };
        waits_for_a_lock(db).await;
        if commits {
            first.commit().await.unwrap();
        } else {
            first.rollback().await.unwrap();
        }
        let expected = if commits { Enqueued::Existing(id) } else { Enqueued::New(id) };
        assert_eq!(second.await.unwrap(), expected);
        let with_id = rows(db).await.iter().filter(|row| row.message_id == id.as_uuid()).count();
        assert_eq!(with_id, 1);
    }
}

/// Waits until some other session of this database waits for a lock.
async fn waits_for_a_lock(db: &impl ConnectionTrait) {
    let sql =
        "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
    crate::support::eventually("a session to wait for a lock", || async {
        let statement = sea_orm::Statement::from_string(sea_orm::DbBackend::Postgres, sql);
        db.query_one_raw(statement).await.unwrap()
    })
    .await;
}
