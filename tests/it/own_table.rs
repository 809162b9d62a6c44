//! An application's own table keeps the same promises as `outbox_message`.

use std::{sync::Arc, time::Duration};

use libtest_mimic::Trial;
use sea_orm_outbox::{
    BehindFailed, ClaimStrategy, EnqueueError, Enqueued, Message, MessageId, NewMessage, Ordering, Outbox,
    OutboxTable, Publisher, Relay, RelayBuilder, RelayError,
    entity::Status,
    lifecycle::{Outcome, RetryPolicy},
    publisher::RecordingPublisher,
    store::{Store, StoreError},
};

use crate::{
    lifecycle::stale_twins,
    support::{
        Kind, TestDatabase, eventually, on_each_contract_database,
        own::{Bench, Own, delivery, delivery_in_schema, note, note_unsigned, parcel},
        rows::{LEASE, claim_one, request, sweep},
        within,
    },
};

/// One test for each entity, as its database has it.
macro_rules! on_each_table {
    ($name:literal, $test:ident) => {{
        let mut tests = Vec::new();
        tests.extend(on_each_contract_database(
            concat!("own_table::delivery::", $name),
            |database| async move {
                match database.kind {
                    Kind::Postgres | Kind::OldestPostgres => {
                        $test::<delivery_in_schema::Entity>(database).await
                    }
                    _ => $test::<delivery::Entity>(database).await,
                }
            },
        ));
        tests.extend(on_each_contract_database(
            concat!("own_table::parcel::", $name),
            $test::<parcel::Entity>,
        ));
        tests.extend(on_each_contract_database(concat!("own_table::note::", $name), |database| async move {
            match database.kind {
                Kind::MySql | Kind::MariaDb => $test::<note_unsigned::Entity>(database).await,
                _ => $test::<note::Entity>(database).await,
            }
        }));
        tests
    }};
}

pub(crate) fn tests() -> Vec<Trial> {
    [
        on_each_table!("what_is_enqueued_is_claimed_with_either_strategy", enqueues_and_claims),
        on_each_table!("the_same_id_is_one_message_or_an_error", ids_that_exist),
        on_each_table!("a_stale_twin_of_every_arrow_changes_nothing", stale_twins),
        on_each_table!("a_sweep_returns_and_in_the_end_buries", sweeps),
        on_each_table!("a_relay_sends_everything", relays),
        on_each_contract_database("own_table::messages_of_one_key_go_out_in_order", in_order),
        on_each_contract_database("own_table::order_per_key_needs_a_key_that_rises", no_order),
        on_each_contract_database("own_table::relays_of_two_tables_settle_their_own", two_tables),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// A relay that does not let a test wait.
fn quick<E: OutboxTable, P: Publisher>(database: &TestDatabase, publisher: P) -> RelayBuilder<P> {
    Relay::builder(database.db.clone(), publisher)
        .table::<E>()
        .poll_every(Duration::from_millis(20))
        .sweep_every(Duration::from_millis(50))
        .retry(RetryPolicy::default().with_initial_delay(Duration::from_millis(20)))
}

async fn until_all<E: Own>(bench: &Bench<E>, status: Status, expected: usize) {
    eventually(&format!("{expected} rows to be {status:?}"), || async {
        (bench.count(status).await == expected).then_some(())
    })
    .await;
}

/// That a message is the one that was given: JSON columns keep what it means.
fn assert_same<E: Own>(message: &Message, given: &Message) {
    let parts = |m: &Message| {
        let keyed = m.aggregate_type().map(str::to_owned).zip(m.aggregate_id().map(str::to_owned));
        (m.id(), m.topic().to_owned(), keyed, m.event_type().map(str::to_owned), m.headers().clone())
    };
    assert_eq!(parts(message), parts(given));
    assert_eq!(
        (message.content_type(), message.ordering_key()),
        (given.content_type(), given.ordering_key())
    );
    if E::JSON {
        let json = |m: &Message| serde_json::from_slice::<serde_json::Value>(m.payload()).unwrap();
        assert_eq!(json(message), json(given));
    } else {
        assert_eq!(message.payload(), given.payload());
    }
}

async fn enqueues_and_claims<E: Own>(database: TestDatabase) {
    let bench = Bench::<E>::create(&database).await;
    bench.store.check_table().await.unwrap();
    let id = MessageId::new();
    let message = E::message(1).message_id(id);
    let given = message.clone().into_message();
    let outbox = Outbox::for_table::<E>();
    assert_eq!(outbox.enqueue(&database.db, message).await.unwrap(), Enqueued::New(id));
    // Without an id of its own it takes another way.
    outbox.enqueue(&database.db, E::message(2).delay(Duration::from_secs(600))).await.unwrap();
    for strategy in [ClaimStrategy::SkipLocked, ClaimStrategy::Optimistic] {
        let claimed = bench.store.claim(&request(strategy, 10, "test:1", LEASE)).await.unwrap();
        assert!(claimed.unreadable.is_empty(), "{:?}", claimed.unreadable);
        assert_eq!(claimed.claims.len(), 1, "{strategy:?}");
        assert_same::<E>(claimed.claims[0].message(), &given);
        assert_eq!(bench.store.claims_of("test:1").await.unwrap(), [claimed.claims[0].fence()]);
        assert_eq!(bench.count(Status::Processing).await, 1);
        let back = claimed.claims.into_iter().map(|c| c.settle(Outcome::Unused, &Default::default(), 0.0));
        assert!(bench.store.settle(&back.collect::<Vec<_>>()).await.unwrap().is_empty());
        assert_eq!(bench.count(Status::Pending).await, 2);
    }
}

async fn ids_that_exist<E: Own>(database: TestDatabase) {
    let bench = Bench::<E>::create(&database).await;
    let outbox = Outbox::for_table::<E>();
    let ids = [MessageId::new(), MessageId::new(), MessageId::new()];
    let all = || ids.iter().enumerate().map(|(n, id)| E::message(n).message_id(*id));
    let new = outbox.enqueue_many(&database.db, all().take(2)).await.unwrap();
    assert_eq!(new, [Enqueued::New(ids[0]), Enqueued::New(ids[1])]);
    let again = outbox.enqueue_many(&database.db, all()).await.unwrap();
    assert_eq!(again, [Enqueued::Existing(ids[0]), Enqueued::Existing(ids[1]), Enqueued::New(ids[2])]);
    let error = outbox.enqueue(&database.db, E::message(7).message_id(ids[0])).await.unwrap_err();
    assert!(matches!(error, EnqueueError::IdTaken { id, .. } if id == ids[0]), "{error}");
    assert_eq!(bench.rows().await.len(), 3);
}

async fn sweeps<E: Own>(database: TestDatabase) {
    let bench = Bench::<E>::create(&database).await;
    bench.enqueue(1).await;
    let _dies = claim_one(&bench.store, LEASE).await;
    assert_eq!(sweep(&bench.store).await, 0, "a lease that lasts is left alone");
    bench.let_leases_end().await;
    assert_eq!(sweep(&bench.store).await, 1);
    let returned = bench.one().await;
    assert_eq!((returned.status.as_str(), returned.attempts), (E::status_text(Status::Pending), 1));
    assert!(returned.last_error.is_some_and(|error| error.starts_with("claim expired")));
    bench.set(E::attempts(), "4").await;
    let suspects = bench.store.stale(None, 10).await.unwrap().suspects;
    assert_eq!(suspects, [returned.fence]);
    let _dies_again = bench.store.claim_candidates(&suspects, "test:1", LEASE).await.unwrap();
    bench.let_leases_end().await;
    assert_eq!(sweep(&bench.store).await, 1);
    let buried = bench.one().await;
    assert_eq!((buried.status.as_str(), buried.attempts), (E::status_text(Status::Failed), 5));
    assert!(!buried.is_due && !buried.is_claimed);
}

async fn relays<E: Own>(database: TestDatabase) {
    const COUNT: usize = 120;
    let bench = Bench::<E>::create(&database).await;
    let ids: Vec<MessageId> = (0..COUNT).map(|_| MessageId::new()).collect();
    let message = |n: usize| E::message(n).message_id(ids[n]);
    Outbox::for_table::<E>().enqueue_many(&database.db, (0..COUNT).map(message)).await.unwrap();
    for (strategy, status) in [(ClaimStrategy::SkipLocked, COUNT), (ClaimStrategy::Optimistic, 2 * COUNT)] {
        let publisher = Arc::new(RecordingPublisher::new());
        let relay = quick::<E, _>(&database, publisher.clone()).strategy(strategy).batch_size(50);
        let relay = relay.build().unwrap().spawn();
        until_all(&bench, Status::Sent, status).await;
        relay.shutdown().await.unwrap();
        let published = publisher.messages();
        assert_eq!(published.len(), COUNT);
        if strategy == ClaimStrategy::SkipLocked {
            for message_sent in published {
                let n = ids.iter().position(|id| *id == message_sent.id()).expect("a message of ours");
                assert_same::<E>(&message_sent, &message(n).into_message());
            }
            bench.enqueue(COUNT).await;
        }
    }
    assert!(bench.seen().await.iter().all(|row| row.attempts == 1 && row.fence.version == 2));
}

async fn in_order(database: TestDatabase) {
    match database.kind {
        Kind::Postgres | Kind::OldestPostgres => keys_in_order::<delivery_in_schema::Entity>(database).await,
        _ => keys_in_order::<delivery::Entity>(database).await,
    }
}

async fn keys_in_order<E: Own>(database: TestDatabase) {
    let bench = Bench::<E>::create(&database).await;
    bench.enqueue(90).await;
    let publisher = Arc::new(RecordingPublisher::new());
    let ordering = Ordering::PerKey { behind_failed: BehindFailed::Hold };
    let relays: Vec<_> = (0..2)
        .map(|_| {
            let relay = quick::<E, _>(&database, publisher.clone()).ordering(ordering).batch_size(20);
            relay.build().unwrap().spawn()
        })
        .collect();
    until_all(&bench, Status::Sent, 90).await;
    for relay in relays {
        relay.shutdown().await.unwrap();
    }
    for key in ["order:0", "order:1", "order:2"] {
        let messages = publisher.messages();
        let of_key = messages.iter().filter(|message| message.ordering_key() == Some(key));
        let numbers: Vec<i64> = of_key
            .map(|m| {
                serde_json::from_slice::<serde_json::Value>(m.payload()).unwrap()["number"].as_i64().unwrap()
            })
            .collect();
        assert_eq!(numbers.len(), 30);
        assert!(numbers.is_sorted(), "{key}: {numbers:?}");
    }
}

async fn no_order(database: TestDatabase) {
    let ordering = Ordering::PerKey { behind_failed: BehindFailed::Skip };
    let relay = quick::<parcel::Entity, _>(&database, RecordingPublisher::new()).ordering(ordering);
    let error = relay.build().expect_err("a UUID does not rise").to_string();
    assert!(error.contains("parcel") && error.contains("ordering_key"), "{error}");
}

async fn two_tables(database: TestDatabase) {
    let parcels = Bench::<parcel::Entity>::create(&database).await;
    parcels.enqueue(50).await;
    crate::support::rows::enqueue(&database.db, "canonical", 50).await;
    let (own, canonical) = (Arc::new(RecordingPublisher::new()), Arc::new(RecordingPublisher::new()));
    let own_relay = quick::<parcel::Entity, _>(&database, own.clone()).build().unwrap().spawn();
    let relay = Relay::builder(database.db.clone(), canonical.clone()).build().unwrap().spawn();
    until_all(&parcels, Status::Sent, 50).await;
    eventually("the other table to be sent", || async {
        (crate::support::rows::count(&database.db, Status::Sent).await == 50).then_some(())
    })
    .await;
    let (own_report, report) = (own_relay.shutdown().await.unwrap(), relay.shutdown().await.unwrap());
    assert_eq!((own_report.sent, report.sent), (50, 50));
    assert!(own.messages().iter().all(|message| message.topic() == "parcels"));
    assert!(canonical.messages().iter().all(|message| message.topic() == "canonical"));
}
