//! Who wins a row, and what it costs the others.

use std::{collections::HashSet, sync::Arc};

use libtest_mimic::Trial;
use sea_orm::ConnectionTrait;
use sea_orm_outbox::{
    lifecycle::{Outcome, RetryPolicy},
    store::{ClaimStrategy, Fence},
};
use tokio::{sync::Barrier, task::JoinSet};

use crate::support::{
    TestDatabase, on_each_database,
    rows::{LEASE, claim, enqueue, let_delays_end, row, rows, store},
};

pub(crate) fn tests() -> Vec<Trial> {
    [
        on_each_database("claim::of_two_relays_that_read_version_0_one_wins", two_read_version_0),
        on_each_database("claim::relays_at_once_never_win_the_same_row", at_once),
        on_each_database("claim::rows_come_in_the_order_in_which_they_became_due", in_order),
        on_each_database("claim::a_row_that_cannot_be_read_harms_only_itself", unreadable),
        on_each_database("claim::candidates_are_one_slice_of_the_head", slices),
    ]
    .into_iter()
    .flatten()
    .collect()
}

async fn two_read_version_0(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 1).await;
    let read_by_a = store.candidates(10).await.unwrap();
    let read_by_b = store.candidates(10).await.unwrap();
    assert_eq!(read_by_a, [Fence { id: row(db).await.id, version: 0 }]);
    assert_eq!(read_by_a, read_by_b);

    let a = store.claim_candidates(&read_by_a, "a:1", LEASE).await.unwrap();
    assert_eq!((a.claims.len(), a.lost_races), (1, 0));
    let after_a = row(db).await;
    let b = store.claim_candidates(&read_by_b, "b:1", LEASE).await.unwrap();
    assert_eq!((b.claims.len(), b.lost_races), (0, 1), "the loser has nothing to publish");
    assert_eq!(row(db).await, after_a, "and changes nothing");

    // It goes on to other rows.
    enqueue(db, "t", 1).await;
    let other = store.claim(ClaimStrategy::Optimistic, 10, "b:2", LEASE).await.unwrap();
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
                    let claimed = store.claim(strategy, 20, &name, LEASE).await.unwrap();
                    if claimed.claims.is_empty() && !claimed.more {
                        return won;
                    }
                    won.extend(claimed.claims.iter().map(|claim| claim.fence().id));
                }
            });
        }
        let won: Vec<i64> = workers.join_all().await.concat();
        let distinct: HashSet<i64> = won.iter().copied().collect();
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
    let ids: Vec<i64> = first.iter().map(|claim| claim.fence().id).collect();
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

async fn unreadable(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 10).await;
    let broken = r#"UPDATE outbox_message SET headers = '{"a": [1]}' WHERE id = 5"#;
    db.execute_unprepared(broken).await.unwrap();
    let claimed = claim(&store, 10, LEASE).await;
    assert_eq!((claimed.claims.len(), claimed.unreadable.len()), (9, 1));
    assert!(store.settle(&claimed.unreadable).await.unwrap().is_empty());
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
        let ids: Vec<i64> = slice.iter().map(|fence| fence.id).collect();
        assert!(ids.windows(2).all(|pair| pair[1] == pair[0] + 1), "{ids:?} is contiguous");
        assert!(ids[9] <= 160, "{ids:?} is within the first 16 slices");
        firsts.insert(ids[0]);
    }
    assert!(firsts.len() > 4, "chance chooses among them: {firsts:?}");
}
