//! An application's own table keeps the same promises as `outbox_message`.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use libtest_mimic::Trial;
use sea_orm::{ConnectionTrait, DbBackend, IdenStatic};
use sea_orm_outbox::{
    BehindFailed, ClaimStrategy, EnqueueError, Enqueued, Message, MessageId, Ordering, Outbox, OutboxTable,
    Publisher, Relay, RelayBuilder, RelayError,
    entity::Status,
    lifecycle::{Outcome, RetryPolicy},
    publisher::RecordingPublisher,
    store::{Store, StoreError},
};

use crate::{
    lifecycle::stale_twins,
    support::{
        Kind, TestDatabase,
        database::connect,
        eventually, on_each_contract_database,
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
        on_each_table!("messages_of_one_key_go_out_in_order", keys_in_order),
        on_each_table!("a_missing_index_is_made_by_the_statement_in_the_error", missing_index),
        on_each_contract_database("own_table::order_per_key_needs_a_key_that_rises", no_order),
        on_each_contract_database("own_table::relays_of_two_tables_settle_their_own", two_tables),
        on_each_contract_database("own_table::what_is_wrong_with_a_table_is_said_at_the_start", wrong_tables),
        on_each_contract_database("own_table::an_enum_without_a_status_is_refused", short_enum),
        on_each_contract_database(
            "own_table::an_unknown_status_is_reported_and_stops_no_other",
            unknown_status,
        ),
        on_each_contract_database("own_table::a_row_that_is_wrong_harms_only_itself", wrong_rows),
        on_each_contract_database("own_table::rights_to_the_table_alone_are_enough", few_rights),
    ]
    .into_iter()
    .flatten()
    .collect()
}

const HOLD: Ordering = Ordering::PerKey { behind_failed: BehindFailed::Hold };

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
        assert_eq!(bench.store.claims_of("test:1", None).await.unwrap(), [claimed.claims[0].fence()]);
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

async fn keys_in_order<E: Own>(database: TestDatabase) {
    let bench = Bench::<E>::create(&database).await;
    if bench.store.clone().with_ordering(HOLD).is_err() {
        return;
    }
    let ids: Vec<MessageId> = (0..90).map(|_| MessageId::new()).collect();
    let messages = ids.iter().enumerate().map(|(n, id)| E::message(n).message_id(*id));
    Outbox::for_table::<E>().enqueue_many(&database.db, messages).await.unwrap();
    let publisher = Arc::new(RecordingPublisher::new());
    let relays: Vec<_> = (0..2)
        .map(|_| {
            let relay = quick::<E, _>(&database, publisher.clone()).ordering(HOLD).batch_size(20);
            relay.build().unwrap().spawn()
        })
        .collect();
    until_all(&bench, Status::Sent, 90).await;
    for relay in relays {
        relay.shutdown().await.unwrap();
    }
    let mut keys: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for message in publisher.messages() {
        let number = ids.iter().position(|id| *id == message.id()).expect("a message of ours");
        keys.entry(message.ordering_key().expect("a key").to_owned()).or_default().push(number);
    }
    assert_eq!(keys.len(), 3);
    for (key, numbers) in keys {
        assert!(numbers.len() == 30 && numbers.is_sorted(), "{key}: {numbers:?}");
    }
}

async fn no_order(database: TestDatabase) {
    let relay = quick::<parcel::Entity, _>(&database, RecordingPublisher::new()).ordering(HOLD);
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

/// What a relay says of the table when it starts, until the deadline of the test.
async fn refusal<E: OutboxTable>(database: &TestDatabase, ordering: Ordering) -> String {
    // A pool of its own: the table may have been another one a moment ago, for statements that are prepared.
    let db = database.connect_again().await;
    let relay =
        Relay::builder(db, RecordingPublisher::new()).table::<E>().ordering(ordering).build().unwrap();
    let run = within(Duration::from_secs(10), "the relay to give up", relay.run(std::future::pending()));
    let error = run.await.expect_err("the table is refused");
    let RelayError::Table(error) = error else { panic!("{error}") };
    assert!(matches!(*error, StoreError::Schema { .. }), "{error}");
    error.to_string()
}

async fn missing_index<E: Own>(database: TestDatabase) {
    let bench = Bench::<E>::create_with(&database, |sql| match sql.starts_with("CREATE INDEX") {
        // One with a condition that leaves rows out is of no use.
        true if sql.contains("_due") && database.kind.backend() != DbBackend::MySql => {
            let status = E::status().as_str();
            let sql = sql.split(" WHERE ").next().unwrap();
            format!("{sql} WHERE {status} = '{}'", E::status_text(Status::Failed))
        }
        true => "SELECT 1".to_owned(),
        false => sql.to_owned(),
    })
    .await;
    let ordered = bench.store.clone().with_ordering(HOLD).is_ok();
    let ordering = if ordered { HOLD } else { Ordering::Unordered };
    let error = refusal::<E>(&database, ordering).await;
    let statements: Vec<&str> =
        error.split("whole table: ").skip(1).map(|rest| rest.split("; ").next().unwrap()).collect();
    assert_eq!(statements.len(), if ordered { 2 } else { 1 }, "{error}");
    for statement in statements {
        bench.execute(statement).await;
    }
    bench.enqueue(10).await;
    let relay = quick::<E, _>(&database, RecordingPublisher::new()).ordering(ordering);
    let relay = relay.build().unwrap().spawn();
    until_all(&bench, Status::Sent, 10).await;
    relay.shutdown().await.unwrap();
}

async fn wrong_tables(database: TestDatabase) {
    let (postgres, mysql) =
        (database.kind.backend() == DbBackend::Postgres, database.kind.backend() == DbBackend::MySql);
    let server = postgres || mysql;
    let cases = [
        (true, "topic varchar(255) NOT NULL,", "", "there is no column topic"),
        (true, "version bigint NOT NULL", "version bigint", "version may be null: make it NOT NULL"),
        (true, "status varchar(10) NOT NULL", "status varchar(10)", "status may be null"),
        (
            postgres,
            "available_at timestamptz NULL",
            "available_at timestamptz NOT NULL",
            "available_at is NOT NULL",
        ),
        (
            mysql,
            "available_at datetime(6) NULL",
            "available_at datetime(6) NOT NULL",
            "available_at is NOT NULL",
        ),
        (!server, "available_at text NULL", "available_at text NOT NULL", "available_at is NOT NULL"),
        (
            postgres,
            "lease_until timestamptz",
            "lease_until timestamp",
            "lease_until is timestamp without time zone",
        ),
        (
            mysql,
            "lease_until datetime(6)",
            "lease_until datetime",
            "lease_until is datetime(0): it must be datetime(6)",
        ),
        (
            mysql,
            "lease_until datetime(6)",
            "lease_until timestamp(6)",
            "lease_until is timestamp: it must be datetime(6)",
        ),
        (server, "status varchar(10)", "status varchar(4)", "status holds 4 characters: it must hold 10"),
        (server, "claimed_by varchar(100)", "claimed_by varchar(20)", "claimed_by holds 20 characters"),
        (server, "last_error varchar(2000)", "last_error varchar(200)", "last_error holds 200 characters"),
        (postgres, "id uuid", "id varchar(36)", "id is character varying: it must be uuid"),
        (mysql, "id binary(16)", "id char(36)", "id is char: it must be binary(16)"),
        (server, "version bigint", "version varchar(20)", "version is"),
    ];
    for (n, (_, from, to, expected)) in cases.into_iter().filter(|case| case.0).enumerate() {
        // A connection of SQLite may still know the index of the case before.
        let index = format!("parcel_due_{n}");
        let bench = Bench::<parcel::Entity>::create_with(&database, |sql| {
            sql.replacen(from, to, 1).replace("parcel_due", &index)
        })
        .await;
        let error = refusal::<parcel::Entity>(&database, Ordering::Unordered).await;
        assert!(error.contains("the table parcel") && error.contains(expected), "{to}: {error}");
        bench.execute("DROP TABLE parcel").await;
    }
    let error = refusal::<parcel::Entity>(&database, Ordering::Unordered).await;
    assert!(error.contains("the table parcel") && error.contains("cannot be used"), "{error}");
}

async fn short_enum(database: TestDatabase) {
    let short = |sql: &str| sql.replace(", 'dead')", ")");
    let error = match database.kind {
        Kind::Sqlite => return,
        Kind::Postgres | Kind::OldestPostgres => {
            Bench::<delivery_in_schema::Entity>::create_with(&database, short).await;
            refusal::<delivery_in_schema::Entity>(&database, Ordering::Unordered).await
        }
        Kind::MySql | Kind::MariaDb => {
            Bench::<delivery::Entity>::create_with(&database, short).await;
            refusal::<delivery::Entity>(&database, Ordering::Unordered).await
        }
    };
    assert!(error.contains("Delivery Log") && error.contains("state is an enum without dead"), "{error}");
}

async fn unknown_status(database: TestDatabase) {
    let bench = Bench::<parcel::Entity>::create(&database).await;
    bench.enqueue(5).await;
    bench.set(parcel::Column::Status, "'odd'").await;
    bench.enqueue(20).await;
    assert_eq!(bench.store.check_table().await.unwrap().unknown_statuses, [("odd".to_owned(), 5)]);
    let relay = quick::<parcel::Entity, _>(&database, RecordingPublisher::new()).build().unwrap().spawn();
    until_all(&bench, Status::Sent, 20).await;
    relay.shutdown().await.unwrap();
    assert_eq!(bench.seen().await.iter().filter(|row| row.status == "odd").count(), 5);
}

async fn wrong_rows(database: TestDatabase) {
    match database.kind {
        Kind::MySql | Kind::MariaDb => wrong_rows_of::<note_unsigned::Entity>(database).await,
        _ => wrong_rows_of::<note::Entity>(database).await,
    }
}

async fn wrong_rows_of<E: Own>(database: TestDatabase) {
    let bench = Bench::<E>::create(&database).await;
    bench.enqueue(40).await;
    let mut wrong = vec![
        (3, "headers = 'no JSON'", "headers are not an object of texts"),
        (5, "headers = '[1]'", "headers are not an object of texts"),
        (7, r#"headers = '{"a": 1}'"#, "headers are not an object of texts"),
        (9, "attempts = -3", "attempts is -3"),
        (11, "topic = NULL", "topic is null"),
        (13, "payload = NULL", "payload is null"),
        (15, "message_id = NULL", "message_id is null"),
    ];
    if database.kind == Kind::Sqlite {
        wrong.extend([
            (17, "payload = CAST(x'ff41' AS TEXT)", "payload: "),
            (19, "topic = x'00ff'", "topic: "),
            (21, "message_id = x'010203'", "message_id: "),
        ]);
        // These are mended by the claim.
        for change in [
            "attempts = 'three' WHERE id = 25",
            "attempts = 1.5 WHERE id = 23",
            "version = 'x' WHERE id = 27",
            "available_at = 17 WHERE id = 29",
        ] {
            bench.execute(&format!("UPDATE note SET {change}")).await;
        }
        // A claim that is stale, of somebody without a name.
        bench.execute(
            "UPDATE note SET status = 'PROCESSING', claimed_by = x'00ff', lease_until = available_at WHERE id = 31",
        )
        .await;
    }
    for (id, change, _) in &wrong {
        bench.execute(&format!("UPDATE note SET {change} WHERE id = {id}")).await;
    }
    let good = 40 - wrong.len();
    let relay = quick::<E, _>(&database, RecordingPublisher::new()).batch_size(10).build().unwrap().spawn();
    until_status(&database, "SENT", good).await;
    until_status(&database, "FAILED", wrong.len()).await;
    let report = relay.shutdown().await.unwrap();
    assert_eq!((report.sent, report.failed), (good as u64, wrong.len() as u64));
    for (id, change, expected) in wrong {
        let sql = format!("SELECT last_error FROM note WHERE id = {id}");
        let row = database.db.query_one_raw(statement(&database, sql)).await.unwrap().unwrap();
        let reason: String = row.try_get_by_index(0).unwrap();
        assert!(
            reason.starts_with("the row cannot be read: ") && reason.contains(expected),
            "{change}: {reason}"
        );
    }
}

fn statement(database: &TestDatabase, sql: String) -> sea_orm::Statement {
    sea_orm::Statement::from_string(database.kind.backend(), sql)
}

/// Without the entity, which cannot read rows that are wrong.
async fn until_status(database: &TestDatabase, status: &str, expected: usize) {
    eventually(&format!("{expected} rows to be {status}"), || async {
        let sql = format!("SELECT COUNT(*) FROM note WHERE status = '{status}'");
        let row = database.db.query_one_raw(statement(database, sql)).await.unwrap().unwrap();
        (row.try_get_by_index::<i64>(0).unwrap() == i64::try_from(expected).unwrap()).then_some(())
    })
    .await;
}

/// A user that may read and write the table, and nothing else.
async fn few_rights(database: TestDatabase) {
    let bench = match database.kind {
        Kind::Sqlite => return,
        Kind::Postgres | Kind::OldestPostgres => {
            let bench = Bench::<delivery_in_schema::Entity>::create(&database).await;
            limited::<delivery_in_schema::Entity>(&database, &bench, "Shop").await;
            return;
        }
        Kind::MySql | Kind::MariaDb => Bench::<delivery::Entity>::create(&database).await,
    };
    limited::<delivery::Entity>(&database, &bench, "").await;
}

async fn limited<E: Own>(database: &TestDatabase, bench: &Bench<E>, schema: &str) {
    let (scheme, rest) = database.url.split_once("://").unwrap();
    let (_, place) = rest.split_once('@').unwrap();
    let (_, name) = place.rsplit_once('/').unwrap();
    let user = format!("u_{}", &name[name.len().saturating_sub(20)..]);
    let postgres = database.kind.backend() == DbBackend::Postgres;
    let (account, create) = match postgres {
        true => (user.clone(), format!("CREATE ROLE {user} LOGIN PASSWORD 'few'")),
        false => (format!("'{user}'@'%'"), format!("CREATE USER '{user}'@'%' IDENTIFIED BY 'few'")),
    };
    bench.execute(&create).await;
    if postgres {
        bench.execute(&format!("GRANT USAGE ON SCHEMA \"{schema}\" TO {account}")).await;
    }
    bench.execute(&format!("GRANT SELECT, INSERT, UPDATE, DELETE ON {} TO {account}", bench.name())).await;
    let db = connect(&format!("{scheme}://{user}:few@{place}")).await;
    let store = Store::for_table::<E>(db.clone()).unwrap().with_ordering(HOLD).unwrap();
    let checked = store.check_table().await;
    let enqueued = Outbox::for_table::<E>().enqueue(&db, E::message(1)).await;
    let claimed = store.claim(&request(ClaimStrategy::SkipLocked, 10, "test:1", LEASE)).await;
    db.close().await.unwrap();
    let drop = match postgres {
        true => format!("DROP OWNED BY {account}; DROP ROLE {account}"),
        false => format!("DROP USER {account}"),
    };
    bench.execute(&drop).await;
    assert!(checked.unwrap().skip_locked);
    enqueued.unwrap();
    assert_eq!(claimed.unwrap().claims.len(), 1);
}
