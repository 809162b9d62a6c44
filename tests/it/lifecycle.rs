//! Every arrow of the life cycle happens, and its stale twin changes nothing.

use std::time::Duration;

use libtest_mimic::Trial;
use sea_orm::{ConnectionTrait, DatabaseConnection};
use sea_orm_outbox::{
    entity::{
        Status,
        outbox_message::{Entity, Model},
    },
    lifecycle::{Arrow, Outcome, RetryPolicy},
    store::{Claim, ClaimStrategy, Fence, Lost, Settlement, Store},
};

use crate::support::{
    TestDatabase, on_each_contract_database,
    own::{Bench, Own, shown},
    rows::{
        LEASE, claim, claim_one, enqueue, let_delays_end, let_leases_end, request, row, rows, store, sweep,
    },
};

pub(crate) fn tests() -> Vec<Trial> {
    [
        on_each_contract_database("lifecycle::a_claim_counts_the_attempt_and_takes_a_lease", claims),
        on_each_contract_database("lifecycle::every_settlement_writes_its_arrow", settles),
        on_each_contract_database("lifecycle::a_release_gives_back_one_attempt_and_no_more", releases),
        on_each_contract_database("lifecycle::a_suspect_that_is_released_stays_a_suspect", suspect_released),
        on_each_contract_database("lifecycle::a_row_that_only_failed_is_no_suspect", no_suspect),
        on_each_contract_database(
            "lifecycle::a_frozen_owner_changes_nothing_of_the_newer_claim",
            frozen_owner,
        ),
        on_each_contract_database(
            "lifecycle::a_stale_twin_of_every_arrow_changes_nothing",
            stale_twins::<Entity>,
        ),
        on_each_contract_database("lifecycle::a_sweep_returns_and_in_the_end_buries", sweeps),
        on_each_contract_database(
            "lifecycle::a_claim_renewed_after_a_sweep_has_read_it_is_not_taken",
            renewed_meanwhile,
        ),
        on_each_contract_database(
            "lifecycle::a_claim_settled_after_a_sweep_has_read_it_is_not_taken",
            settled_meanwhile,
        ),
        on_each_contract_database("lifecycle::a_sweep_walks_the_queue_in_steps", sweep_in_steps),
        on_each_contract_database(
            "lifecycle::a_requeued_message_has_all_its_attempts_and_keeps_its_error",
            requeues,
        ),
        on_each_contract_database("lifecycle::only_a_finished_or_waiting_row_can_be_deleted", deletes),
        on_each_contract_database(
            "lifecycle::a_message_whose_worker_dies_every_time_ends_failed",
            dies_every_time,
        ),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn policy() -> RetryPolicy {
    RetryPolicy::default().with_jitter(0.0)
}

/// One settlement for each way in which a claim can end.
fn outcomes() -> [(Arrow, Outcome); 5] {
    [
        (Arrow::Acknowledge, Outcome::Acknowledged),
        (Arrow::Retry, Outcome::Transient("try again".to_owned())),
        (Arrow::Fail, Outcome::Permanent("never".to_owned())),
        (Arrow::Release, Outcome::Unused),
        (
            Arrow::Release,
            Outcome::Postponed { reason: "no stream".to_owned(), delay: Duration::from_secs(30) },
        ),
    ]
}

async fn write(store: &Store, settlement: Settlement) -> Lost {
    store.settle(&[settlement]).await.expect("the settlement is carried out")
}

async fn settle(store: &Store, claim: Claim, outcome: Outcome) -> Lost {
    write(store, claim.settle(outcome, &policy(), 0.0)).await
}

/// Seconds between two times of a row.
fn seconds(from: Option<sea_orm::prelude::DateTimeUtc>, to: Option<sea_orm::prelude::DateTimeUtc>) -> f64 {
    (to.expect("a time") - from.expect("a time")).as_seconds_f64()
}

async fn claims(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 2).await;
    let before = rows(db).await;
    let claimed = claim(&store, 1, LEASE).await;
    assert_eq!((claimed.claims.len(), claimed.lost_races, claimed.more), (1, 0, true));
    let after = rows(db).await;
    let won = &after[0];
    assert_eq!((won.status, won.version, won.attempts), (Status::Processing, 1, 1));
    assert_eq!(won.claimed_by.as_deref(), Some("test:1"));
    assert_eq!(won.available_at, before[0].available_at, "a claim keeps its place in the due index");
    let lease = seconds(won.available_at, won.lease_until);
    assert!((60.0..90.0).contains(&lease), "{lease}");
    assert_eq!(after[1], before[1]);
    assert_eq!(claimed.claims[0].fence(), Fence::from(won));
    assert_eq!(claimed.claims[0].attempts(), 1);
    // Nothing else is due, and the first row is taken.
    assert_eq!(claim(&store, 10, LEASE).await.claims.len(), 1);
    assert_eq!(claim(&store, 10, LEASE).await.claims.len(), 0);
}

async fn settles(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", outcomes().len()).await;
    let settlements: Vec<Settlement> = claim(&store, 100, LEASE)
        .await
        .claims
        .into_iter()
        .zip(outcomes())
        .map(|(claim, (arrow, outcome))| {
            let settlement = claim.settle(outcome, &policy(), 0.0);
            assert_eq!(settlement.transition().arrow(), arrow);
            settlement
        })
        .collect();
    assert!(store.settle(&settlements).await.expect("all are settled").is_empty());

    let rows = rows(db).await;
    for row in &rows {
        assert_eq!((row.version, row.claimed_by.as_deref(), row.lease_until), (2, None, None));
        assert_eq!(row.available_at.is_none(), row.status.is_finished());
        assert_eq!(row.sent_at.is_some(), row.status == Status::Sent);
        assert_eq!(row.failed_at.is_some(), row.status == Status::Failed);
    }
    let seen = |row: &Model| (row.status, row.attempts, row.last_error.clone());
    let [sent, retried, failed, released, resting] = &rows[..] else { panic!("five rows") };
    assert_eq!(seen(sent), (Status::Sent, 1, None));
    assert_eq!(seen(retried), (Status::Pending, 1, Some("try again".to_owned())));
    assert_eq!(seen(failed), (Status::Failed, 1, Some("never".to_owned())));
    assert_eq!(seen(released), (Status::Pending, 0, None));
    assert_eq!(seen(resting), (Status::Pending, 0, Some("no stream".to_owned())));
    let backoff = seconds(Some(retried.created_at), retried.available_at);
    assert!((1.0..20.0).contains(&backoff), "{backoff}");
    let rest = seconds(Some(resting.created_at), resting.available_at);
    assert!((30.0..50.0).contains(&rest), "{rest}");
    assert_eq!(seconds(Some(released.created_at), released.available_at), 0.0);
}

async fn releases(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 1).await;
    let failed = claim_one(&store, LEASE).await;
    assert!(settle(&store, failed, Outcome::Transient("x".to_owned())).await.is_empty());
    let_delays_end(db).await;
    let second = claim_one(&store, LEASE).await;
    assert_eq!(second.attempts(), 2);
    assert!(settle(&store, second, Outcome::Unused).await.is_empty());
    let row = row(db).await;
    assert_eq!((row.status, row.attempts, row.last_error.as_deref()), (Status::Pending, 1, Some("x")));
}

/// Otherwise an outage would make killers of whole batches harmless again.
async fn suspect_released(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 1).await;
    for _ in 0..2 {
        let _dies = claim_one(&store, LEASE).await;
        let_leases_end(db).await;
        assert_eq!(sweep(&store).await, 1);
    }
    let suspect = claim_suspects(&store).await.remove(0);
    assert!(settle(&store, suspect, Outcome::Unused).await.is_empty());
    assert!(row(db).await.last_error.is_some_and(|error| error.starts_with("claim expired")));
    assert_eq!(claim(&store, 10, LEASE).await.claims.len(), 0);
    assert_eq!(claim_suspects(&store).await.len(), 1);
}

async fn no_suspect(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 1).await;
    for _ in 0..3 {
        let failed = claim_one(&store, LEASE).await;
        assert!(!failed.is_suspect());
        assert!(settle(&store, failed, Outcome::Transient("x".to_owned())).await.is_empty());
        let_delays_end(db).await;
    }
    assert_eq!(store.stale(None, 10).await.expect("suspects are read").suspects, []);
    assert_eq!(claim_one(&store, LEASE).await.attempts(), 4);
}

/// A relay frozen past its lease wakes up and settles: for every kind of settle.
async fn frozen_owner(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 1).await;
    for (arrow, outcome) in outcomes() {
        let frozen = claim_one(&store, LEASE).await;
        let frozen_fence = frozen.fence();
        let_leases_end(db).await;
        assert_eq!(sweep(&store).await, 1);
        let newer = claim_one(&store, LEASE).await;
        let before = row(db).await;

        assert_eq!(settle(&store, frozen, outcome).await.fences(), [frozen_fence], "{arrow:?}");
        assert_eq!(row(db).await, before, "{arrow:?}");
        let renewed = store.renew(&[frozen_fence], LEASE * 2).await.expect("the renewal is carried out");
        assert_eq!(renewed.fences(), [frozen_fence]);
        assert_eq!(row(db).await, before);

        // The newer claim is whole: it can be settled. Released and reset, it serves the next round.
        assert!(settle(&store, newer, Outcome::Permanent("x".to_owned())).await.is_empty());
        let failed = Fence::from(&row(db).await);
        assert!(store.requeue(&[failed]).await.expect("it is requeued").is_empty());
    }
}

/// Every arrow, tried with a version that is one too old, one too new, and the right one.
pub(crate) async fn stale_twins<E: Own>(database: TestDatabase) {
    let bench = Bench::<E>::create(&database).await;
    let version = bench.quoted(E::version());
    for arrow in Arrow::ALL {
        for shift in ["- 1", "+ 1", "+ 0"] {
            let twin = read_for(arrow, &bench).await;
            bench.set(E::version(), &format!("{version} {shift}")).await;
            let before = bench.rows().await;
            let lost = twin.write(&bench.store).await;
            let after = bench.rows().await;
            if shift != "+ 0" {
                assert!(lost, "{arrow:?}");
                assert_eq!(shown(&after), shown(&before), "{arrow:?} changes a row of another version");
                continue;
            }
            assert!(!lost, "{arrow:?}");
            let before_it = E::seen(&before[0]);
            assert_eq!(before_it.status, E::status_text(arrow.from()), "{arrow:?}");
            let seen = after.first().map(E::seen);
            let status = seen.as_ref().map(|row| row.status.as_str());
            assert_eq!(status, arrow.to().map(E::status_text), "{arrow:?}");
            if let Some(after_it) = seen {
                let expected = before_it.fence.version + i64::from(arrow.raises_version());
                assert_eq!(after_it.fence.version, expected, "{arrow:?}");
                assert_ne!(shown(&after), shown(&before), "{arrow:?}");
                assert_eq!(after_it.is_due, !arrow.to().is_some_and(Status::is_finished), "{arrow:?}");
                assert_eq!(after_it.is_claimed, arrow.to() == Some(Status::Processing), "{arrow:?}");
            }
        }
    }
}

/// A change that has been read and not yet been written.
enum Twin {
    Claim(Fence),
    Settle(Settlement),
    Renew(Fence),
    Requeue(Fence),
    Discard(Fence),
    Cancel(Fence),
    Retire(Fence),
}

impl Twin {
    /// Writes it; whether it was lost.
    async fn write(self, store: &Store) -> bool {
        let written = match self {
            Twin::Claim(fence) => {
                let claimed = store.claim_candidates(&[fence], "test:2", LEASE).await;
                let claimed = claimed.expect("the claim is carried out");
                assert_eq!(claimed.claims.len() as u64 + claimed.lost_races, 1);
                return claimed.claims.is_empty();
            }
            Twin::Settle(settlement) => store.settle(&[settlement]).await,
            Twin::Renew(fence) => store.renew(&[fence], LEASE * 3).await,
            Twin::Requeue(fence) => store.requeue(&[fence]).await,
            Twin::Discard(fence) => store.discard(&[fence]).await,
            Twin::Cancel(fence) => store.cancel(&[fence]).await,
            Twin::Retire(fence) => store.retire(&[fence]).await,
        };
        !written.expect("the statement is carried out").is_empty()
    }
}

/// The only row of the table, where `arrow` starts, and the arrow read from it.
async fn read_for<E: Own>(arrow: Arrow, bench: &Bench<E>) -> Twin {
    let store = &bench.store;
    bench.empty().await;
    bench.enqueue(1).await;
    // Room below for a version that is too old.
    bench.set(E::version(), "10").await;
    let claimed = |outcome: Outcome| async {
        Twin::Settle(claim_one(store, LEASE).await.settle(outcome, &policy(), 0.0))
    };
    let settled = |outcome: Outcome| async {
        assert!(settle(store, claim_one(store, LEASE).await, outcome).await.is_empty());
        bench.one().await.fence
    };
    let stale = |max_attempts: u32| async move {
        let _owner = claim_one(store, LEASE).await;
        bench.let_leases_end().await;
        let mut stale = store.stale(None, 10).await.expect("stale claims are read").stale;
        assert_eq!(stale.len(), 1);
        Twin::Settle(stale.remove(0).settle(&policy().with_max_attempts(max_attempts)))
    };
    let failure = || Outcome::Permanent("x".to_owned());
    match arrow {
        Arrow::Claim => {
            let candidates = store.candidates(1).await.expect("candidates are read");
            Twin::Claim(candidates[0])
        }
        Arrow::Acknowledge => claimed(Outcome::Acknowledged).await,
        Arrow::Retry => claimed(Outcome::Transient("x".to_owned())).await,
        Arrow::Fail => claimed(failure()).await,
        Arrow::Release => claimed(Outcome::Unused).await,
        Arrow::Renew => Twin::Renew(claim_one(store, LEASE).await.fence()),
        Arrow::Return => stale(5).await,
        Arrow::Bury => stale(1).await,
        Arrow::Requeue => Twin::Requeue(settled(failure()).await),
        Arrow::Discard => Twin::Discard(settled(failure()).await),
        Arrow::Cancel => Twin::Cancel(bench.one().await.fence),
        Arrow::Retire => Twin::Retire(settled(Outcome::Acknowledged).await),
        other => panic!("no test for {other:?}"),
    }
}

async fn execute(db: &DatabaseConnection, sql: &str) {
    db.execute_unprepared(sql).await.expect("the statement is carried out");
}

async fn claim_suspects(store: &Store) -> Vec<Claim> {
    let suspects = store.stale(None, 10).await.expect("suspects are read").suspects;
    store.claim_candidates(&suspects, "test:1", LEASE).await.expect("suspects are claimed").claims
}

async fn sweeps(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 1).await;
    assert_eq!(sweep(&store).await, 0, "a waiting row is not stale");
    for attempt in 1..=5 {
        let claims = match attempt {
            1 | 2 => vec![claim_one(&store, LEASE).await],
            // With two attempts spent it is a suspect.
            _ => {
                for strategy in [ClaimStrategy::SkipLocked, ClaimStrategy::Optimistic] {
                    let ordinary = store.claim(&request(strategy, 10, "test:1", LEASE)).await;
                    assert_eq!(ordinary.expect("the claim is carried out").claims.len(), 0);
                }
                claim_suspects(&store).await
            }
        };
        assert_eq!(claims.len(), 1);
        assert_eq!((claims[0].attempts(), claims[0].is_suspect()), (attempt, attempt > 2));
        assert_eq!(sweep(&store).await, 0, "a lease that lasts is not stale");
        let_leases_end(db).await;
        assert_eq!(sweep(&store).await, 1);
        let row = row(db).await;
        let error = row.last_error.expect("the sweep leaves its reason");
        assert_eq!((row.claimed_by, row.lease_until), (None, None));
        if attempt < 5 {
            assert_eq!(row.status, Status::Pending);
            assert!(error.starts_with("claim expired"), "{error}");
        } else {
            assert_eq!((row.status, row.attempts), (Status::Failed, 5));
            assert!(error.starts_with("abandoned") && error.contains("test:1"), "{error}");
        }
    }
}

/// The version alone would not notice: a renewal keeps it.
async fn renewed_meanwhile(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 2).await;
    let claims = claim(&store, 2, LEASE).await.claims;
    let_leases_end(db).await;
    let stale = store.stale(None, 10).await.expect("stale claims are read").stale;
    assert_eq!(stale.len(), 2);
    let renewed = claims[0].fence();
    assert!(store.renew(&[renewed], LEASE).await.expect("it is renewed").is_empty());

    let before = rows(db).await;
    let settlements: Vec<_> = stale.into_iter().map(|stale| stale.settle(&policy())).collect();
    let lost = store.settle(&settlements).await.expect("the sweep is carried out");
    assert_eq!(lost.fences(), [renewed]);
    let after = rows(db).await;
    assert_eq!(after[0], before[0], "the renewed claim is untouched");
    assert_eq!(after[1].status, Status::Pending, "its neighbour is returned all the same");
}

async fn settled_meanwhile(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    for (arrow, outcome) in outcomes() {
        execute(db, "DELETE FROM outbox_message").await;
        enqueue(db, "t", 1).await;
        let owner = claim_one(&store, LEASE).await;
        let_leases_end(db).await;
        let mut stale = store.stale(None, 10).await.expect("stale claims are read").stale;
        assert!(settle(&store, owner, outcome).await.is_empty(), "late, but nobody was faster");
        let before = row(db).await;
        assert_eq!(write(&store, stale.remove(0).settle(&policy())).await.len(), 1, "{arrow:?}");
        assert_eq!(row(db).await, before, "{arrow:?}");
    }
}

async fn sweep_in_steps(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 25).await;
    assert_eq!(claim(&store, 25, LEASE).await.claims.len(), 25);
    let_leases_end(db).await;
    let mut found = Vec::new();
    let mut position = None;
    for _ in 0..3 {
        let step = store.stale(position.as_ref(), 10).await.expect("stale claims are read");
        found.extend(step.stale.iter().map(|stale| stale.fence().id));
        position = step.next;
    }
    assert_eq!(position, None, "25 rows are three steps of 10");
    found.sort_unstable();
    let all: Vec<i64> = rows(db).await.iter().map(|row| row.id).collect();
    assert_eq!(found, all);
}

async fn requeues(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 1).await;
    for requeues in 1..=2 {
        let claim = claim_one(&store, LEASE).await;
        assert!(settle(&store, claim, Outcome::Permanent("broken".to_owned())).await.is_empty());
        let failed = row(db).await;
        assert!(store.requeue(&[Fence::from(&failed)]).await.expect("it is requeued").is_empty());
        let row = row(db).await;
        assert_eq!((row.status, row.attempts, row.requeues), (Status::Pending, 0, requeues));
        assert_eq!(row.version, failed.version + 1, "a requeue never resets the version");
        assert_eq!((row.last_error.as_deref(), row.failed_at), (Some("broken"), None));
    }
}

async fn deletes(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 1).await;
    // The version is right in every try; the status says who may.
    let tries = |fence: Fence| {
        let store = store.clone();
        async move {
            let discard = store.discard(&[fence]).await.expect("discard is carried out").is_empty();
            let retire = store.retire(&[fence]).await.expect("retire is carried out").is_empty();
            let requeue = store.requeue(&[fence]).await.expect("requeue is carried out").is_empty();
            (discard, retire, requeue)
        }
    };
    assert_eq!(tries(Fence::from(&row(db).await)).await, (false, false, false), "PENDING");
    let claim = claim_one(&store, LEASE).await;
    let claimed = Fence::from(&row(db).await);
    assert_eq!(tries(claimed).await, (false, false, false), "PROCESSING");
    assert_eq!(store.cancel(&[claimed]).await.expect("cancel is carried out").len(), 1);
    assert!(settle(&store, claim, Outcome::Acknowledged).await.is_empty());
    let sent = Fence::from(&row(db).await);
    assert_eq!(store.discard(&[sent]).await.expect("discard is carried out").len(), 1, "SENT");
    assert_eq!(store.requeue(&[sent]).await.expect("requeue is carried out").len(), 1, "SENT");
    assert!(store.retire(&[sent]).await.expect("retire is carried out").is_empty());
    assert!(rows(db).await.is_empty());
}

/// Attempts are counted when claimed: nobody ever records a failure here.
async fn dies_every_time(database: TestDatabase) {
    let (db, store) = (&database.db, store(&database.db));
    enqueue(db, "t", 1).await;
    let mut claims = 0;
    while row(db).await.status != Status::Failed {
        let ordinary = store.claim(&request(ClaimStrategy::Optimistic, 1, "test:1", LEASE)).await;
        claims += ordinary.expect("the claim is carried out").claims.len();
        claims += claim_suspects(&store).await.len();
        let_leases_end(db).await;
        sweep(&store).await;
        assert!(claims <= 5, "it is claimed too often");
    }
    let row = row(db).await;
    assert_eq!((claims, row.attempts, row.sent_at), (5, 5, None));
    assert_eq!(claim(&store, 10, LEASE).await.claims.len(), 0, "a failed message is never claimed again");
}
