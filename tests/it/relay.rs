//! The relay as a whole, with a publisher that answers as it is told to.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use libtest_mimic::Trial;
use sea_orm::ConnectionTrait;
use sea_orm_outbox::{
    Ack, ConfigError, Message, NewMessage, Outbox, PublishError, Publisher, Relay, RelayBuilder, RelayError,
    entity::{Status, outbox_message::Model as Row},
    lifecycle::RetryPolicy,
    migration::{Migrator, MigratorTrait},
    publisher::RecordingPublisher,
    store::ClaimStrategy,
};

use crate::support::{
    Kind, TestDatabase, eventually, on_database, on_each_database,
    rows::{LEASE, claim, count, enqueue, let_leases_end, row, rows, store},
    stuck::Stuck,
    within,
};

pub(crate) fn tests() -> Vec<Trial> {
    let mut tests: Vec<Trial> = [
        on_each_database("relay::every_message_is_published_once_and_ends_sent", relays_everything),
        on_each_database("relay::a_message_that_always_fails_is_tried_five_times", always_fails),
        on_each_database("relay::a_permanent_error_fails_at_once_and_harms_no_neighbour", permanent),
        on_each_database("relay::a_topic_without_destination_rests_and_the_others_go_on", configuration),
        on_each_database("relay::an_outage_of_the_broker_costs_no_attempt", outage),
        on_each_database("relay::a_message_that_finds_the_broker_away_each_time_stops_no_other", in_the_way),
        on_each_database(
            "relay::a_message_that_breaks_the_connection_runs_out_of_attempts",
            breaks_connection,
        ),
        on_each_database("relay::an_outage_is_probed_at_a_pace_whatever_the_window", paced_probes),
        on_each_database("relay::suspects_have_their_turn_behind_a_slow_backlog", suspects_turn),
        on_each_database("relay::suspects_go_on_after_an_outage", suspects_after_outage),
        on_each_database("relay::a_panic_in_a_publisher_is_a_failed_attempt", panics),
        on_each_database("relay::a_publish_without_an_answer_is_given_up_in_time", no_answer),
        on_each_database("relay::many_publishes_are_in_flight_and_no_more_than_allowed", in_flight),
        on_each_database("relay::one_slow_message_holds_up_no_other", slow_message),
        on_each_database("relay::a_lease_is_renewed_while_a_publish_lasts", renews),
        on_each_database("relay::a_claim_that_waits_longer_than_its_lease_is_renewed", waits_long),
        on_each_database("relay::a_claim_lost_while_it_waits_is_not_published", lost_in_queue),
        on_each_database("relay::a_resting_topic_is_tried_once_and_no_other_rests", rests_once),
        on_each_database("relay::a_row_that_cannot_be_written_or_read_harms_only_itself", unwritable),
        on_each_database("relay::without_a_broker_nothing_is_claimed_but_the_sweep_goes_on", not_connected),
        on_each_database("relay::a_claim_lost_in_mid_publish_is_counted_as_lost", loses),
        on_each_database("relay::stopping_finishes_what_is_in_flight_and_releases_the_rest", stops),
        on_each_database("relay::stopping_gives_back_what_outlasts_the_grace_period", outlasts_grace),
        on_each_database("relay::asked_again_it_stops_without_a_grace_period", stops_now),
        on_each_database("relay::a_handle_can_be_stopped_twice_and_dropped", handle_twice),
        on_each_database("relay::a_missing_table_is_an_error_that_says_what_to_do", missing_table),
        on_each_database("relay::a_suspect_is_published_with_nothing_else_in_flight", suspects_alone),
        on_each_database("relay::relays_with_either_strategy_share_a_backlog", share_a_backlog),
    ]
    .into_iter()
    .flatten()
    .collect();
    tests.push(on_database(
        Kind::Sqlite,
        "relay::settings_that_cannot_be_safe_are_refused_by_name",
        refused_settings,
    ));
    tests.push(on_database(
        Kind::Postgres,
        "relay::no_transaction_is_open_while_a_message_is_published",
        no_open_transaction,
    ));
    tests
}

/// A relay that does not let a test wait.
fn quick<P: Publisher>(database: &TestDatabase, publisher: P) -> RelayBuilder<P> {
    Relay::builder(database.db.clone(), publisher)
        .poll_every(Duration::from_millis(20))
        .sweep_every(Duration::from_millis(50))
        .retry(RetryPolicy::default().with_initial_delay(Duration::from_millis(20)))
}

async fn until_all(database: &TestDatabase, status: Status, expected: usize) {
    eventually(&format!("{expected} rows to be {status:?}"), || async {
        (count(&database.db, status).await == expected).then_some(())
    })
    .await;
}

async fn relays_everything(database: TestDatabase) {
    enqueue(&database.db, "t", 500).await;
    let publisher = Arc::new(RecordingPublisher::new());
    let relay = quick(&database, publisher.clone()).batch_size(100).build().unwrap().spawn();
    until_all(&database, Status::Sent, 500).await;
    // A message enqueued while it runs is found as well.
    enqueue(&database.db, "t", 1).await;
    until_all(&database, Status::Sent, 501).await;
    let report = relay.shutdown().await.unwrap();
    assert_eq!((report.claimed, report.sent, report.lost), (501, 501, 0));
    let mut published: HashMap<_, usize> = HashMap::new();
    for message in publisher.messages() {
        *published.entry(message.id()).or_default() += 1;
    }
    for row in rows(&database.db).await {
        assert_eq!(published.remove(&row.message_id.into()), Some(1));
        assert_eq!((row.version, row.attempts, row.last_error), (2, 1, None));
    }
}

async fn always_fails(database: TestDatabase) {
    enqueue(&database.db, "t", 1).await;
    let times = Arc::new(Mutex::new(Vec::new()));
    let seen = times.clone();
    let publisher = RecordingPublisher::answering(move |_| {
        seen.lock().unwrap().push(std::time::Instant::now());
        Err(PublishError::transient("out of paper"))
    });
    let policy = RetryPolicy::default().with_initial_delay(Duration::from_millis(100)).with_jitter(0.1);
    let relay = quick(&database, publisher).poll_every(Duration::from_millis(5)).retry(policy);
    let relay = relay.build().unwrap().spawn();
    until_all(&database, Status::Failed, 1).await;
    let row = row(&database.db).await;
    assert_eq!((row.attempts, row.sent_at), (5, None));
    assert_eq!(row.last_error.as_deref(), Some("out of paper"));
    assert!(row.failed_at.is_some());
    let report = relay.shutdown().await.unwrap();
    assert_eq!((report.claimed, report.retried, report.failed), (5, 4, 1));
    let times = times.lock().unwrap().clone();
    assert_eq!(times.len(), 5, "five attempts and no more");
    for (n, pair) in times.windows(2).enumerate() {
        // The delay after attempt n is 100 ms doubled n times, less a tenth by chance.
        let least = Duration::from_millis(90) * 2_u32.pow(u32::try_from(n).unwrap());
        assert!(pair[1] - pair[0] >= least, "{times:?}");
    }
    // It is never claimed again.
    assert!(claim(&store(&database.db), 10, LEASE).await.claims.is_empty());
}

async fn permanent(database: TestDatabase) {
    enqueue(&database.db, "bad", 1).await;
    enqueue(&database.db, "good", 20).await;
    let publisher = RecordingPublisher::answering(|message| match message.topic() {
        "bad" => Err(PublishError::permanent("payload too large (2 > 1)")),
        _ => Ok(Ack::new()),
    });
    let relay = quick(&database, publisher).build().unwrap().spawn();
    until_all(&database, Status::Sent, 20).await;
    until_all(&database, Status::Failed, 1).await;
    relay.shutdown().await.unwrap();
    let bad = rows(&database.db).await.remove(0);
    assert_eq!((bad.attempts, bad.last_error.as_deref()), (1, Some("payload too large (2 > 1)")));
}

async fn configuration(database: TestDatabase) {
    enqueue(&database.db, "unbound", 5).await;
    enqueue(&database.db, "bound", 5).await;
    let mended = Arc::new(AtomicBool::new(false));
    let is_mended = mended.clone();
    let publisher = RecordingPublisher::answering(move |message| {
        if message.topic() == "unbound" && !is_mended.load(Ordering::Relaxed) {
            return Err(PublishError::configuration("no stream takes the subject"));
        }
        Ok(Ack::new())
    });
    let relay = quick(&database, publisher).rest(Duration::from_millis(200)).build().unwrap().spawn();
    until_all(&database, Status::Sent, 5).await;
    eventually("the reason to be written", || async {
        let rows = rows(&database.db).await;
        let resting = rows.iter().filter(|row| row.status == Status::Pending);
        let explained = resting.filter(|row| {
            row.attempts == 0 && row.last_error.as_deref() == Some("no stream takes the subject")
        });
        (explained.count() == 5).then_some(())
    })
    .await;
    mended.store(true, Ordering::Relaxed);
    until_all(&database, Status::Sent, 10).await;
    relay.shutdown().await.unwrap();
    assert!(rows(&database.db).await.iter().all(|row| row.attempts == 1));
}

/// A broker that can be switched off, for those in flight and those to come.
struct Switch {
    on: AtomicBool,
    published: AtomicUsize,
    refused: AtomicUsize,
}

impl Publisher for Switch {
    async fn publish(&self, _: &Message) -> Result<Ack, PublishError> {
        if self.on.load(Ordering::SeqCst) {
            self.published.fetch_add(1, Ordering::SeqCst);
            return Ok(Ack::new());
        }
        self.refused.fetch_add(1, Ordering::SeqCst);
        Err(PublishError::unavailable("the broker is gone"))
    }
}

async fn outage(database: TestDatabase) {
    let switch = Arc::new(Switch {
        on: AtomicBool::new(false),
        published: AtomicUsize::new(0),
        refused: AtomicUsize::new(0),
    });
    enqueue(&database.db, "t", 300).await;
    let relay = quick(&database, switch.clone()).batch_size(50).max_in_flight(10).build().unwrap().spawn();
    // Each try after the first is a single message, after a pause that grows.
    eventually("the relay to try again and again", || async {
        (switch.refused.load(Ordering::SeqCst) >= 13).then_some(())
    })
    .await;
    assert!(switch.refused.load(Ordering::SeqCst) <= 20, "the relay pauses");
    assert_eq!(count(&database.db, Status::Failed).await, 0);
    switch.on.store(true, Ordering::SeqCst);
    until_all(&database, Status::Sent, 300).await;
    let report = relay.shutdown().await.unwrap();
    assert!(rows(&database.db).await.iter().all(|row| row.attempts == 1), "no attempt was spent");
    assert_eq!((report.retried, report.failed), (0, 0));
    assert_eq!(switch.published.load(Ordering::SeqCst), 300);
}

/// Each try says that the broker is away, for this one message only.
async fn in_the_way(database: TestDatabase) {
    enqueue(&database.db, "poison", 1).await;
    enqueue(&database.db, "good", 20).await;
    let publisher = RecordingPublisher::answering(|message| match message.topic() {
        "poison" => Err(PublishError::unavailable("no answer")),
        _ => Ok(Ack::new()),
    });
    let relay = quick(&database, publisher).max_in_flight(1).build().unwrap().spawn();
    until_all(&database, Status::Sent, 20).await;
    relay.shutdown().await.unwrap();
    let poison = rows(&database.db).await.remove(0);
    assert_eq!((poison.status, poison.attempts), (Status::Pending, 0));
    assert_eq!(poison.last_error.as_deref(), Some("no answer"));
}

async fn breaks_connection(database: TestDatabase) {
    enqueue(&database.db, "poison", 1).await;
    enqueue(&database.db, "good", 20).await;
    let publisher = RecordingPublisher::answering(|message| match message.topic() {
        "poison" => Err(PublishError::connection_lost("the server hung up")),
        _ => Ok(Ack::new()),
    });
    let relay = quick(&database, publisher).build().unwrap().spawn();
    until_all(&database, Status::Sent, 20).await;
    until_all(&database, Status::Failed, 1).await;
    relay.shutdown().await.unwrap();
    let poison = rows(&database.db).await.remove(0);
    assert_eq!((poison.attempts, poison.last_error.as_deref()), (5, Some("the server hung up")));
}

async fn paced_probes(database: TestDatabase) {
    for window in [1, 100] {
        let switch = Arc::new(Switch {
            on: AtomicBool::new(false),
            published: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
        });
        enqueue(&database.db, "t", 100).await;
        let relay =
            quick(&database, switch.clone()).batch_size(50).max_in_flight(window).build().unwrap().spawn();
        eventually("the outage to be noticed", || async {
            (switch.refused.load(Ordering::SeqCst) > 0).then_some(())
        })
        .await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        relay.shutdown().await.unwrap();
        // Those in flight at first, then one at a time after 100 to 200 ms, 200 to 400 ms and so on.
        let refused = switch.refused.load(Ordering::SeqCst);
        assert!(refused <= window + 8, "{refused} tries with a window of {window}");
    }
}

/// Draining what is in flight takes longer than their turn.
async fn suspects_turn(database: TestDatabase) {
    enqueue(&database.db, "suspect", 1).await;
    enqueue(&database.db, "harmless", 600).await;
    let suspect = "UPDATE outbox_message SET attempts = 2, last_error = 'claim expired: x' \
                   WHERE topic = 'suspect'";
    database.db.execute_unprepared(suspect).await.unwrap();
    let slow = Slow(Duration::from_millis(150));
    let relay = quick(&database, slow).batch_size(10).max_in_flight(1).build().unwrap().spawn();
    eventually("the suspect to be sent", || async {
        (rows(&database.db).await[0].status == Status::Sent).then_some(())
    })
    .await;
    assert!(count(&database.db, Status::Pending).await > 0, "it had to wait for the whole backlog");
    relay.shutdown().await.unwrap();
}

/// A broker that takes its time.
struct Slow(Duration);

impl Publisher for Slow {
    async fn publish(&self, _: &Message) -> Result<Ack, PublishError> {
        tokio::time::sleep(self.0).await;
        Ok(Ack::new())
    }
}

async fn suspects_after_outage(database: TestDatabase) {
    let switch = Arc::new(Switch {
        on: AtomicBool::new(false),
        published: AtomicUsize::new(0),
        refused: AtomicUsize::new(0),
    });
    enqueue(&database.db, "t", 3).await;
    let relay = quick(&database, switch.clone()).build().unwrap().spawn();
    eventually("the outage to be noticed", || async {
        (switch.refused.load(Ordering::SeqCst) > 1).then_some(())
    })
    .await;
    // Nothing is left to find the broker back with but suspects.
    let suspect =
        "UPDATE outbox_message SET attempts = 2, last_error = 'claim expired: x', version = version + 1
                   WHERE status = 'PENDING'";
    eventually("all rows to be suspects", || async {
        database.db.execute_unprepared(suspect).await.unwrap();
        rows(&database.db).await.iter().all(|row| row.attempts >= 2).then_some(())
    })
    .await;
    switch.on.store(true, Ordering::SeqCst);
    until_all(&database, Status::Sent, 3).await;
    relay.shutdown().await.unwrap();
}

async fn panics(database: TestDatabase) {
    enqueue(&database.db, "bad", 1).await;
    enqueue(&database.db, "good", 20).await;
    let publisher = RecordingPublisher::answering(|message| {
        assert_ne!(message.topic(), "bad", "a bug in the publisher");
        Ok(Ack::new())
    });
    let relay = quick(&database, publisher).build().unwrap().spawn();
    until_all(&database, Status::Sent, 20).await;
    until_all(&database, Status::Failed, 1).await;
    let report = relay.shutdown().await.unwrap();
    assert_eq!(report.sent, 20);
    let bad = rows(&database.db).await.remove(0);
    assert_eq!(bad.attempts, 5);
    assert!(bad.last_error.unwrap().contains("a bug in the publisher"));
}

async fn no_answer(database: TestDatabase) {
    enqueue(&database.db, "stuck", 1).await;
    let relay = quick(&database, Stuck::on("stuck")).publish_timeout(Duration::from_millis(50));
    let relay = relay.build().unwrap().spawn();
    until_all(&database, Status::Failed, 1).await;
    relay.shutdown().await.unwrap();
    let row = row(&database.db).await;
    assert_eq!(row.attempts, 5);
    assert!(row.last_error.unwrap().contains("50ms"));
}

async fn in_flight(database: TestDatabase) {
    enqueue(&database.db, "stuck", 100).await;
    let publisher = Stuck::on("stuck");
    let relay = quick(&database, publisher.clone()).batch_size(20).max_in_flight(32).build().unwrap().spawn();
    publisher.until_waiting(32).await;
    // It claims no more than it can hold: those in flight, the rest of their batch, and two batches.
    eventually("the relay to have claimed all it can hold", || async {
        let claimed = count(&database.db, Status::Processing).await;
        assert!(claimed <= 32 + 20 + 2 * 20, "{claimed}");
        (claimed >= 32 + 2 * 20).then_some(())
    })
    .await;
    publisher.let_go();
    until_all(&database, Status::Sent, 100).await;
    assert_eq!(publisher.most.load(Ordering::SeqCst), 32);
    relay.shutdown().await.unwrap();
}

async fn slow_message(database: TestDatabase) {
    enqueue(&database.db, "stuck", 1).await;
    enqueue(&database.db, "quick", 200).await;
    let publisher = Stuck::on("stuck");
    let relay = quick(&database, publisher.clone()).batch_size(50).max_in_flight(10).build().unwrap().spawn();
    until_all(&database, Status::Sent, 200).await;
    publisher.until_waiting(1).await;
    publisher.let_go();
    until_all(&database, Status::Sent, 201).await;
    relay.shutdown().await.unwrap();
}

async fn renews(database: TestDatabase) {
    enqueue(&database.db, "stuck", 1).await;
    let publisher = Stuck::on("stuck");
    let builder = || {
        quick(&database, publisher.clone())
            .lease(Duration::from_millis(1_500))
            .renew_every(Duration::from_millis(100))
            .publish_timeout(Duration::from_millis(1_300))
    };
    // The second would sweep and publish it if the first let its lease end.
    let first = builder().build().unwrap().spawn();
    publisher.until_waiting(1).await;
    let second = builder().build().unwrap().spawn();
    let claimed = row(&database.db).await;
    eventually("the lease to be renewed", || async {
        let row = row(&database.db).await;
        assert_eq!((row.version, row.attempts), (1, 1));
        (row.lease_until > claimed.lease_until).then_some(())
    })
    .await;
    publisher.let_go();
    until_all(&database, Status::Sent, 1).await;
    let (first, second) = (first.shutdown().await.unwrap(), second.shutdown().await.unwrap());
    assert_eq!((first.sent, second.claimed, second.returned), (1, 0, 0));
}

/// Behind a message that takes its time, in a relay with one in flight.
async fn waits_long(database: TestDatabase) {
    enqueue(&database.db, "stuck", 1).await;
    enqueue(&database.db, "t", 3).await;
    let publisher = Stuck::on("stuck");
    let relay = quick(&database, publisher.clone())
        .max_in_flight(1)
        .lease(Duration::from_millis(3_000))
        .renew_every(Duration::from_millis(100))
        .publish_timeout(Duration::from_millis(2_500))
        .retry(RetryPolicy::default().with_max_attempts(1_000).with_initial_delay(Duration::ZERO));
    let relay = relay.build().unwrap().spawn();
    publisher.until_waiting(1).await;
    let claimed = rows(&database.db).await;
    eventually("the leases to be renewed beyond their first end", || async {
        let now = rows(&database.db).await;
        let beyond = |(now, then): (&Row, &Row)| {
            (now.lease_until? - then.lease_until?).num_milliseconds().ge(&1_000).then_some(())
        };
        now.iter().zip(&claimed).skip(1).all(|pair| beyond(pair).is_some()).then_some(())
    })
    .await;
    publisher.let_go();
    until_all(&database, Status::Sent, 4).await;
    let report = relay.shutdown().await.unwrap();
    assert_eq!((report.released, report.returned, report.lost), (0, 0, 0), "{report}");
    assert!(rows(&database.db).await.iter().filter(|row| row.topic == "t").all(|row| row.attempts == 1));
}

async fn lost_in_queue(database: TestDatabase) {
    enqueue(&database.db, "stuck", 1).await;
    enqueue(&database.db, "t", 3).await;
    let publisher = Stuck::on("stuck");
    let relay = quick(&database, publisher.clone()).max_in_flight(1).renew_every(Duration::from_millis(40));
    let relay = relay.sweep_every(Duration::from_secs(60)).poll_every(Duration::from_secs(60));
    let relay = relay.build().unwrap().spawn();
    publisher.until_waiting(1).await;
    // Somebody else takes them over, with a lease that lasts.
    let taken = "UPDATE outbox_message SET version = version + 2, claimed_by = 'other:1' WHERE topic = 't'";
    database.db.execute_unprepared(taken).await.unwrap();
    let stuck = rows(&database.db).await.remove(0);
    eventually("several renewals", || async {
        let now = rows(&database.db).await.remove(0);
        ((now.lease_until? - stuck.lease_until?).num_milliseconds() > 200).then_some(())
    })
    .await;
    let before = rows(&database.db).await;
    publisher.let_go();
    until_all(&database, Status::Sent, 1).await;
    let report = relay.shutdown().await.unwrap();
    assert_eq!((report.sent, report.lost, report.released), (1, 3, 0), "{report}");
    assert_eq!(rows(&database.db).await[1..], before[1..]);
    assert_eq!(publisher.others.load(Ordering::SeqCst), 0, "none of them was published");
}

async fn rests_once(database: TestDatabase) {
    enqueue(&database.db, "unbound", 3).await;
    enqueue(&database.db, "bound", 3).await;
    let publisher = Arc::new(RecordingPublisher::answering(|message| match message.topic() {
        "unbound" => Err(PublishError::configuration("no stream takes the subject")),
        _ => Ok(Ack::new()),
    }));
    let relay = quick(&database, publisher.clone()).max_in_flight(1).build().unwrap().spawn();
    until_all(&database, Status::Sent, 3).await;
    relay.shutdown().await.unwrap();
    let tried = publisher.messages().iter().filter(|message| message.topic() == "unbound").count();
    assert_eq!(tried, 1, "the others of the topic rest with it");
    for row in rows(&database.db).await {
        if row.topic == "bound" {
            assert_eq!((row.version, row.last_error), (2, None));
        } else {
            assert_eq!((row.attempts, row.last_error.as_deref()), (0, Some("no stream takes the subject")));
        }
    }
}

async fn unwritable(database: TestDatabase) {
    enqueue(&database.db, "t", 20).await;
    let trigger = match database.kind {
        Kind::Sqlite => {
            "CREATE TRIGGER refuse BEFORE UPDATE ON outbox_message
             WHEN NEW.status = 'SENT' AND NEW.id = 7 BEGIN SELECT RAISE(ABORT, 'refused'); END"
        }
        Kind::MySql | Kind::MariaDb => {
            "CREATE TRIGGER refuse BEFORE UPDATE ON outbox_message FOR EACH ROW
             IF NEW.status = 'SENT' AND NEW.id = 7
             THEN SIGNAL SQLSTATE '23000' SET MESSAGE_TEXT = 'refused'; END IF"
        }
        Kind::Postgres | Kind::OldestPostgres => {
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               RAISE EXCEPTION 'refused' USING ERRCODE = 'check_violation'; END $$;
             CREATE TRIGGER refuse BEFORE UPDATE ON outbox_message FOR EACH ROW
             WHEN (NEW.status = 'SENT' AND NEW.id = 7) EXECUTE FUNCTION refuse()"
        }
    };
    database.db.execute_unprepared(trigger).await.unwrap();
    let unreadable = r#"UPDATE outbox_message SET headers = '{"a": 1}' WHERE id = 9"#;
    database.db.execute_unprepared(unreadable).await.unwrap();
    let relay = quick(&database, RecordingPublisher::new()).build().unwrap().spawn();
    until_all(&database, Status::Sent, 18).await;
    until_all(&database, Status::Failed, 1).await;
    within(Duration::from_secs(10), "the relay to stop", relay.shutdown()).await.unwrap();
    let rows = rows(&database.db).await;
    assert_eq!((rows[6].status, rows[8].status), (Status::Processing, Status::Failed));
}

/// A broker that cannot be reached, and is not asked.
struct Unreachable;

impl Publisher for Unreachable {
    async fn publish(&self, _: &Message) -> Result<Ack, PublishError> {
        panic!("nothing may be published")
    }

    fn is_connected(&self) -> bool {
        false
    }
}

async fn not_connected(database: TestDatabase) {
    // More than one step of the sweep; the stale claim stands in the second.
    enqueue(&database.db, "t", 10_001).await;
    let stale = "UPDATE outbox_message SET status = 'PROCESSING', attempts = 1, version = 1, \
                 claimed_by = 'dead:1', lease_until = available_at, available_at = created_at \
                 WHERE id = (SELECT id FROM (
                     SELECT id FROM outbox_message ORDER BY available_at DESC, id DESC LIMIT 1
                 ) AS last_due)";
    database.db.execute_unprepared(stale).await.unwrap();
    let relay = quick(&database, Unreachable).build().unwrap().spawn();
    until_all(&database, Status::Pending, 10_001).await;
    let report = relay.shutdown().await.unwrap();
    assert_eq!((report.claimed, report.returned), (0, 1), "{report}");
}

async fn loses(database: TestDatabase) {
    enqueue(&database.db, "stuck", 1).await;
    let publisher = Stuck::on("stuck");
    // Too rarely renewed to help: somebody else takes the row.
    let relay = quick(&database, publisher.clone()).sweep_every(Duration::from_secs(60));
    let relay = relay.poll_every(Duration::from_secs(60)).build().unwrap().spawn();
    publisher.until_waiting(1).await;
    let_leases_end(&database.db).await;
    let store = store(&database.db);
    assert_eq!(crate::support::rows::sweep(&store).await, 1);
    let newer = claim(&store, 1, LEASE).await.claims;
    assert_eq!(newer.len(), 1);
    let before = row(&database.db).await;
    publisher.let_go();
    eventually("the publish to end", || async {
        (publisher.waiting.load(Ordering::SeqCst) == 0).then_some(())
    })
    .await;
    let report = relay.shutdown().await.unwrap();
    assert_eq!((report.sent, report.lost, report.released), (0, 1, 0));
    assert_eq!(row(&database.db).await, before);
}

async fn stops(database: TestDatabase) {
    enqueue(&database.db, "stuck", 5).await;
    enqueue(&database.db, "waiting", 45).await;
    let publisher = Stuck::on("stuck");
    // One claim takes them all, and no other is under way when the relay is told to stop.
    let relay = quick(&database, publisher.clone()).max_in_flight(5).poll_every(Duration::from_secs(60));
    let relay = relay.build().unwrap().spawn();
    publisher.until_waiting(5).await;
    let stopping = tokio::spawn(async move { relay.shutdown().await });
    // What was claimed and not begun goes back at once, while the others are still in flight.
    until_all(&database, Status::Pending, 45).await;
    assert_eq!(count(&database.db, Status::Processing).await, 5);
    publisher.let_go();
    let report = within(Duration::from_secs(10), "the relay to stop", stopping).await.unwrap().unwrap();
    assert_eq!((report.sent, report.released, report.lost), (5, 45, 0));
    for row in rows(&database.db).await {
        let expected = if row.topic == "stuck" { (Status::Sent, 1) } else { (Status::Pending, 0) };
        assert_eq!((row.status, row.attempts), expected);
    }
}

async fn outlasts_grace(database: TestDatabase) {
    enqueue(&database.db, "stuck", 5).await;
    let publisher = Stuck::on("stuck");
    let relay =
        quick(&database, publisher.clone()).grace(Duration::from_millis(100)).build().unwrap().spawn();
    publisher.until_waiting(5).await;
    let stopped = within(Duration::from_secs(5), "the relay to stop", relay.shutdown()).await;
    assert_eq!(stopped.unwrap().released, 5);
    assert!(rows(&database.db).await.iter().all(|r| (r.status, r.attempts) == (Status::Pending, 0)));
}

async fn stops_now(database: TestDatabase) {
    enqueue(&database.db, "stuck", 5).await;
    let publisher = Stuck::on("stuck");
    let long = Duration::from_secs(100);
    let relay = quick(&database, publisher.clone()).grace(long).publish_timeout(long).lease(3 * long);
    let relay = relay.build().unwrap().spawn();
    publisher.until_waiting(5).await;
    let stop = async { tokio::join!(relay.shutdown(), relay.shutdown_now()) };
    let (first, second) = within(Duration::from_secs(10), "the relay to stop", stop).await;
    assert_eq!(first.unwrap().released, 5);
    assert_eq!(second.unwrap().released, 5);
    assert!(rows(&database.db).await.iter().all(|r| (r.status, r.attempts) == (Status::Pending, 0)));
}

async fn handle_twice(database: TestDatabase) {
    enqueue(&database.db, "t", 10).await;
    let relay = quick(&database, RecordingPublisher::new()).build().unwrap().spawn();
    until_all(&database, Status::Sent, 10).await;
    let limit = Duration::from_secs(10);
    let (first, second) =
        within(limit, "two stops at once", async { tokio::join!(relay.shutdown(), relay.shutdown()) }).await;
    assert_eq!(first.unwrap(), second.unwrap());
    assert_eq!(within(limit, "a third stop", relay.shutdown()).await.unwrap().sent, 10);
    drop(relay);

    // Dropped while it runs, it stops by itself.
    let publisher = Arc::new(RecordingPublisher::new());
    drop(quick(&database, publisher.clone()).build().unwrap().spawn());
    eventually("the relay to let go of its publisher", || async {
        (Arc::strong_count(&publisher) == 1).then_some(())
    })
    .await;

    // Stopped before it has begun, it leaves the pool as it was.
    let memory = sea_orm::Database::connect("sqlite::memory:").await.unwrap();
    Migrator::up(&memory, None).await.unwrap();
    for _ in 0..50 {
        let relay = Relay::builder(memory.clone(), RecordingPublisher::new()).build().unwrap().spawn();
        within(limit, "a relay stopped at once", relay.shutdown()).await.unwrap();
    }
    assert_eq!(rows(&memory).await.len(), 0);

    // And `run` ends when told to.
    let relay = quick(&database, RecordingPublisher::new()).build().unwrap();
    within(limit, "a relay stopped at once", relay.run(async {})).await.unwrap();
}

async fn missing_table(database: TestDatabase) {
    database.db.execute_unprepared("DROP TABLE outbox_message").await.unwrap();
    let relay = quick(&database, RecordingPublisher::new()).build().unwrap();
    let ended = within(Duration::from_secs(10), "the relay to refuse", relay.spawn().wait()).await;
    let error = ended.unwrap_err();
    assert!(matches!(error, RelayError::Table(_)), "{error}");
    assert!(error.to_string().contains("migrations"), "{error}");
}

/// Notes how many are in flight when a suspect is.
#[derive(Default)]
struct Company {
    in_flight: AtomicUsize,
    suspects: AtomicUsize,
    company: AtomicUsize,
}

impl Publisher for Company {
    async fn publish(&self, message: &Message) -> Result<Ack, PublishError> {
        let others = self.in_flight.fetch_add(1, Ordering::SeqCst);
        if message.topic() == "suspect" {
            self.suspects.fetch_add(1, Ordering::SeqCst);
            self.company.fetch_add(others, Ordering::SeqCst);
        }
        let suspect = message.topic() == "suspect";
        // Long enough for others to come, if they were let.
        tokio::time::sleep(Duration::from_millis(if suspect { 30 } else { 1 })).await;
        if suspect {
            self.company.fetch_add(self.in_flight.load(Ordering::SeqCst) - 1, Ordering::SeqCst);
        }
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
        Ok(Ack::new())
    }
}

async fn suspects_alone(database: TestDatabase) {
    enqueue(&database.db, "suspect", 20).await;
    enqueue(&database.db, "harmless", 2_000).await;
    let suspect = "UPDATE outbox_message SET attempts = 2, last_error = 'claim expired: x' \
                   WHERE topic = 'suspect'";
    database.db.execute_unprepared(suspect).await.unwrap();
    let company = Arc::new(Company::default());
    // Two relays in one process would die together.
    let relay =
        || quick(&database, company.clone()).batch_size(100).max_in_flight(50).build().unwrap().spawn();
    let (first, second) = (relay(), relay());
    until_all(&database, Status::Sent, 2_020).await;
    first.shutdown().await.unwrap();
    second.shutdown().await.unwrap();
    assert_eq!(company.suspects.load(Ordering::SeqCst), 20);
    assert_eq!(company.company.load(Ordering::SeqCst), 0, "a suspect was not alone");
}

async fn share_a_backlog(database: TestDatabase) {
    const MESSAGES: usize = 2_000;
    enqueue(&database.db, "t", MESSAGES).await;
    let publisher = Arc::new(RecordingPublisher::new());
    let mut relays = Vec::new();
    for strategy in [ClaimStrategy::SkipLocked, ClaimStrategy::Optimistic, ClaimStrategy::Optimistic] {
        let builder = quick(&database, publisher.clone()).strategy(strategy).batch_size(50);
        relays.push(builder.build().unwrap().spawn());
    }
    until_all(&database, Status::Sent, MESSAGES).await;
    let mut sent = 0;
    for relay in relays {
        let report = relay.shutdown().await.unwrap();
        assert_eq!((report.lost, report.returned), (0, 0));
        sent += report.sent;
    }
    assert_eq!(sent, MESSAGES as u64);
    assert_eq!(publisher.messages().len(), MESSAGES, "each message was published once");
}

async fn refused_settings(database: TestDatabase) {
    let builder = || Relay::builder(database.db.clone(), RecordingPublisher::new());
    let second = Duration::from_secs(1);
    let refused = |builder: RelayBuilder<RecordingPublisher>| builder.build().unwrap_err().to_string();
    for (setting, error) in [
        ("batch_size", refused(builder().batch_size(0))),
        ("batch_size", refused(builder().batch_size(10_001))),
        ("max_in_flight", refused(builder().max_in_flight(0))),
        ("name", refused(builder().name(""))),
        ("name", refused(builder().name("x".repeat(65)))),
        ("poll_every", refused(builder().poll_every(Duration::ZERO))),
        ("sweep_every", refused(builder().sweep_every(Duration::MAX))),
        ("statement_timeout", refused(builder().statement_timeout(Duration::ZERO))),
        ("grace", refused(builder().grace(Duration::MAX))),
        ("max_attempts", refused(builder().retry(RetryPolicy::default().with_max_attempts(0)))),
    ] {
        assert!(error.starts_with(setting), "{setting}: {error}");
    }
    let error = builder().lease(15 * second).build().unwrap_err();
    assert!(matches!(error, ConfigError::LeaseTooShort { .. }));
    for part in ["lease", "15s", "publish_timeout", "5s", "renew_every", "10s"] {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
    assert!(builder().lease(16 * second).build().is_ok());
}

async fn no_open_transaction(database: TestDatabase) {
    enqueue(&database.db, "stuck", 100).await;
    let publisher = Stuck::on("stuck");
    let relay = quick(&database, publisher.clone()).sweep_every(Duration::from_secs(60)).batch_size(100);
    let relay = relay.poll_every(Duration::from_secs(60)).build().unwrap().spawn();
    publisher.until_waiting(100).await;
    // Whoever else wants to change those rows need not wait, and no session is in a transaction.
    let other = database.connect_again().await;
    within(Duration::from_secs(1), "a change of the rows in flight", let_leases_end(&other)).await;
    eventually("no transaction to be open", || async {
        let sql = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() \
                   AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'";
        let statement = sea_orm::Statement::from_string(sea_orm::DbBackend::Postgres, sql);
        other.query_one_raw(statement).await.unwrap().is_none().then_some(())
    })
    .await;
    publisher.let_go();
    relay.shutdown().await.unwrap();
    let message = NewMessage::json("t", &1).unwrap();
    Outbox::new().enqueue(&database.db, message).await.unwrap();
}
