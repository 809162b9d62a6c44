//! One clock: the database's.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use sea_orm::{ConnectionTrait, DatabaseConnection, Statement, prelude::DateTimeUtc};
use sea_orm_outbox::{
    NewMessage, Outbox,
    lifecycle::{Outcome, RetryPolicy},
};

use crate::support::{
    Kind, TestDatabase,
    database::connect_with,
    eventually, on_each_contract_database,
    rows::{claim, enqueue, fill, rows, store},
};

pub(crate) fn tests() -> Vec<Trial> {
    let mut tests = Vec::new();
    tests.extend(on_each_contract_database(
        "time::no_session_time_zone_moves_a_due_time_or_a_lease",
        time_zones,
    ));
    tests.extend(on_each_contract_database("time::a_delayed_message_is_due_when_its_delay_is_over", delay));
    tests.push(Trial::test("time::nothing_that_is_written_comes_from_the_local_clock", || {
        no_local_clock();
        Ok(())
    }));
    tests
}

/// A connection of an application whose sessions are in this time zone.
async fn in_zone(database: &TestDatabase, zone: &'static str) -> DatabaseConnection {
    // After all that sqlx sets by itself, which is UTC.
    let set = match database.kind {
        Kind::Sqlite => "SELECT 1".to_owned(),
        Kind::Postgres | Kind::OldestPostgres => format!("SET TIME ZONE INTERVAL '{zone}' HOUR TO MINUTE"),
        Kind::MySql | Kind::MariaDb => format!("SET SESSION time_zone = '{zone}'"),
    };
    connect_with(&database.url, |options| {
        // Of one connection: the setting is not made for those that come later.
        options.max_connections(1).after_connect(move |db| {
            let set = set.clone();
            Box::pin(async move { db.execute_unprepared(&set).await.map(drop) })
        });
    })
    .await
}

/// What time it is for the database, and nothing else.
async fn database_now(database: &TestDatabase) -> DateTimeUtc {
    let sql = match database.kind {
        Kind::Sqlite => "SELECT strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now')",
        Kind::Postgres | Kind::OldestPostgres => "SELECT clock_timestamp()",
        Kind::MySql | Kind::MariaDb => "SELECT UTC_TIMESTAMP(6)",
    };
    let row = database.db.query_one_raw(Statement::from_string(database.kind.backend(), sql)).await;
    let row = row.unwrap().unwrap();
    match database.kind {
        Kind::Sqlite => {
            let text: String = row.try_get_by_index(0).unwrap();
            text.parse().unwrap()
        }
        Kind::MySql | Kind::MariaDb => {
            row.try_get_by_index::<sea_orm::prelude::DateTime>(0).unwrap().and_utc()
        }
        _ => row.try_get_by_index(0).unwrap(),
    }
}

fn seconds(from: DateTimeUtc, to: DateTimeUtc) -> f64 {
    (to - from).as_seconds_f64()
}

async fn time_zones(database: TestDatabase) {
    const HOUR: Duration = Duration::from_secs(3_600);
    let zones: &[&'static str] = match database.kind {
        // It has none.
        Kind::Sqlite => &["+00:00"],
        _ => &["+05:30", "-08:00", "+00:00"],
    };
    for writer in zones {
        for reader in zones {
            let name = format!("written at {writer}, read at {reader}");
            database.db.execute_unprepared("DELETE FROM outbox_message").await.unwrap();
            let writing = in_zone(&database, writer).await;
            let reading = in_zone(&database, reader).await;
            let before = database_now(&database).await;
            enqueue(&writing, "t", 1).await;
            // By hand: the defaults of the columns.
            fill(&writing, 1, &[]).await;
            let later = NewMessage::json("t", &1).unwrap().delay(HOUR);
            Outbox::new().enqueue(&writing, later).await.unwrap();
            let after = database_now(&database).await;

            let written = rows(&reading).await;
            for (row, delay) in written.iter().zip([0.0, 0.0, 3_600.0]) {
                let due = row.available_at.expect("it waits");
                // What SQLite and SeaORM write has milliseconds.
                assert!(seconds(before, due) - delay >= -0.001, "{name}: {due}, not {before} or later");
                assert!(seconds(due, after) + delay >= -0.001, "{name}: {due}, not {after} or earlier");
                assert!(
                    seconds(before, row.created_at) >= -0.001 && seconds(row.created_at, after) >= -0.001
                );
            }

            // Due at once, and leased by the clock that judges it.
            let (reading_store, before) = (store(&reading), database_now(&database).await);
            let claimed = claim(&reading_store, 10, HOUR).await.claims;
            let after = database_now(&database).await;
            assert_eq!(claimed.len(), 2, "{name}");
            for row in rows(&writing).await.iter().filter(|row| row.lease_until.is_some()) {
                let until = row.lease_until.unwrap();
                assert!(
                    seconds(before, until) >= 3_599.999 && seconds(after, until) <= 3_600.001,
                    "{name}: {until}"
                );
            }
            let writing_store = store(&writing);
            assert_eq!(
                writing_store.stale(None, 10).await.unwrap().stale.len(),
                0,
                "{name}: no lease is over"
            );
            // A lease that is over in one zone is so in each.
            let fences: Vec<_> = claimed.iter().map(|claim| claim.fence()).collect();
            assert!(writing_store.renew(&fences, Duration::ZERO).await.unwrap().is_empty());
            eventually("the leases to be over", || async {
                (reading_store.stale(None, 10).await.unwrap().stale.len() == 2).then_some(())
            })
            .await;

            // A backoff and the end of a message.
            let policy =
                RetryPolicy::default().with_initial_delay(HOUR).with_max_delay(HOUR).with_jitter(0.0);
            let outcomes = [Outcome::Transient("x".to_owned()), Outcome::Acknowledged];
            let settled: Vec<_> = claimed
                .into_iter()
                .zip(outcomes)
                .map(|(claim, outcome)| claim.settle(outcome, &policy, 0.0))
                .collect();
            let before = database_now(&database).await;
            assert!(reading_store.settle(&settled).await.unwrap().is_empty());
            let after = database_now(&database).await;
            let rows = rows(&writing).await;
            let retried = rows[0].available_at.expect("it waits");
            assert!(seconds(before, retried) >= 3_599.999 && seconds(after, retried) <= 3_600.001, "{name}");
            let sent = rows[1].sent_at.expect("it was sent");
            assert!(seconds(before, sent) >= -0.001 && seconds(sent, after) >= -0.001, "{name}: {sent}");
        }
    }
}

async fn delay(database: TestDatabase) {
    const DELAY: Duration = Duration::from_millis(1_700);
    /// For a machine that is busy.
    const GRACE: Duration = Duration::from_secs(5);
    let db = &database.db;
    let message = NewMessage::json("t", &1).unwrap().delay(DELAY);
    let began = Instant::now();
    Outbox::new().enqueue(db, message).await.unwrap();
    let enqueued = Instant::now();
    let store = store(db);
    let found = eventually("the message to become due", || async {
        let asked = Instant::now();
        claim(&store, 1, DELAY).await.claims.pop().map(|claim| (claim, asked))
    })
    .await;
    let (owner, asked) = found;
    assert!(began.elapsed() >= DELAY - Duration::from_millis(2), "it was claimed too early");
    assert!(asked < enqueued + DELAY + GRACE, "it was claimed too late");

    // The same for a lease.
    let claimed = Instant::now();
    let stale =
        eventually("the lease to be over", || async { store.stale(None, 10).await.unwrap().stale.pop() })
            .await;
    assert!(asked.elapsed() >= DELAY - Duration::from_millis(2), "the lease ended too early");
    assert!(claimed.elapsed() < DELAY + GRACE, "the lease ended too late");

    // And for a backoff.
    let policy = RetryPolicy::default().with_initial_delay(DELAY).with_jitter(0.0);
    drop(stale);
    let (asked, retry) = (Instant::now(), owner.settle(Outcome::Transient("x".to_owned()), &policy, 0.0));
    assert!(store.settle(&[retry]).await.unwrap().is_empty());
    let settled = Instant::now();
    let found = eventually("the backoff to be over", || async { claim(&store, 1, DELAY).await.claims.pop() });
    assert_eq!(found.await.attempts(), 2);
    assert!(asked.elapsed() >= DELAY - Duration::from_millis(2), "it was tried again too early");
    assert!(settled.elapsed() < DELAY + GRACE, "it was tried again too late");
}

/// `Instant` is allowed: it is only ever compared with itself.
fn no_local_clock() {
    fn search(folder: &std::path::Path, found: &mut Vec<String>, files: &mut usize) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                search(&path, found, files);
                continue;
            }
            *files += 1;
            let source = std::fs::read_to_string(&path).unwrap();
            let source: String = source.lines().filter(|line| !line.trim_start().starts_with("--")).collect();
            for clock in
                ["Utc::now", "Local::now", "SystemTime", "now_utc", "now_local", "CURRENT_TIMESTAMP", "NOW()"]
            {
                if source.contains(clock) {
                    found.push(format!("{}: {clock}", path.display()));
                }
            }
        }
    }
    let (mut found, mut files) = (Vec::new(), 0);
    for folder in ["src", "entity/src", "migration/src"] {
        search(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &mut found, &mut files);
    }
    assert!(files > 20, "the sources were found");
    assert!(found.is_empty(), "{found:#?}");
}
