//! Who wins a row, and what it costs the others.

use std::{collections::HashSet, sync::Arc, time::Duration};

use libtest_mimic::Trial;
use sea_orm::{ConnectionTrait, DbBackend, Statement, TransactionTrait};
use sea_orm_outbox::{
    lifecycle::{Outcome, RetryPolicy},
    store::{ClaimStrategy, Fence, RowId, Unreadable},
};
use tokio::{sync::Barrier, task::JoinSet};

use crate::support::{
    Kind, TestDatabase, on_database, on_each_contract_database,
    rows::{LEASE, claim, enqueue, let_delays_end, let_leases_end, request, row, rows, store},
    within,
};

pub(crate) fn tests() -> Vec<Trial> {
    let mut tests: Vec<Trial> = [
        on_each_contract_database("claim::of_two_relays_that_read_version_0_one_wins", two_read_version_0),
        on_each_contract_database("claim::relays_at_once_never_win_the_same_row", at_once),
        on_each_contract_database("claim::rows_come_in_the_order_in_which_they_became_due", in_order),
        on_each_contract_database("claim::what_became_due_earlier_comes_first_whatever_its_id", due_order),
        on_each_contract_database("claim::a_row_that_cannot_be_read_harms_only_itself", unreadable),
        on_each_contract_database("claim::candidates_are_one_slice_of_the_head", slices),
    ]
    .into_iter()
    .flatten()
    .collect();
    // SQLite has no row locks.
    for kind in Kind::CONTRACT.into_iter().filter(|kind| *kind != Kind::Sqlite) {
        tests.push(on_database(kind, "claim::a_locked_row_is_passed_over", passes_over));
        tests.push(on_database(kind, "claim::a_sweep_does_not_wait_for_the_owner", sweep_passes_over));
    }
    tests.push(on_database(
        Kind::Postgres,
        "claim::without_statistics_reads_no_more_than_it_claims",
        no_statistics,
    ));
    tests
}

async fn two_read_version_0(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 1).await;
    let read_by_a = store.candidates(10).await.unwrap();
    let read_by_b = store.candidates(10).await.unwrap();
    assert_eq!(read_by_a, [Fence::from(&row(db).await)]);
    assert_eq!(read_by_a, read_by_b);

    let a = store.claim_candidates(&read_by_a, "a:1", LEASE).await.unwrap();
    assert_eq!((a.claims.len(), a.lost_races), (1, 0));
    let after_a = row(db).await;
    let b = store.claim_candidates(&read_by_b, "b:1", LEASE).await.unwrap();
    assert_eq!((b.claims.len(), b.lost_races), (0, 1), "the loser has nothing to publish");
    assert_eq!(row(db).await, after_a, "and changes nothing");

    // It goes on to other rows.
    enqueue(db, "t", 1).await;
    let other = store.claim(&request(ClaimStrategy::Optimistic, 10, "b:2", LEASE)).await.unwrap();
    assert_eq!((other.claims.len(), other.lost_races), (1, 0));
    assert_ne!(other.claims[0].fence().id, a.claims[0].fence().id);
}

/// Eight workers with pools of their own, until nothing is left.
async fn at_once(database: TestDatabase) {
    const ROWS: usize = 2_000;
    for strategy in [ClaimStrategy::SkipLocked, ClaimStrategy::Optimistic] {
        database.db.execute_unprepared("DELETE FROM outbox_message").await.unwrap();
        enqueue(&database.db, "t", ROWS).await;
        let barrier = Arc::new(Barrier::new(8));
        let mut workers = JoinSet::new();
        for worker in 0..8 {
            let store = store(&database.connect_again().await);
            let barrier = barrier.clone();
            workers.spawn(async move {
                barrier.wait().await;
                let (mut won, name) = (Vec::new(), format!("worker-{worker}:1"));
                loop {
                    let claimed = store.claim(&request(strategy, 20, &name, LEASE)).await.unwrap();
                    if claimed.claims.is_empty() && !claimed.more {
                        return won;
                    }
                    won.extend(claimed.claims.iter().map(|claim| claim.fence().id));
                }
            });
        }
        let won: Vec<RowId> = workers.join_all().await.concat();
        let distinct: HashSet<RowId> = won.iter().copied().collect();
        assert_eq!(distinct.len(), won.len(), "{strategy:?}: a row was won twice");
        assert_eq!(distinct.len(), ROWS, "{strategy:?}: a row was won by nobody");
        assert!(rows(&database.db).await.iter().all(|row| (row.version, row.attempts) == (1, 1)));
    }
}

async fn in_order(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 10).await;
    let policy = RetryPolicy::default();
    let first = claim(&store, 3, LEASE).await.claims;
    let ids: Vec<RowId> = first.iter().map(|claim| claim.fence().id).collect();
    assert_eq!(ids, [1, 2, 3]);
    // A retry falls behind those that wait already.
    let retried = first.into_iter().map(|c| c.settle(Outcome::Transient("x".into()), &policy, 0.0));
    assert!(store.settle(&retried.collect::<Vec<_>>()).await.unwrap().is_empty());
    let next = claim(&store, 3, LEASE).await.claims;
    assert_eq!(next.iter().map(|claim| claim.fence().id).collect::<Vec<_>>(), [4, 5, 6]);
    let_delays_end(db).await;
    let all = claim(&store, 10, LEASE).await.claims;
    assert_eq!(all.len(), 7);
}

async fn due_order(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 10).await;
    // The times of the first and the last three change places.
    for (ids, minutes) in [("id <= 3", 1), ("id >= 8", 3)] {
        let earlier = match database.kind {
            Kind::Postgres | Kind::OldestPostgres => format!("available_at - interval '{minutes} minutes'"),
            Kind::MySql | Kind::MariaDb => format!("available_at - INTERVAL {minutes} MINUTE"),
            Kind::Sqlite => {
                format!("strftime('%Y-%m-%dT%H:%M:%f+00:00', available_at, '-{minutes} minutes')")
            }
        };
        let update = format!("UPDATE outbox_message SET available_at = {earlier} WHERE {ids}");
        db.execute_unprepared(&update).await.unwrap();
    }
    let all = store.candidates(10).await.unwrap();
    assert_eq!(all.iter().map(|fence| fence.id).collect::<Vec<_>>(), [8, 9, 10, 1, 2, 3, 4, 5, 6, 7]);
    for expected in [[8, 9, 10], [1, 2, 3], [4, 5, 6]] {
        let claimed = claim(&store, 3, LEASE).await.claims;
        assert_eq!(claimed.iter().map(|claim| claim.fence().id).collect::<Vec<_>>(), expected);
    }
}

async fn unreadable(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 10).await;
    let broken = r#"UPDATE outbox_message SET headers = '{"a": [1]}' WHERE id = 5"#;
    db.execute_unprepared(broken).await.unwrap();
    let claimed = claim(&store, 10, LEASE).await;
    assert_eq!((claimed.claims.len(), claimed.unreadable.len()), (9, 1));
    let failed: Vec<_> = claimed.unreadable.into_iter().map(Unreadable::settle).collect();
    assert!(store.settle(&failed).await.unwrap().is_empty());
    let failed = rows(db).await.remove(4);
    assert_eq!(failed.status, sea_orm_outbox::entity::Status::Failed);
    let error = failed.last_error.unwrap();
    assert!(error.contains("headers"), "{error}");
}

async fn slices(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 200).await;
    let mut firsts = HashSet::new();
    for _ in 0..100 {
        let slice = store.candidates(10).await.unwrap();
        assert_eq!(slice.len(), 10);
        let ids: Vec<i64> = slice.iter().map(|fence| number(fence.id)).collect();
        assert!(ids.windows(2).all(|pair| pair[1] == pair[0] + 1), "{ids:?} is contiguous");
        assert!(ids[9] <= 160, "{ids:?} is within the first 16 slices");
        firsts.insert(ids[0]);
    }
    assert!(firsts.len() > 4, "chance chooses among them: {firsts:?}");
}

fn number(id: RowId) -> i64 {
    match id {
        RowId::Integer(id) => id,
        other => panic!("{other} is no number"),
    }
}

/// Somebody else holds the lock of one row.
async fn passes_over(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 10).await;
    let other = db.begin().await.unwrap();
    other.execute_unprepared("SELECT 1 FROM outbox_message WHERE id = 1 FOR UPDATE").await.unwrap();
    let claimed = within(Duration::from_secs(2), "a claim beside a lock", claim(&store, 10, LEASE)).await;
    assert_eq!((claimed.claims.len(), claimed.lost_races), (9, 0));
    other.rollback().await.unwrap();
}

/// The table was never analysed, as in the first minutes of an application.
async fn no_statistics(database: TestDatabase) {
    const ROWS: usize = 2_000;
    let db = &database.db;
    db.execute_unprepared("ALTER TABLE outbox_message SET (autovacuum_enabled = off)").await.unwrap();
    enqueue(db, "t", ROWS).await;
    let apart = database.connect_again().await;
    assert_eq!(claim(&store(&apart), 10, LEASE).await.claims.len(), 10);
    // With the session, what it has counted becomes visible.
    apart.close().await.unwrap();
    let read = "SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'outbox_message_due'";
    let read = Statement::from_string(DbBackend::Postgres, read);
    let entries = within(Duration::from_secs(20), "the server's count of what was read", async {
        loop {
            let row = db.query_one_raw(read.clone()).await.unwrap().unwrap();
            match row.try_get_by_index::<i64>(0).unwrap() {
                0 => tokio::time::sleep(Duration::from_millis(10)).await,
                entries => return entries,
            }
        }
    })
    .await;
    assert!(entries < 100, "{entries} entries of the index were read to claim 10 of {ROWS} rows");
}

async fn sweep_passes_over(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 2).await;
    let claims = claim(&store, 2, LEASE).await.claims;
    let_leases_end(db).await;
    let stale = store.stale(None, 10).await.unwrap().stale;
    let swept: Vec<_> = stale.into_iter().map(|stale| stale.settle(&RetryPolicy::default())).collect();
    let owner = db.begin().await.unwrap();
    owner.execute_unprepared("SELECT 1 FROM outbox_message WHERE id = 1 FOR UPDATE").await.unwrap();
    let lost = within(Duration::from_secs(2), "a sweep beside a lock", store.settle(&swept)).await.unwrap();
    assert_eq!(lost.fences(), [claims[0].fence()], "its neighbour is returned all the same");
    owner.rollback().await.unwrap();
}
