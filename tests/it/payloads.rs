//! Values that are large or odd, rows that cannot be written, and locks that are in the way.

use std::time::Duration;

use libtest_mimic::Trial;
use sea_orm::{ConnectionTrait, DatabaseConnection, QueryResult, Statement, TransactionTrait};
use sea_orm_outbox::{
    Ack, Message, NewMessage, Outbox, PublishError, Publisher, Relay,
    entity::Status,
    lifecycle::{Outcome, RetryPolicy},
    store::{BehindFailed, ClaimRequest, ClaimStrategy, Ordering},
};

use tokio::time::sleep;

use crate::support::{
    Kind, TestDatabase, eventually, on_database, on_each_contract_database,
    rows::{LEASE, claim, claim_one, enqueue, let_leases_end, request, row, rows, store},
    within,
};

pub(crate) fn tests() -> Vec<Trial> {
    let mut tests: Vec<Trial> = [
        on_each_contract_database("payloads::five_megabytes_come_out_as_they_went_in", large),
        on_each_contract_database("payloads::no_index_holds_what_is_large", no_large_index),
        on_each_contract_database("payloads::an_error_of_any_text_settles", any_error),
        on_each_contract_database(
            "payloads::a_stale_row_that_cannot_be_written_holds_up_no_other",
            unsweepable,
        ),
    ]
    .into_iter()
    .flatten()
    .collect();
    for kind in Kind::CONTRACT {
        match kind {
            Kind::Sqlite => {}
            Kind::Postgres | Kind::OldestPostgres => {
                tests.push(on_database(kind, "payloads::the_earliest_time_of_all_harms_nobody", earliest));
                tests.push(on_database(kind, "payloads::a_deadlock_is_a_lost_race", deadlock));
            }
            Kind::MySql | Kind::MariaDb => {
                tests.push(on_database(kind, "payloads::the_earliest_time_of_all_harms_nobody", earliest));
                tests.push(on_database(kind, "payloads::a_database_of_another_character_set_serves", latin1));
                tests.push(on_database(kind, "payloads::a_deadlock_is_a_lost_race", deadlock));
                tests.push(on_database(kind, "payloads::a_lock_wait_that_ends_is_a_lost_race", lock_wait));
            }
        }
    }
    tests
}

/// What is written by hand to say: before all others.
async fn earliest(database: TestDatabase) {
    let db = &database.db;
    let earliest = match database.kind {
        Kind::Postgres | Kind::OldestPostgres => "'-infinity'",
        // MySQL refuses it.
        Kind::MariaDb => "'0000-00-00 00:00:00'",
        _ => "'1000-01-01 00:00:00'",
    };
    let per_key = Ordering::PerKey { behind_failed: BehindFailed::Hold };
    for ordering in [Ordering::Unordered, per_key] {
        enqueue(db, "t", 3).await;
        let first = format!("UPDATE outbox_message SET available_at = {earliest} WHERE status = 'PENDING'");
        db.execute_unprepared(&first).await.unwrap();
        enqueue(db, "t", 3).await;
        let store = store(db).with_ordering(ordering).unwrap();
        // A full batch, so that its last place is asked for; and on from there.
        let claimed = claim(&store, 2, LEASE).await;
        assert_eq!(claimed.claims.len(), 2);
        let rest = ClaimRequest {
            after: claimed.next.as_ref(),
            ..request(ClaimStrategy::SkipLocked, 10, "test:2", LEASE)
        };
        assert!(store.claim(&rest).await.unwrap().claims.len() >= 3);
        let_leases_end(db).await;
        let mut stale = 0;
        let mut position = None;
        loop {
            let step = store.stale(position.as_ref(), 2).await.unwrap();
            stale += step.stale.len();
            position = step.next;
            if position.is_none() {
                break;
            }
        }
        assert!(stale > 0);
        db.execute_unprepared("DELETE FROM outbox_message").await.unwrap();
    }
}

/// The table is of utf8mb4 whatever the database is.
async fn latin1(database: TestDatabase) {
    database.db.execute_unprepared("ALTER DATABASE CHARACTER SET latin1").await.unwrap();
    let db = database.connect_again().await;
    let store = store(&db);
    store.check_table().await.unwrap();
    enqueue(&db, "t", 1).await;
    let failed = Outcome::Permanent("é😀 п".to_owned());
    let settlement = claim_one(&store, LEASE).await.settle(failed, &RetryPolicy::default(), 0.0);
    assert!(store.settle(&[settlement]).await.unwrap().is_empty());
    assert_eq!(row(&db).await.last_error.as_deref(), Some("é😀 п"));
}

async fn large(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    // Every byte, none of them text.
    let payload: Vec<u8> = (0..5_000_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let message = NewMessage::bytes("t", "application/octet-stream", payload.clone());
    let outbox = Outbox::new().with_max_message_bytes(6_000_000);
    outbox.enqueue(db, message).await.expect("it is stored");
    let claim = claim_one(&store, LEASE).await;
    assert!(claim.message().payload() == payload.as_slice(), "the payload has changed");
    let sent = claim.settle(Outcome::Acknowledged, &RetryPolicy::default(), 0.0);
    assert!(store.settle(&[sent]).await.unwrap().is_empty());
    let row = row(db).await;
    assert_eq!(row.status, Status::Sent);
    assert!(row.payload == payload, "the payload has changed");
}

async fn no_large_index(database: TestDatabase) {
    let sql = match database.kind {
        Kind::Sqlite => {
            "SELECT c.name FROM pragma_index_list('outbox_message') i JOIN pragma_index_xinfo(i.name) c
             WHERE c.name IS NOT NULL"
        }
        Kind::Postgres | Kind::OldestPostgres => {
            "SELECT a.attname::text FROM pg_index i
             JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
             WHERE i.indrelid = 'outbox_message'::regclass"
        }
        Kind::MySql | Kind::MariaDb => {
            "SELECT column_name FROM information_schema.statistics
             WHERE table_schema = DATABASE() AND table_name = 'outbox_message'"
        }
    };
    let statement = Statement::from_string(database.kind.backend(), sql);
    let read = |row: &QueryResult| row.try_get_by_index::<String>(0).unwrap();
    let columns: Vec<String> = database.db.query_all_raw(statement).await.unwrap().iter().map(read).collect();
    assert!(columns.iter().any(|column| column == "available_at"), "the indexes were read: {columns:?}");
    for large in ["payload", "headers", "last_error"] {
        assert!(!columns.iter().any(|column| column == large), "{large} is in an index: {columns:?}");
    }
}

async fn any_error(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    let texts = [
        "a NUL \0 in the midst".to_owned(),
        "🦀".repeat(10_000),
        "ä\u{feff}\u{202e}' \" \\ ` $1 ? %s {} \r\n\t\u{1}".to_owned(),
        format!("{}🦀", "x".repeat(1_999)),
        String::new(),
    ];
    enqueue(db, "t", texts.len()).await;
    let policy = RetryPolicy::default();
    let claims = claim(&store, 100, LEASE).await.claims;
    let settled: Vec<_> = claims
        .into_iter()
        .zip(&texts)
        .map(|(claim, text)| claim.settle(Outcome::Permanent(text.clone()), &policy, 0.0))
        .collect();
    assert!(store.settle(&settled).await.expect("every text can be written").is_empty());
    let rows = rows(db).await;
    assert!(rows.iter().all(|row| row.status == Status::Failed));
    let errors: Vec<&str> = rows.iter().map(|row| row.last_error.as_deref().unwrap_or_default()).collect();
    assert!(errors[0].starts_with("a NUL ") && !errors[0].contains('\0'), "{:?}", errors[0]);
    assert!(errors[1].chars().count() <= 2_000 && errors[1].starts_with("🦀🦀"), "{}", errors[1].len());
    assert_eq!(errors[2], texts[2]);
    assert_eq!(errors[3], texts[3], "2,000 characters are kept");
}

/// Refuses every write to row 7 that gives it back.
async fn refuse_to_return(database: &TestDatabase) {
    let trigger = match database.kind {
        Kind::Sqlite => {
            "CREATE TRIGGER refuse BEFORE UPDATE ON outbox_message
             WHEN NEW.status <> 'PROCESSING' AND NEW.id = 7 BEGIN SELECT RAISE(ABORT, 'refused'); END"
        }
        Kind::MySql | Kind::MariaDb => {
            "CREATE TRIGGER refuse BEFORE UPDATE ON outbox_message FOR EACH ROW
             IF NEW.status <> 'PROCESSING' AND NEW.id = 7
             THEN SIGNAL SQLSTATE '23000' SET MESSAGE_TEXT = 'refused'; END IF"
        }
        Kind::Postgres | Kind::OldestPostgres => {
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               RAISE EXCEPTION 'refused' USING ERRCODE = 'check_violation'; END $$;
             CREATE TRIGGER refuse BEFORE UPDATE ON outbox_message FOR EACH ROW
             WHEN (NEW.status <> 'PROCESSING' AND NEW.id = 7) EXECUTE FUNCTION refuse()"
        }
    };
    database.db.execute_unprepared(trigger).await.unwrap();
}

/// Publishes nothing; the sweep works on its own.
struct Unreachable;

impl Publisher for Unreachable {
    async fn publish(&self, _: &Message) -> Result<Ack, PublishError> {
        panic!("nothing may be published")
    }

    fn is_connected(&self) -> bool {
        false
    }
}

async fn unsweepable(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 20).await;
    assert_eq!(claim(&store, 20, LEASE).await.claims.len(), 20);
    let_leases_end(db).await;
    refuse_to_return(&database).await;
    let relay = Relay::builder(db.clone(), Unreachable)
        .sweep_every(Duration::from_millis(50))
        .build()
        .unwrap()
        .spawn();
    eventually("the others to be returned", || async {
        let returned = rows(db).await.iter().filter(|row| row.status == Status::Pending).count();
        (returned == 19).then_some(())
    })
    .await;
    assert_eq!(rows(db).await[6].status, Status::Processing);
    within(Duration::from_secs(10), "the relay to stop", relay.shutdown()).await.unwrap();
}

/// Whoever is in the way locks the last row first and the first one last, as no statement of ours does.
async fn deadlock(database: TestDatabase) {
    let db = &database.db;
    enqueue(db, "t", 20).await;
    // InnoDB tells the one that has written less to give way.
    db.execute_unprepared("CREATE TABLE weight (id bigint)").await.unwrap();
    for _ in 0..20 {
        let other = db.begin().await.unwrap();
        let heavy = "INSERT INTO weight SELECT a.id FROM outbox_message a, outbox_message b";
        other.execute_unprepared(heavy).await.unwrap();
        other.execute_unprepared("SELECT 1 FROM outbox_message WHERE id = 20 FOR UPDATE").await.unwrap();
        let claiming = {
            // It waits for row 20 and holds the nineteen before.
            let store = store(db);
            tokio::spawn(async move {
                store.claim(&request(ClaimStrategy::Optimistic, 20, "test:1", LEASE)).await
            })
        };
        until_somebody_waits(&database).await;
        // One of the two is told to give way; whichever it is, the claim has no error.
        let crossed = other.execute_unprepared("SELECT 1 FROM outbox_message WHERE id = 1 FOR UPDATE").await;
        drop(crossed);
        let _ = other.rollback().await;
        let claimed = within(Duration::from_secs(20), "the claim", claiming).await.unwrap();
        let claimed = claimed.expect("a deadlock is no error of a claim");
        if claimed.claims.is_empty() {
            assert_eq!((claimed.lost_races, claimed.more), (1, true), "it is worth another try");
            return;
        }
        let pending = "UPDATE outbox_message SET status = 'PENDING', claimed_by = NULL, lease_until = NULL";
        db.execute_unprepared(pending).await.unwrap();
    }
    panic!("the claim was never the one to give way");
}

async fn until_somebody_waits(database: &TestDatabase) {
    let sql = match database.kind {
        Kind::MySql => "SELECT CAST(COUNT(*) AS SIGNED) FROM performance_schema.data_lock_waits",
        Kind::MariaDb => "SELECT CAST(COUNT(*) AS SIGNED) FROM information_schema.innodb_lock_waits",
        _ => {
            "SELECT COUNT(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        }
    };
    eventually("the claim to wait for a lock", || async {
        if database.kind == Kind::MariaDb {
            // It answers from a copy that it renews only when nobody has asked for a tenth of a second.
            sleep(Duration::from_millis(150)).await;
        }
        let statement = Statement::from_string(database.kind.backend(), sql);
        let row = database.db.query_one_raw(statement).await.unwrap().unwrap();
        (row.try_get_by_index::<i64>(0).unwrap() > 0).then_some(())
    })
    .await;
}

async fn lock_wait(database: TestDatabase) {
    let db: &DatabaseConnection = &database.db;
    enqueue(db, "t", 3).await;
    let other = db.begin().await.unwrap();
    other.execute_unprepared("SELECT 1 FROM outbox_message WHERE id = 3 FOR UPDATE").await.unwrap();
    let impatient = crate::support::database::connect_with(&database.url, |options| {
        options.max_connections(1).after_connect(|db| {
            Box::pin(async move {
                db.execute_unprepared("SET SESSION innodb_lock_wait_timeout = 1").await.map(drop)
            })
        });
    })
    .await;
    let store = store(&impatient);
    let claimed = store.claim(&request(ClaimStrategy::Optimistic, 10, "test:1", LEASE)).await;
    let claimed = claimed.expect("a lock wait that is over is no error of a claim");
    assert_eq!((claimed.claims.len(), claimed.lost_races, claimed.more), (0, 1, true));
    other.rollback().await.unwrap();
    let claimed = store.claim(&request(ClaimStrategy::Optimistic, 10, "test:1", LEASE)).await.unwrap();
    assert_eq!(claimed.claims.len(), 3, "nothing of the first try is left");
}
