//! Order per key: what a claim may win, and what the broker sees of it.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering as Atomic},
    },
    time::Duration,
};

use futures_util::StreamExt;
use libtest_mimic::Trial;
use sea_orm::{ColumnTrait, ConnectionTrait, DatabaseConnection, EntityTrait, PaginatorTrait, QueryFilter};
use sea_orm_outbox::{
    Ack, ConfigError, Message, NatsPublisher, NewMessage, Outbox, PublishError, Publisher, Relay,
    RelayBuilder,
    entity::{
        Status,
        outbox_message::{Column, Entity, Model as Row},
    },
    lifecycle::{Outcome, RetryPolicy},
    publisher::RecordingPublisher,
    store::{BehindFailed, Claim, ClaimRequest, ClaimStrategy, Claimed, Fence, Ordering, RowId, Store},
};
use tokio::{sync::Barrier, task::JoinSet, time::Instant};

use crate::support::{
    Kind, TestDatabase, eventually, eventually_within, is_long,
    nats::TestStream,
    on_database, on_each_contract_database,
    rows::{LEASE, claim, request, rows, store},
    stuck::Stuck,
};

const HOLD: Ordering = Ordering::PerKey { behind_failed: BehindFailed::Hold };
const SKIP: Ordering = Ordering::PerKey { behind_failed: BehindFailed::Skip };

pub(crate) fn tests() -> Vec<Trial> {
    let mut tests: Vec<Trial> = [
        on_each_contract_database("ordering::a_run_of_one_key_is_claimed_together_in_order", run_together),
        on_each_contract_database("ordering::one_key_has_at_most_a_quarter_of_a_batch", quarter),
        on_each_contract_database("ordering::none_is_claimed_behind_an_unfinished_one", behind_unfinished),
        on_each_contract_database("ordering::a_run_ends_where_a_later_one_is_unfinished", ends_at_unfinished),
        on_each_contract_database("ordering::a_walk_wins_nothing_whose_key_began_before_it", walks),
        on_each_contract_database("ordering::a_full_batch_makes_no_key_miss_its_turn", no_turn_is_missed),
        on_each_contract_database("ordering::behind_a_failed_one_the_rest_waits_or_goes_on", behind_failed),
        on_each_contract_database("ordering::requeued_messages_keep_their_order", requeued),
        on_each_contract_database("ordering::claims_at_once_never_split_a_run", never_split),
        on_each_contract_database("ordering::the_broker_sees_a_key_in_order_when_one_fails_once", fails_once),
        on_each_contract_database("ordering::one_that_fails_for_good_holds_the_rest_or_not", fails_for_good),
        on_each_contract_database("ordering::one_message_of_a_key_is_in_flight_at_a_time", one_in_flight),
        on_each_contract_database("ordering::a_row_that_cannot_be_read_counts_as_failed", unreadable),
        on_each_contract_database("ordering::behind_a_resting_topic_the_run_is_given_back", resting),
        on_each_contract_database("ordering::behind_an_outage_the_run_is_given_back", outage),
        on_each_contract_database("ordering::behind_a_lost_claim_the_run_is_given_back", lost),
        on_each_contract_database("ordering::many_keys_arrive_in_order_from_eight_relays", many_keys),
        on_each_contract_database("ordering::a_hot_key_does_not_keep_the_others_waiting", hot_key),
        on_each_contract_database("ordering::what_a_failed_one_holds_costs_later_keys_nothing", held),
        on_each_contract_database("ordering::a_relay_gets_past_what_a_failed_one_holds", relayed_past_held),
    ]
    .into_iter()
    .flatten()
    .collect();
    tests.push(on_database(Kind::Postgres, "ordering::a_subscriber_sees_each_key_in_order", subscriber));
    tests.push(on_database(Kind::Sqlite, "ordering::it_is_refused_without_row_locks", refused));
    tests
}

/// Enqueues messages, each the next of its key; the payload counts within the key, from 1. A key that is empty stands
/// for none.
async fn enqueue(db: &DatabaseConnection, keys: &[&str]) {
    let mut numbers: HashMap<&str, usize> = HashMap::new();
    let messages = keys.iter().map(|key| {
        let number = numbers.entry(key).or_default();
        *number += 1;
        let message = NewMessage::json("t", number).expect("a number is JSON");
        if key.is_empty() { message } else { message.ordering_key(*key) }
    });
    Outbox::new().enqueue_many(db, messages.collect::<Vec<_>>()).await.expect("messages are enqueued");
}

/// Enqueues many messages without sending them from here: `n` from 0 on, the key as `key` makes it of `n` in SQL. The
/// payload is `n`.
async fn enqueue_many(database: &TestDatabase, count: usize, key: (&str, &str)) {
    let (prefix, number) = key;
    let (key, message_id, payload) = match database.kind {
        Kind::Sqlite => (
            format!("'{prefix}' || ({number})"),
            "unhex(substr(hex(randomblob(16)), 1, 32))",
            "CAST(CAST(n AS TEXT) AS BLOB)",
        ),
        Kind::Postgres | Kind::OldestPostgres => {
            (format!("'{prefix}' || ({number})"), "gen_random_uuid()", "convert_to(n::text, 'UTF8')")
        }
        Kind::MySql | Kind::MariaDb => {
            (format!("CONCAT('{prefix}', {number})"), "UNHEX(REPLACE(UUID(), '-', ''))", "CAST(n AS CHAR)")
        }
    };
    let digits = "SELECT 0 AS d UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4 \
                  UNION ALL SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9";
    let sql = format!(
        "\
        INSERT INTO outbox_message (message_id, topic, ordering_key, content_type, payload)
        SELECT {message_id}, 't', {key}, 'text/plain', {payload}
        FROM (
            SELECT a.d + 10 * b.d + 100 * c.d + 1000 * e.d + 10000 * f.d AS n
            FROM ({digits}) a, ({digits}) b, ({digits}) c, ({digits}) e, ({digits}) f
        ) AS numbers
        WHERE n < {count}
        ORDER BY n"
    );
    database.db.execute_unprepared(&sql).await.expect("the rows are written");
}

fn ordered(db: &DatabaseConnection, ordering: Ordering) -> Store {
    store(db).with_ordering(ordering).expect("the table has keys")
}

/// The key and the payload.
fn label(message: &Message) -> String {
    let key = message.ordering_key().unwrap_or_default();
    format!("{key}{}", String::from_utf8_lossy(message.payload()))
}

fn labels(claimed: &Claimed) -> Vec<String> {
    claimed.claims.iter().map(|claim| label(claim.message())).collect()
}

fn acknowledge(claims: Vec<Claim>) -> Vec<sea_orm_outbox::store::Settlement> {
    let settle = |claim: Claim| claim.settle(Outcome::Acknowledged, &RetryPolicy::default(), 0.0);
    claims.into_iter().map(settle).collect()
}

async fn number_of(db: &DatabaseConnection, status: Status) -> u64 {
    Entity::find().filter(Column::Status.eq(status)).count(db).await.expect("the rows are counted")
}

async fn until(database: &TestDatabase, status: Status, expected: u64) {
    eventually_within(Duration::from_secs(120), &format!("{expected} rows to be {status:?}"), || async {
        (number_of(&database.db, status).await == expected).then_some(())
    })
    .await;
}

async fn run_together(database: TestDatabase) {
    let db = &database.db;
    for ordering in [HOLD, SKIP] {
        db.execute_unprepared("DELETE FROM outbox_message").await.unwrap();
        enqueue(db, &["a", "", "b", "a", "", "a", "b", "c"]).await;
        let store = ordered(db, ordering);
        let claimed = claim(&store, 40, LEASE).await;
        assert_eq!(labels(&claimed), ["a1", "1", "b1", "a2", "2", "a3", "b2", "c1"]);
        assert!(!claimed.more);
        assert!(store.settle(&acknowledge(claimed.claims)).await.unwrap().is_empty());
        assert!(claim(&store, 40, LEASE).await.claims.is_empty());
    }
}

async fn quarter(database: TestDatabase) {
    let db = &database.db;
    let mut keys = vec!["h"; 50];
    keys.extend(["a", "", "a"]);
    enqueue(db, &keys).await;
    let store = ordered(db, HOLD);
    let claimed = claim(&store, 40, LEASE).await;
    let hot: Vec<_> = (1..=10).map(|number| format!("h{number}")).collect();
    assert_eq!(labels(&claimed), [&hot[..], &["a1".into(), "1".into(), "a2".into()]].concat());
    // The next ones only when these are through.
    assert!(claim(&store, 40, LEASE).await.claims.is_empty());
    assert!(store.settle(&acknowledge(claimed.claims)).await.unwrap().is_empty());
    let next = claim(&store, 4, LEASE).await;
    assert_eq!(labels(&next), ["h11"]);
}

/// In each way in which the first of a key may be unfinished.
async fn behind_unfinished(database: TestDatabase) {
    let db = &database.db;
    let later = match database.kind {
        Kind::Sqlite => "strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now', '+1 hour')",
        Kind::Postgres | Kind::OldestPostgres => "now() + interval '1 hour'",
        Kind::MySql | Kind::MariaDb => "UTC_TIMESTAMP(6) + INTERVAL 1 HOUR",
    };
    let states = [
        format!("status = 'PROCESSING', claimed_by = 'other:1', lease_until = {later}, attempts = 1"),
        format!("available_at = {later}, attempts = 1, last_error = 'out of paper'"),
        format!("available_at = {later}"),
        "attempts = 2, last_error = 'claim expired: x'".to_owned(),
    ];
    for ordering in [HOLD, SKIP] {
        for state in &states {
            db.execute_unprepared("DELETE FROM outbox_message").await.unwrap();
            enqueue(db, &["a", "a", "b", "a", "", "b"]).await;
            let first = Fence::from(&rows(db).await[0]);
            let RowId::Integer(id) = first.id else { panic!("ids are numbers") };
            let change = format!("UPDATE outbox_message SET version = 1, {state} WHERE id = {id}");
            db.execute_unprepared(&change).await.unwrap();
            // One that is behind it is a suspect, which are claimed in their own way.
            let suspect = format!(
                "UPDATE outbox_message SET attempts = 2, last_error = 'claim expired: x' WHERE id = {}",
                id + 3
            );
            db.execute_unprepared(&suspect).await.unwrap();
            let before = rows(db).await;
            let store = ordered(db, ordering);

            let read: Vec<Fence> = before[1..]
                .iter()
                .filter(|row| row.ordering_key.as_deref() == Some("a"))
                .map(Fence::from)
                .collect();
            let won = store.claim_candidates(&read, "test:1", LEASE).await.unwrap();
            assert_eq!((labels(&won), won.lost_races), (vec![], 2), "{ordering:?}, {state}");
            let claimed = claim(&store, 40, LEASE).await;
            assert_eq!(labels(&claimed), ["b1", "1", "b2"], "{ordering:?}, {state}");
            assert!(claim(&store, 1, LEASE).await.claims.is_empty());
            let now = rows(db).await;
            for row in [0, 1, 3] {
                assert_eq!(now[row], before[row], "{ordering:?}, {state}");
            }

            // Once it is sent the others go on, up to the suspect, and the suspect after them.
            let sent = format!(
                "UPDATE outbox_message SET status = 'SENT', sent_at = created_at, available_at = NULL, \
                 claimed_by = NULL, lease_until = NULL WHERE id = {id}"
            );
            db.execute_unprepared(&sent).await.unwrap();
            let suspect = [Fence::from(&now[3])];
            assert!(store.claim_candidates(&suspect, "test:2", LEASE).await.unwrap().claims.is_empty());
            let claimed = claim(&store, 40, LEASE).await;
            assert_eq!(labels(&claimed), ["a2"], "{ordering:?}, {state}");
            assert!(store.claim_candidates(&suspect, "test:2", LEASE).await.unwrap().claims.is_empty());
            assert!(store.settle(&acknowledge(claimed.claims)).await.unwrap().is_empty());
            let won = store.claim_candidates(&suspect, "test:2", LEASE).await.unwrap();
            assert_eq!(labels(&won), ["a3"], "{ordering:?}, {state}");
        }
    }
}

/// In the middle of a run stands one that is due later, and one that somebody else holds.
async fn ends_at_unfinished(database: TestDatabase) {
    let db = &database.db;
    enqueue(db, &["a", "b", "a", "b", "a", "b"]).await;
    let later = match database.kind {
        Kind::Sqlite => "strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now', '+1 hour')",
        Kind::Postgres | Kind::OldestPostgres => "now() + interval '1 hour'",
        Kind::MySql | Kind::MariaDb => "UTC_TIMESTAMP(6) + INTERVAL 1 HOUR",
    };
    let delay = format!("UPDATE outbox_message SET available_at = {later} WHERE id = 3");
    db.execute_unprepared(&delay).await.unwrap();
    let take = format!(
        "UPDATE outbox_message SET status = 'PROCESSING', claimed_by = 'other:1', lease_until = {later} \
         WHERE id = 4"
    );
    db.execute_unprepared(&take).await.unwrap();
    let store = ordered(db, HOLD);
    assert_eq!(labels(&claim(&store, 40, LEASE).await), ["a1", "b1"]);
    assert!(claim(&store, 40, LEASE).await.claims.is_empty());
    // Several candidates of one key: only the first has none before it.
    db.execute_unprepared("DELETE FROM outbox_message").await.unwrap();
    enqueue(db, &["a", "a", "", "b"]).await;
    let read: Vec<Fence> = rows(db).await.iter().map(Fence::from).collect();
    let won = store.claim_candidates(&read, "test:9", LEASE).await.unwrap();
    assert_eq!((labels(&won), won.lost_races), (vec!["a1".into(), "1".into(), "b1".into()], 1));
}

/// A claim that begins further on sees the middle of a key, and leaves it alone whether its beginning is claimed or not.
async fn walks(database: TestDatabase) {
    let db = &database.db;
    // A window is a thousand entries at least.
    enqueue_many(&database, 1_200, ("k", "n % 2")).await;
    enqueue(db, &["c", "c"]).await;
    let store = ordered(db, HOLD);
    let head = request(ClaimStrategy::SkipLocked, 40, "test:1", LEASE);
    let first = store.claim(&head).await.unwrap();
    assert_eq!(first.claims.len(), 20, "a quarter of the batch for each key");
    let after = first.next.clone();
    assert!(after.is_some() && first.more, "there is more behind the window");
    let further_on = ClaimRequest { after: after.as_ref(), ..head };
    let claimed = store.claim(&further_on).await.unwrap();
    assert_eq!(labels(&claimed), ["c1", "c2"]);
    assert!(claimed.next.is_none() && !claimed.more, "it was the end");
    // Not when they are through either: there are others between them and the place where it begins.
    assert!(store.settle(&acknowledge(first.claims)).await.unwrap().is_empty());
    assert!(store.claim(&further_on).await.unwrap().claims.is_empty());
    let mut expected: Vec<String> = (20..40).map(|n| format!("k{}{n}", n % 2)).collect();
    let mut next = labels(&store.claim(&head).await.unwrap());
    next.sort_unstable();
    expected.sort_unstable();
    assert_eq!(next, expected);
}

/// After a full batch the next claim begins where the first run begins that had no room in it.
async fn no_turn_is_missed(database: TestDatabase) {
    let db = &database.db;
    enqueue_many(&database, 400, ("k", "n % 100")).await;
    let store = ordered(db, HOLD);
    let (mut after, mut won) = (None, 0);
    for _ in 0..10 {
        let request =
            ClaimRequest { after: after.as_ref(), ..request(ClaimStrategy::SkipLocked, 40, "test:1", LEASE) };
        let claimed = store.claim(&request).await.unwrap();
        assert_eq!(claimed.claims.len(), 40);
        won += 40;
        after = claimed.next;
    }
    assert_eq!(won, 400, "nothing is settled meanwhile, and nothing has to wait for that");
}

async fn behind_failed(database: TestDatabase) {
    let db = &database.db;
    for ordering in [HOLD, SKIP] {
        db.execute_unprepared("DELETE FROM outbox_message").await.unwrap();
        let store = ordered(db, ordering);
        enqueue(db, &["a", "a", "b", "a"]).await;
        let mut claimed = claim(&store, 1, LEASE).await.claims;
        let failing =
            claimed.remove(0).settle(Outcome::Permanent("too large".into()), &RetryPolicy::default(), 0.0);
        assert!(store.settle(&[failing]).await.unwrap().is_empty());
        let failed = Fence::from(&rows(db).await[0]);
        let second = Fence::from(&rows(db).await[1]);
        if ordering == SKIP {
            assert_eq!(labels(&claim(&store, 40, LEASE).await), ["a2", "b1", "a3"]);
            continue;
        }
        assert!(store.claim_candidates(&[second], "test:2", LEASE).await.unwrap().claims.is_empty());
        assert_eq!(labels(&claim(&store, 40, LEASE).await), ["b1"]);
        // Requeued, it is the first again.
        assert!(store.requeue(&[failed]).await.unwrap().is_empty());
        let mut claimed = claim(&store, 40, LEASE).await;
        assert_eq!(labels(&claimed), ["a1", "a2", "a3"]);
        let mut settlements = Vec::new();
        let first = claimed.claims.remove(0);
        settlements.push(first.settle(Outcome::Permanent("too large".into()), &RetryPolicy::default(), 0.0));
        settlements.extend(
            claimed
                .claims
                .into_iter()
                .map(|claim| claim.settle(Outcome::Unused, &RetryPolicy::default(), 0.0)),
        );
        assert!(store.settle(&settlements).await.unwrap().is_empty());
        assert!(claim(&store, 40, LEASE).await.claims.is_empty());
        // Discarded, it frees the rest.
        let failed = Fence::from(&rows(db).await[0]);
        assert!(store.discard(&[failed]).await.unwrap().is_empty());
        assert_eq!(labels(&claim(&store, 40, LEASE).await), ["a2", "a3"]);
    }
}

async fn requeued(database: TestDatabase) {
    let db = &database.db;
    for ordering in [HOLD, SKIP] {
        db.execute_unprepared("DELETE FROM outbox_message").await.unwrap();
        let store = ordered(db, ordering);
        enqueue(db, &["a", "a", "a", "a", "b"]).await;
        let failed = "UPDATE outbox_message SET status = 'FAILED', failed_at = created_at, available_at = NULL, \
                      attempts = 5, last_error = 'x' WHERE ordering_key = 'a'";
        db.execute_unprepared(failed).await.unwrap();
        let fences: Vec<Fence> = rows(db).await[..4].iter().map(Fence::from).collect();
        // One after the other and the last first, so that their due times are in the wrong order.
        for fence in fences[1..].iter().rev() {
            assert!(store.requeue(&[*fence]).await.unwrap().is_empty());
        }
        if ordering == HOLD {
            assert_eq!(labels(&claim(&store, 40, LEASE).await), ["b1"], "the first is still FAILED");
            assert!(store.requeue(&fences[..1]).await.unwrap().is_empty());
            assert_eq!(labels(&claim(&store, 8, LEASE).await), ["a1", "a2"]);
        } else {
            // Also when a batch has no room for all.
            let claimed = claim(&store, 8, LEASE).await;
            assert_eq!(labels(&claimed), ["a2", "a3", "b1"]);
        }
    }
}

/// A generator that says what it began with, so that a failure can be played again.
fn chance() -> fastrand::Rng {
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    fastrand::Rng::with_seed(seed)
}

/// Workers with pools of their own claim at the same moment, with small batches, where runs are interleaved and some
/// end early.
async fn never_split(database: TestDatabase) {
    let rounds = match database.kind {
        Kind::OldestPostgres => 60,
        _ => 300,
    };
    let mut chance = chance();
    let mut pools = Vec::new();
    for _ in 0..8 {
        pools.push(database.connect_again().await);
    }
    for round in 0..rounds {
        let db = &database.db;
        db.execute_unprepared("DELETE FROM outbox_message").await.unwrap();
        let ordering = if chance.bool() { HOLD } else { SKIP };
        let keys = chance.usize(1..6);
        let names = ["a", "b", "c", "d", "e", ""];
        let order: Vec<&str> = (0..chance.usize(10..60))
            .map(|_| if chance.u8(..) < 20 { "" } else { names[chance.usize(..keys)] })
            .collect();
        enqueue(db, &order).await;
        let workers = if round % 2 == 0 { 2 } else { 8 };
        let barrier = Arc::new(Barrier::new(workers));
        let mut claiming = JoinSet::new();
        for (worker, pool) in pools.iter().take(workers).enumerate() {
            let (store, barrier) = (ordered(pool, ordering), barrier.clone());
            let mut chance = chance.fork();
            claiming.spawn(async move {
                let mut held = Vec::new();
                for batch in 0..3 {
                    if batch == 0 {
                        barrier.wait().await;
                    }
                    let (limit, name) = (chance.u64(1..24), format!("w{worker}:{batch}"));
                    let claimed =
                        store.claim(&request(ClaimStrategy::SkipLocked, limit, &name, LEASE)).await.unwrap();
                    assert!(claimed.claims.len() as u64 <= limit);
                    let mut claims = claimed.claims;
                    // Of each key some from the front are through, one is not, and the rest is given back or kept.
                    let through = chance.usize(..=claims.len());
                    let kept = claims.split_off(through);
                    let policy = RetryPolicy::default();
                    let mut settlements = Vec::new();
                    let mut ended: HashSet<String> = HashSet::new();
                    for claim in claims {
                        let key = claim.message().ordering_key().unwrap_or_default().to_owned();
                        let outcome = if ended.contains(&key) {
                            Outcome::Unused
                        } else {
                            match chance.u8(..) {
                                0..200 => Outcome::Acknowledged,
                                200..220 => Outcome::Transient("x".into()),
                                220..230 => Outcome::Permanent("y".into()),
                                230.. => Outcome::Unused,
                            }
                        };
                        if !matches!(outcome, Outcome::Acknowledged) && !key.is_empty() {
                            ended.insert(key);
                        }
                        settlements.push(claim.settle(outcome, &policy, 0.0));
                    }
                    // What is kept behind one that is given back has to go as well.
                    for claim in kept {
                        if claim.message().ordering_key().is_some_and(|key| ended.contains(key)) {
                            settlements.push(claim.settle(Outcome::Unused, &policy, 0.0));
                        } else {
                            held.push(claim);
                        }
                    }
                    assert!(store.settle(&settlements).await.unwrap().is_empty());
                }
                held
            });
        }
        let held = claiming.join_all().await;
        let rows = rows(db).await;
        assert_prefixes(&rows, ordering, &format!("round {round} of {order:?}"));
        let processing = rows.iter().filter(|row| row.status == Status::Processing).count();
        assert_eq!(processing, held.iter().flatten().count());
    }
}

/// Of each key, the claimed rows are the first of the unfinished ones, all with one claimant.
fn assert_prefixes(rows: &[Row], ordering: Ordering, context: &str) {
    let mut keys: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
    for row in rows {
        let unfinished = row.sent_at.is_none() && (ordering == HOLD || row.status != Status::Failed);
        if let (Some(key), true) = (row.ordering_key.as_deref(), unfinished) {
            keys.entry(key).or_default().push(row);
        }
    }
    for (key, rows) in keys {
        let claimants: Vec<Option<&str>> = rows
            .iter()
            .map(|row| {
                let worker = row.claimed_by.as_deref()?.split_once(':')?.0;
                (row.status == Status::Processing).then_some(worker)
            })
            .collect();
        let prefix = claimants.iter().take_while(|claimant| claimant.is_some()).count();
        let whole = claimants.iter().skip(prefix).all(Option::is_none);
        let one = claimants[..prefix].windows(2).all(|pair| pair[0] == pair[1]);
        assert!(whole && one, "{context}: the unfinished rows of {key} are held by {claimants:?}");
    }
}

/// A relay that does not let a test wait.
fn quick<P: Publisher>(db: &DatabaseConnection, ordering: Ordering, publisher: P) -> RelayBuilder<P> {
    Relay::builder(db.clone(), publisher)
        .ordering(ordering)
        .poll_every(Duration::from_millis(20))
        .sweep_every(Duration::from_millis(50))
        .retry(RetryPolicy::default().with_initial_delay(Duration::from_millis(20)))
}

fn published(publisher: &RecordingPublisher) -> Vec<String> {
    publisher.messages().iter().map(label).collect()
}

async fn fails_once(database: TestDatabase) {
    let db = &database.db;
    for ordering in [HOLD, SKIP] {
        db.execute_unprepared("DELETE FROM outbox_message").await.unwrap();
        enqueue(db, &["a", "a", "a"]).await;
        let failed = AtomicBool::new(false);
        let publisher = Arc::new(RecordingPublisher::answering(move |message| {
            if label(message) == "a1" && !failed.swap(true, Atomic::SeqCst) {
                return Err(PublishError::transient("out of paper"));
            }
            Ok(Ack::new())
        }));
        let relay = quick(db, ordering, publisher.clone()).build().unwrap().spawn();
        until(&database, Status::Sent, 3).await;
        let report = relay.shutdown().await.unwrap();
        assert_eq!(published(&publisher), ["a1", "a1", "a2", "a3"], "{ordering:?}");
        assert_eq!((report.sent, report.retried, report.released), (3, 1, 2));
        let attempts: Vec<i32> = rows(db).await.iter().map(|row| row.attempts).collect();
        assert_eq!(attempts, [2, 1, 1], "what was given back spent no attempt");
    }
}

async fn fails_for_good(database: TestDatabase) {
    let db = &database.db;
    for ordering in [HOLD, SKIP] {
        db.execute_unprepared("DELETE FROM outbox_message").await.unwrap();
        enqueue(db, &["a", "b", "a", "a", "b"]).await;
        let publisher = Arc::new(RecordingPublisher::answering(|message| match label(message).as_str() {
            "a1" => Err(PublishError::permanent("too large")),
            _ => Ok(Ack::new()),
        }));
        let relay = quick(db, ordering, publisher.clone()).build().unwrap().spawn();
        let sent = if ordering == HOLD { 2 } else { 4 };
        until(&database, Status::Sent, sent).await;
        until(&database, Status::Failed, 1).await;
        until(&database, Status::Processing, 0).await;
        relay.shutdown().await.unwrap();
        let of_a: Vec<String> = published(&publisher).into_iter().filter(|l| l.starts_with('a')).collect();
        let rows = rows(db).await;
        if ordering == HOLD {
            assert_eq!(of_a, ["a1"]);
            for row in [2, 3] {
                assert_eq!((rows[row].status, rows[row].attempts), (Status::Pending, 0));
            }
        } else {
            assert_eq!(of_a, ["a1", "a2", "a3"]);
        }
    }
}

/// Takes a moment for each message, and knows how many it has at a time.
#[derive(Default)]
struct Observer {
    now: Mutex<HashMap<String, usize>>,
    most_of_a_key: AtomicUsize,
    most: AtomicUsize,
    seen: Mutex<Vec<(String, usize)>>,
    pause: Duration,
    /// Of a thousand messages, so many fail.
    failing: u32,
}

impl Publisher for Observer {
    async fn publish(&self, message: &Message) -> Result<Ack, PublishError> {
        let key = message.ordering_key().unwrap_or_default().to_owned();
        let number = String::from_utf8_lossy(message.payload()).parse().unwrap();
        {
            let mut now = self.now.lock().unwrap();
            let of_key = now.entry(key.clone()).or_default();
            *of_key += 1;
            self.most_of_a_key.fetch_max(*of_key, Atomic::SeqCst);
            self.most.fetch_max(now.values().sum(), Atomic::SeqCst);
            self.seen.lock().unwrap().push((key.clone(), number));
        }
        if !self.pause.is_zero() {
            tokio::time::sleep(self.pause).await;
        } else {
            tokio::task::yield_now().await;
        }
        *self.now.lock().unwrap().get_mut(&key).unwrap() -= 1;
        if fastrand::u32(..1_000) < self.failing {
            return Err(PublishError::transient("out of paper"));
        }
        Ok(Ack::new())
    }
}

async fn one_in_flight(database: TestDatabase) {
    let db = &database.db;
    let keys: Vec<&str> = ["a", "b", "c", "d"].into_iter().cycle().take(40).collect();
    enqueue(db, &keys).await;
    let observer = Arc::new(Observer { pause: Duration::from_millis(10), ..Observer::default() });
    let relays: Vec<_> = (0..2).map(|_| quick(db, HOLD, observer.clone()).build().unwrap().spawn()).collect();
    until(&database, Status::Sent, 40).await;
    for relay in relays {
        relay.shutdown().await.unwrap();
    }
    assert_eq!(observer.most_of_a_key.load(Atomic::SeqCst), 1);
    assert_eq!(observer.most.load(Atomic::SeqCst), 4, "other keys go on beside it");
    let seen = observer.seen.lock().unwrap();
    assert_eq!(seen.len(), 40);
    assert_first_in_order(&seen);
}

/// The first occurrences of each key are in order; how many there are of each.
fn assert_first_in_order(seen: &[(String, usize)]) -> HashMap<String, usize> {
    let mut last: HashMap<&str, usize> = HashMap::new();
    let mut firsts: HashSet<(&str, usize)> = HashSet::new();
    let mut counts: HashMap<String, usize> = HashMap::new();
    for (key, number) in seen {
        if !firsts.insert((key, *number)) {
            continue;
        }
        *counts.entry(key.clone()).or_default() += 1;
        if let Some(before) = last.insert(key, *number) {
            assert!(before < *number, "{key}: {number} comes after {before}");
        }
    }
    counts
}

async fn unreadable(database: TestDatabase) {
    let db = &database.db;
    for ordering in [HOLD, SKIP] {
        db.execute_unprepared("DELETE FROM outbox_message").await.unwrap();
        enqueue(db, &["a", "b", "a", "a", "a", "b"]).await;
        let third = &rows(db).await[3];
        let broken = format!(r#"UPDATE outbox_message SET headers = '{{"a": [1]}}' WHERE id = {}"#, third.id);
        db.execute_unprepared(&broken).await.unwrap();
        let publisher = Arc::new(RecordingPublisher::new());
        let relay = quick(db, ordering, publisher.clone()).build().unwrap().spawn();
        until(&database, Status::Sent, if ordering == HOLD { 4 } else { 5 }).await;
        until(&database, Status::Failed, 1).await;
        until(&database, Status::Processing, 0).await;
        relay.shutdown().await.unwrap();
        let of_a: Vec<String> = published(&publisher).into_iter().filter(|l| l.starts_with('a')).collect();
        if ordering == HOLD {
            assert_eq!(of_a, ["a1", "a2"]);
            let last = &rows(db).await[4];
            assert_eq!((last.status, last.attempts), (Status::Pending, 0));
        } else {
            assert_eq!(of_a, ["a1", "a2", "a4"]);
        }
    }
}

async fn resting(database: TestDatabase) {
    let db = &database.db;
    enqueue(db, &["a", "a", "a", "b"]).await;
    let topic = format!("UPDATE outbox_message SET topic = 'unbound' WHERE id = {}", rows(db).await[0].id);
    db.execute_unprepared(&topic).await.unwrap();
    let mended = Arc::new(AtomicBool::new(false));
    let is_mended = mended.clone();
    let publisher = Arc::new(RecordingPublisher::answering(move |message| {
        if message.topic() == "unbound" && !is_mended.load(Atomic::SeqCst) {
            return Err(PublishError::configuration("no stream takes the subject"));
        }
        Ok(Ack::new())
    }));
    let relay = quick(db, HOLD, publisher.clone()).rest(Duration::from_millis(200)).build().unwrap().spawn();
    until(&database, Status::Sent, 1).await;
    eventually("the run to be given back", || async {
        let rows = rows(db).await;
        rows[..3].iter().all(|row| (row.status, row.attempts) == (Status::Pending, 0)).then_some(())
    })
    .await;
    mended.store(true, Atomic::SeqCst);
    until(&database, Status::Sent, 4).await;
    relay.shutdown().await.unwrap();
    assert!(rows(db).await.iter().all(|row| row.attempts == 1));
    let mut of_a: Vec<String> = published(&publisher).into_iter().filter(|l| l.starts_with('a')).collect();
    of_a.dedup();
    assert_eq!(of_a, ["a1", "a2", "a3"]);
}

async fn outage(database: TestDatabase) {
    let db = &database.db;
    for ordering in [HOLD, SKIP] {
        db.execute_unprepared("DELETE FROM outbox_message").await.unwrap();
        enqueue(db, &["a", "b", "a", "b", "a"]).await;
        let tries = Arc::new(AtomicUsize::new(0));
        let (counted, is_back) = (tries.clone(), Arc::new(AtomicBool::new(false)));
        let back = is_back.clone();
        let publisher = Arc::new(RecordingPublisher::answering(move |_| {
            counted.fetch_add(1, Atomic::SeqCst);
            match back.load(Atomic::SeqCst) {
                true => Ok(Ack::new()),
                false => Err(PublishError::unavailable("the broker is gone")),
            }
        }));
        let relay = quick(db, ordering, publisher.clone()).build().unwrap().spawn();
        eventually("the relay to try again", || async { (tries.load(Atomic::SeqCst) >= 4).then_some(()) })
            .await;
        let seen = published(&publisher);
        assert!(seen.iter().all(|label| label.ends_with('1')), "only the first of a key is tried: {seen:?}");
        is_back.store(true, Atomic::SeqCst);
        until(&database, Status::Sent, 5).await;
        relay.shutdown().await.unwrap();
        assert!(rows(db).await.iter().all(|row| row.attempts == 1), "no attempt is spent");
        let seen: Vec<(String, usize)> = published(&publisher)
            .iter()
            .map(|label| (label[..1].to_owned(), label[1..].parse().unwrap()))
            .collect();
        assert_first_in_order(&seen);
    }
}

/// Somebody else takes the head of a run over while it waits for its turn.
async fn lost(database: TestDatabase) {
    let db = &database.db;
    enqueue(db, &["", "a", "a", "a"]).await;
    db.execute_unprepared("UPDATE outbox_message SET topic = 'stuck' WHERE ordering_key IS NULL")
        .await
        .unwrap();
    let publisher = Stuck::on("stuck");
    let relay = quick(db, HOLD, publisher.clone())
        .max_in_flight(1)
        .renew_every(Duration::from_millis(40))
        .sweep_every(Duration::from_secs(60))
        .poll_every(Duration::from_secs(60))
        .build()
        .unwrap()
        .spawn();
    publisher.until_waiting(1).await;
    let head = rows(db).await[1].id;
    let taken =
        format!("UPDATE outbox_message SET version = version + 2, claimed_by = 'other:1' WHERE id = {head}");
    db.execute_unprepared(&taken).await.unwrap();
    let stuck = rows(db).await.remove(0);
    eventually("several renewals", || async {
        let now = rows(db).await.remove(0);
        ((now.lease_until? - stuck.lease_until?).num_milliseconds() > 200).then_some(())
    })
    .await;
    publisher.let_go();
    eventually("the rest of the run to be given back", || async {
        let rows = rows(db).await;
        rows[2..].iter().all(|row| (row.status, row.attempts) == (Status::Pending, 0)).then_some(())
    })
    .await;
    assert_eq!(publisher.others.load(Atomic::SeqCst), 0, "nothing of the key is published");
    let report = relay.shutdown().await.unwrap();
    assert_eq!((report.sent, report.lost, report.released), (1, 1, 2));
    let other = rows(db).await.remove(1);
    assert_eq!((other.status, other.claimed_by.as_deref()), (Status::Processing, Some("other:1")));
}

async fn many_keys(database: TestDatabase) {
    let (keys, each) = match database.kind {
        Kind::Postgres if is_long() => (1_000, 100),
        Kind::Postgres => (1_000, 20),
        _ => (100, 50),
    };
    enqueue_many(&database, keys * each, ("k", &format!("n % {keys}"))).await;
    let observer = Arc::new(Observer { failing: 10, ..Observer::default() });
    let mut relays = Vec::new();
    let began = Instant::now();
    for _ in 0..8 {
        let db = database.connect_again().await;
        relays.push(quick(&db, HOLD, observer.clone()).build().unwrap().spawn());
    }
    let total = (keys * each) as u64;
    until(&database, Status::Sent, total).await;
    let took = began.elapsed();
    let mut settled = 0;
    for relay in relays {
        let report = relay.shutdown().await.unwrap();
        // What a statement wrote whose answer came too late counts as lost when it is written again.
        settled += report.sent + report.lost;
    }
    eprintln!("{} {total} rows in {took:?}", database.kind);
    assert!(settled >= total, "{settled}");
    let counts = assert_first_in_order(&observer.seen.lock().unwrap());
    assert_eq!(counts.len(), keys);
    assert!(counts.values().all(|count| *count == each), "nothing is lost");
    assert_eq!(observer.most_of_a_key.load(Atomic::SeqCst), 1);
}

async fn hot_key(database: TestDatabase) {
    const HOT: usize = 20_000;
    enqueue_many(&database, HOT, ("hot", "''")).await;
    enqueue_many(&database, 1_000, ("k", "n % 100")).await;
    let observer = Arc::new(Observer::default());
    let began = Instant::now();
    let relay = quick(&database.db, HOLD, observer.clone())
        .poll_every(Duration::from_secs(1))
        .build()
        .unwrap()
        .spawn();
    let sent = |hot: bool| {
        let seen = observer.seen.lock().unwrap();
        seen.iter().filter(|(key, _)| key.starts_with("hot") == hot).count()
    };
    eventually("the other keys to be through", || async { (sent(false) == 1_000).then_some(()) }).await;
    let (hot, took) = (sent(true), began.elapsed());
    eprintln!("{}: the others were through after {took:?} with {hot} hot ones", database.kind);
    assert!(hot < HOT / 10, "{hot} messages of the hot key came before the last of the others");
    // It goes on at the pace of its publishes, and not at that of the polls: a quarter of a batch a second.
    let more = hot + 3_000;
    let began = Instant::now();
    eventually("the hot key to go on", || async { (sent(true) >= more).then_some(()) }).await;
    let took = began.elapsed();
    eprintln!("{}: 3000 hot ones took {took:?}", database.kind);
    assert!(took < Duration::from_secs(10), "3,000 messages of the hot key took {took:?}");
    relay.shutdown().await.unwrap();
    assert_first_in_order(&observer.seen.lock().unwrap());
}

fn number_held(kind: Kind) -> usize {
    match kind {
        Kind::Postgres => 100_000,
        _ => 10_000,
    }
}

/// A failed message, and everything that it holds; then messages of other keys.
async fn behind_held(database: &TestDatabase) {
    enqueue_many(database, number_held(database.kind), ("held", "''")).await;
    let failed = "UPDATE outbox_message SET status = 'FAILED', failed_at = created_at, available_at = NULL, \
                  attempts = 5, last_error = 'x' WHERE id = 1";
    database.db.execute_unprepared(failed).await.unwrap();
    enqueue_many(database, 200, ("k", "n % 20")).await;
}

async fn held(database: TestDatabase) {
    behind_held(&database).await;
    let store = ordered(&database.db, HOLD);
    let (mut after, mut claims, mut won) = (None, 0, 0);
    loop {
        claims += 1;
        let request = ClaimRequest {
            after: after.as_ref(),
            ..request(ClaimStrategy::SkipLocked, 1_000, "test:1", LEASE)
        };
        let claimed = store.claim(&request).await.unwrap();
        won += claimed.claims.len();
        after = claimed.next;
        if after.is_none() {
            break;
        }
    }
    // A key that began at the very end of a window goes on when the walk begins again.
    assert!(won >= 190, "{won}");
    // Four batches each.
    assert!(claims <= number_held(database.kind) / 4_000 + 1, "{claims}");
}

async fn relayed_past_held(database: TestDatabase) {
    behind_held(&database).await;
    let observer = Arc::new(Observer::default());
    let relay = quick(&database.db, HOLD, observer.clone())
        .poll_every(Duration::from_secs(1))
        .build()
        .unwrap()
        .spawn();
    let began = Instant::now();
    until(&database, Status::Sent, 200).await;
    eprintln!("{}: sent after {:?}", database.kind, began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    // Those that come later find the relay at the end of the queue.
    enqueue_many(&database, 200, ("later", "n % 20")).await;
    let began = Instant::now();
    until(&database, Status::Sent, 400).await;
    eprintln!("{}: later ones sent after {:?}", database.kind, began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    // And so does what stands at the head, once it is free.
    let store = store(&database.db);
    let failed = Entity::find_by_id(1_i64).one(&database.db).await.unwrap().unwrap();
    assert!(store.discard(&[Fence::from(&failed)]).await.unwrap().is_empty());
    eventually("what was held to go on", || async {
        (number_of(&database.db, Status::Sent).await >= 1_000).then_some(())
    })
    .await;
    relay.shutdown().await.unwrap();
    assert_first_in_order(&observer.seen.lock().unwrap());
}

/// A subscriber of the stream, who sees what the broker took, and in which order.
async fn subscriber(database: TestDatabase) {
    const KEYS: usize = 50;
    const ROWS: usize = 3_000;
    let stream = TestStream::create().await;
    let topic = stream.topic("ordered");
    let mut messages = stream.client.subscribe(topic.clone()).await.unwrap();
    let enqueued = (0..ROWS)
        .map(|n| NewMessage::json(&topic, &(n % KEYS, n)).unwrap().ordering_key(format!("k{}", n % KEYS)));
    Outbox::new().enqueue_many(&database.db, enqueued).await.unwrap();
    let relays: Vec<_> = (0..4)
        .map(|_| {
            let publisher = Forgetful(NatsPublisher::jetstream(stream.client.clone()));
            quick(&database.db, HOLD, publisher).build().unwrap().spawn()
        })
        .collect();
    let mut seen = Vec::new();
    let mut distinct = HashSet::new();
    while distinct.len() < ROWS {
        let message =
            crate::support::within(Duration::from_secs(30), "a message", messages.next()).await.unwrap();
        let (key, number): (usize, usize) = serde_json::from_slice(&message.payload).unwrap();
        distinct.insert(number);
        seen.push((key.to_string(), number));
    }
    until(&database, Status::Sent, ROWS as u64).await;
    for relay in relays {
        relay.shutdown().await.unwrap();
    }
    assert!(seen.len() > ROWS, "some came twice");
    let counts = assert_first_in_order(&seen);
    assert!(counts.values().all(|count| *count == ROWS / KEYS));
    assert_eq!(stream.count().await, ROWS as u64);
}

/// Publishes, and of a hundred messages says of one that it did not.
struct Forgetful(NatsPublisher);

impl Publisher for Forgetful {
    async fn publish(&self, message: &Message) -> Result<Ack, PublishError> {
        let published = self.0.publish(message).await;
        if fastrand::u32(..100) == 0 {
            return Err(PublishError::transient("the acknowledgement got lost"));
        }
        published
    }
}

async fn refused(database: TestDatabase) {
    for ordering in [HOLD, SKIP] {
        let relay = quick(&database.db, ordering, RecordingPublisher::new());
        let error = relay.strategy(ClaimStrategy::Optimistic).build().unwrap_err();
        assert!(matches!(error, ConfigError::OptimisticOrder { ordering: named } if named == ordering));
        let error = error.to_string();
        assert!(error.contains("strategy is Optimistic") && error.contains("PerKey"), "{error}");
        quick(&database.db, ordering, RecordingPublisher::new())
            .strategy(ClaimStrategy::SkipLocked)
            .build()
            .unwrap();
    }
}
