//! The migrations run up, down and up again, twice, and from several processes at once.

use std::{sync::Arc, time::Duration};

use libtest_mimic::Trial;
use sea_orm::{
    ConnectionTrait, DatabaseConnection, DbBackend, EntityTrait, PaginatorTrait, TransactionTrait,
};
use sea_orm_outbox::{
    NewMessage, Outbox,
    entity::outbox_message::Entity,
    migration::{MigrationTrait, Migrator, MigratorTrait, migrations},
};
use tokio::{sync::Barrier, task::JoinSet, time::timeout};

use crate::support::{
    Kind, TestDatabase, on_database, on_each_contract_database,
    rows::{LEASE, claim, rows, store},
    within,
};

pub(crate) fn tests() -> Vec<Trial> {
    let mut tests = on_each_contract_database("migration::up_down_and_up_again_works", up_down_up);
    tests.extend(on_each_contract_database("migration::up_twice_changes_nothing", twice));
    tests
        .extend(on_each_contract_database("migration::an_application_appends_the_list_to_its_own", appended));
    tests.extend(on_each_contract_database("migration::three_processes_at_once_work", at_once));
    tests.extend(on_each_contract_database("migration::a_failure_lets_the_next_one_in", failed));
    tests.extend(on_each_contract_database("migration::one_that_is_dropped_lets_the_next_one_in", dropped));
    tests.extend(on_each_contract_database(
        "migration::they_run_in_a_transaction_of_the_caller",
        in_transaction,
    ));
    for kind in [Kind::MySql, Kind::MariaDb] {
        tests.push(on_database(kind, "migration::one_that_was_cut_off_runs_again", cut_off));
    }
    tests.extend(on_each_contract_database(
        "migration::hand_written_rows_get_defaults_that_work",
        hand_written,
    ));
    tests
        .extend(on_each_contract_database("migration::rows_that_no_relay_could_handle_are_refused", refused));
    tests
}

async fn has_table(db: &DatabaseConnection) -> bool {
    Entity::find().count(db).await.is_ok()
}

/// Writes a row by hand, as an application in another language would.
async fn insert(database: &TestDatabase) {
    let payload = if database.kind.backend() == DbBackend::Postgres { r"'\x7b7d'" } else { "x'7b7d'" };
    let insert = format!("INSERT INTO outbox_message (topic, payload) VALUES ('t', {payload})");
    database.db.execute_unprepared(&insert).await.unwrap();
}

async fn up_down_up(database: TestDatabase) {
    let db = &database.db;
    assert!(has_table(db).await);
    Migrator::down(db, None).await.unwrap();
    assert!(!has_table(db).await);
    Migrator::up(db, None).await.unwrap();
    insert(&database).await;
    Migrator::refresh(db).await.unwrap();
    assert_eq!(rows(db).await.len(), 0, "a refresh makes the table anew");
}

async fn twice(database: TestDatabase) {
    let db = &database.db;
    insert(&database).await;
    Migrator::up(db, None).await.unwrap();
    assert_eq!(rows(db).await.len(), 1);
    assert_eq!(Migrator::get_pending_migrations(db).await.unwrap().len(), 0);
}

/// The pools stand for processes: each has connections of its own.
async fn at_once(database: TestDatabase) {
    let pools =
        [database.connect_again().await, database.connect_again().await, database.connect_again().await];
    for round in 0..6 {
        Migrator::down(&database.db, None).await.unwrap();
        let barrier = Arc::new(Barrier::new(pools.len()));
        let mut tasks = JoinSet::new();
        for db in pools.clone() {
            let barrier = barrier.clone();
            tasks.spawn(async move {
                // At the very same moment, and a little apart.
                if round % 2 == 0 {
                    barrier.wait().await;
                }
                Migrator::up(&db, None).await
            });
        }
        for result in tasks.join_all().await {
            result.unwrap();
        }
        assert!(has_table(&database.db).await);
    }
}

async fn failed(database: TestDatabase) {
    let (db, other) = (&database.db, database.connect_again().await);
    let unknown = "INSERT INTO outbox_migrations (version, applied_at) VALUES ('unknown', 0)";
    db.execute_unprepared(unknown).await.unwrap();
    for db in [db, &other, db] {
        let failed = within(Duration::from_secs(10), "the failure", Migrator::up(db, None)).await;
        assert!(failed.unwrap_err().to_string().contains("unknown"));
    }
    db.execute_unprepared("DELETE FROM outbox_migrations WHERE version = 'unknown'").await.unwrap();
    within(Duration::from_secs(10), "the next one", Migrator::up(&other, None)).await.unwrap();
}

async fn dropped(database: TestDatabase) {
    let (db, other) = (&database.db, database.connect_again().await);
    // Wherever it just is.
    for millis in 0..40 {
        let _ = timeout(Duration::from_millis(millis), Migrator::refresh(db)).await;
    }
    within(Duration::from_secs(10), "the next one", Migrator::up(&other, None)).await.unwrap();
    assert!(has_table(&other).await);
}

async fn in_transaction(database: TestDatabase) {
    let (db, other) = (&database.db, database.connect_again().await);
    insert(&database).await;
    let txn = db.begin().await.unwrap();
    Migrator::down(&txn, None).await.unwrap();
    Migrator::up(&txn, None).await.unwrap();
    txn.commit().await.unwrap();
    assert_eq!(rows(db).await.len(), 0, "the table is a new one");
    within(Duration::from_secs(10), "the next one", Migrator::up(&other, None)).await.unwrap();
}

/// Where a table commits by itself, its row in the history can be missing, or be there without it.
async fn cut_off(database: TestDatabase) {
    let db = &database.db;
    insert(&database).await;
    db.execute_unprepared("DELETE FROM outbox_migrations").await.unwrap();
    Migrator::up(db, None).await.unwrap();
    assert_eq!(rows(db).await.len(), 1, "the table is the same");
    db.execute_unprepared("DROP TABLE outbox_message").await.unwrap();
    Migrator::down(db, None).await.unwrap();
    Migrator::up(db, None).await.unwrap();
    assert!(has_table(db).await);
}

async fn appended(database: TestDatabase) {
    struct Application;
    impl MigratorTrait for Application {
        fn migrations() -> Vec<Box<dyn MigrationTrait>> {
            migrations()
        }
    }
    let db = &database.db;
    Migrator::down(db, None).await.unwrap();
    Application::up(db, None).await.unwrap();
    insert(&database).await;
    Application::down(db, None).await.unwrap();
    assert!(!has_table(db).await);
}

async fn hand_written(database: TestDatabase) {
    let db = &database.db;
    insert(&database).await;
    Outbox::new().enqueue(db, NewMessage::bytes("t", "application/json", "{}")).await.unwrap();
    let rows = rows(db).await;
    let (by_hand, by_library) = (&rows[0], &rows[1]);
    assert_eq!(by_hand.payload, by_library.payload);
    assert_eq!((by_hand.status, by_hand.version), (by_library.status, by_library.version));
    assert_eq!(by_hand.headers, by_library.headers);
    assert_eq!(by_hand.content_type, by_library.content_type);
    assert_ne!(by_hand.message_id, by_library.message_id);
    for (earlier, later) in [
        (by_hand.available_at.unwrap(), by_library.available_at.unwrap()),
        (by_hand.created_at, by_library.created_at),
    ] {
        let apart = later - earlier;
        assert!((0.0..10.0).contains(&apart.as_seconds_f64()), "{apart}");
    }
    assert_eq!(claim(&store(db), 10, LEASE).await.claims.len(), 2, "both are due");
}

async fn refused(database: TestDatabase) {
    let db = &database.db;
    insert(&database).await;
    for change in [
        "status = 'LOST'",
        "status = 'PENDING '",
        "status = 'pending'",
        "version = -1",
        "attempts = -1",
        "requeues = -1",
        "headers = '[]'",
        "headers = 'nothing'",
        "available_at = NULL",
        "status = 'SENT'",
        "status = 'PROCESSING'",
        "lease_until = available_at",
        "status = 'SENT', available_at = NULL",
        "status = 'FAILED', available_at = NULL, sent_at = created_at",
        "payload = NULL",
    ] {
        let update = format!("UPDATE outbox_message SET {change}");
        assert!(db.execute_unprepared(&update).await.is_err(), "{change}");
    }
    // SQLite has no types of its own for these.
    if database.kind == Kind::Sqlite {
        for change in [
            "attempts = 'many'",
            "message_id = x'00'",
            "payload = 'text'",
            "available_at = CURRENT_TIMESTAMP",
            "available_at = 0",
        ] {
            let update = format!("UPDATE outbox_message SET {change}");
            assert!(db.execute_unprepared(&update).await.is_err(), "{change}");
        }
    }
    assert_eq!(rows(db).await.len(), 1);
}
