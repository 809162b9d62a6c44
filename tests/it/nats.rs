//! Publishing to a real NATS server.

use std::{sync::Arc, time::Duration};

use async_nats::jetstream;
use futures_util::StreamExt;
use libtest_mimic::Trial;
use sea_orm_outbox::{
    DestinationCheck, Message, NatsPublisher, NewMessage, PublishErrorKind, Publisher, Relay, RelayError,
    entity::Status,
};

use crate::support::{
    Kind, TestDatabase, eventually,
    nats::{TestStream, connect, unique},
    on_database, on_each_database,
    rows::{count, enqueue, rows},
    servers, test, within,
};

pub(crate) fn tests() -> Vec<Trial> {
    let mut tests = vec![
        test("nats::a_message_arrives_as_it_was_enqueued", arrives),
        test("nats::a_repeat_is_acknowledged_as_a_duplicate", duplicate),
        test("nats::a_subject_without_a_stream_is_a_configuration_error", no_stream),
        test("nats::a_subject_that_only_a_subscriber_takes_is_a_configuration_error", swallowed),
        test("nats::what_the_limits_of_a_stream_refuse_is_told_apart", stream_limits),
        test("nats::another_stream_than_expected_is_a_configuration_error", expected_stream),
        test("nats::a_message_above_the_limit_of_the_server_is_a_permanent_error", too_large),
        test("nats::a_subject_that_would_be_stored_as_a_wildcard_is_refused", wildcard),
        test("nats::core_publishes_are_confirmed_by_a_round_trip", core),
        test("nats::a_server_that_is_gone_is_unavailable", gone),
        test("nats::a_stream_is_made_or_found_as_good_and_never_changed", ensures),
    ];
    tests.extend(on_each_database("nats::a_destination_that_breaks_the_promises_is_named", destination));
    tests.extend(on_each_database("nats::a_topic_goes_on_once_its_stream_exists", stream_comes_later));
    tests.push(on_database(
        Kind::Postgres,
        "nats::a_server_that_restarts_costs_no_attempt_and_loses_nothing",
        restart,
    ));
    tests
}

fn message(topic: &str) -> Message {
    NewMessage::bytes(topic, "text/plain", "x").into_message()
}

async fn arrives() {
    let stream = TestStream::create().await;
    let topic = stream.topic("orders.created");
    let sent = NewMessage::json(&topic, &serde_json::json!({"order": 4711}))
        .unwrap()
        .aggregate("order", 4711)
        .event_type("order-created")
        .header("tenant", "acme ü")
        .into_message();
    let publisher = NatsPublisher::jetstream(stream.client.clone()).with_expected_stream(&stream.name);
    assert!(!publisher.publish(&sent).await.unwrap().is_duplicate());
    let stored = stream.messages().await.remove(0);
    assert_eq!((stored.id, stored.subject), (sent.id().to_string(), topic));
    assert_eq!(stored.payload, br#"{"order":4711}"#);
    for (name, value) in [
        ("Content-Type", "application/json"),
        ("Outbox-Event-Type", "order-created"),
        ("Outbox-Aggregate-Type", "order"),
        ("Outbox-Aggregate-Id", "4711"),
        ("tenant", "acme ü"),
    ] {
        assert_eq!(stored.headers.get(name).map(String::as_str), Some(value), "{name}");
    }
}

async fn duplicate() {
    let stream = TestStream::create().await;
    let publisher = NatsPublisher::jetstream(stream.client.clone());
    let message = message(&stream.topic("x"));
    assert!(!publisher.publish(&message).await.unwrap().is_duplicate());
    assert!(publisher.publish(&message).await.unwrap().is_duplicate());
    assert_eq!(stream.count().await, 1);
}

async fn no_stream() {
    let publisher = NatsPublisher::jetstream(connect(&servers::nats_url()).await);
    let topic = unique("nobody");
    let error = publisher.publish(&message(&topic)).await.unwrap_err();
    assert_eq!(error.kind(), PublishErrorKind::Configuration);
    assert!(error.to_string().contains(&topic) && error.to_string().contains("nats stream add"), "{error}");
}

/// Without a subscriber the server says at once that nobody is there; with one there is silence.
async fn swallowed() {
    let client = connect(&servers::nats_url()).await;
    let topic = unique("swallowed");
    let _subscriber = client.subscribe(topic.clone()).await.unwrap();
    client.flush().await.unwrap();
    let publisher = NatsPublisher::jetstream(client).with_ack_timeout(Duration::from_millis(500));
    let error = publisher.publish(&message(&topic)).await.unwrap_err();
    assert_eq!(error.kind(), PublishErrorKind::Configuration, "{error}");
    assert!(error.to_string().contains("no stream takes"), "{error}");
}

async fn stream_limits() {
    let stream = TestStream::create().await;
    let context = jetstream::new(stream.client.clone());
    let config = jetstream::stream::Config {
        name: stream.name.clone(),
        subjects: vec![format!("{}.>", stream.prefix)],
        max_message_size: 1_000,
        max_messages: 1,
        discard: jetstream::stream::DiscardPolicy::New,
        ..Default::default()
    };
    context.update_stream(config).await.unwrap();
    let publisher = NatsPublisher::jetstream(stream.client.clone());
    let large = NewMessage::bytes(stream.topic("x"), "text/plain", vec![0; 2_000]).into_message();
    let error = publisher.publish(&large).await.unwrap_err();
    assert_eq!(error.kind(), PublishErrorKind::Permanent, "{error}");
    publisher.publish(&message(&stream.topic("x"))).await.unwrap();
    let error = publisher.publish(&message(&stream.topic("x"))).await.unwrap_err();
    assert_eq!(error.kind(), PublishErrorKind::Configuration, "{error}");
}

async fn expected_stream() {
    let stream = TestStream::create().await;
    let publisher = NatsPublisher::jetstream(stream.client.clone()).with_expected_stream("ANOTHER");
    let error = publisher.publish(&message(&stream.topic("x"))).await.unwrap_err();
    assert_eq!(error.kind(), PublishErrorKind::Configuration, "{error}");
    assert_eq!(stream.count().await, 0);
}

async fn too_large() {
    let stream = TestStream::create().await;
    let limit = stream.client.max_payload();
    let overhead = message(&stream.topic("x")).wire_size() - 1;
    let of_size =
        |bytes: usize| NewMessage::bytes(stream.topic("x"), "text/plain", vec![0; bytes]).into_message();
    for publisher in
        [NatsPublisher::jetstream(stream.client.clone()), NatsPublisher::core(stream.client.clone())]
    {
        let error = publisher.publish(&of_size(limit - overhead + 1)).await.unwrap_err();
        assert_eq!(error.kind(), PublishErrorKind::Permanent, "{publisher:?}: {error}");
        assert!(error.to_string().contains(&format!("({} > {limit})", limit + 1)), "{error}");
        // What the outbox reckons is what the server counts.
        let fits = of_size(limit - overhead);
        assert_eq!(fits.wire_size(), limit);
        publisher.publish(&fits).await.unwrap();
    }
}

async fn wildcard() {
    let stream = TestStream::create().await;
    for publisher in
        [NatsPublisher::jetstream(stream.client.clone()), NatsPublisher::core(stream.client.clone())]
    {
        for topic in ["*", "a b", ">", "a\nb", "a..b", "a."] {
            let error = publisher.publish(&message(&stream.topic(topic))).await.unwrap_err();
            assert_eq!(error.kind(), PublishErrorKind::Permanent, "{topic:?}");
        }
    }
    assert_eq!(stream.count().await, 0);
}

async fn core() {
    let client = connect(&servers::nats_url()).await;
    let topic = unique("core");
    let mut subscriber = client.subscribe(topic.clone()).await.unwrap();
    let publisher = NatsPublisher::core(connect(&servers::nats_url()).await);
    let sent = message(&topic);
    publisher.publish(&sent).await.unwrap();
    let received = within(Duration::from_secs(5), "the message", subscriber.next()).await.unwrap();
    assert_eq!(&received.payload[..], b"x");
    let id = received.headers.unwrap().get("Nats-Msg-Id").unwrap().to_string();
    assert_eq!(id, sent.id().to_string());
    // Nobody needs to listen.
    publisher.publish(&message(&unique("core"))).await.unwrap();
}

async fn gone() {
    let server = servers::OwnNats::start().await;
    let client = connect(&server.url).await;
    for publisher in [NatsPublisher::jetstream(client.clone()), NatsPublisher::core(client.clone())] {
        server.stop().await;
        eventually("the loss to be noticed", || async { (!publisher.is_connected()).then_some(()) }).await;
        let error = publisher.publish(&message("x")).await.unwrap_err();
        assert_eq!(error.kind(), PublishErrorKind::Unavailable, "{error}");
        // It was not even given to the client, which would send it after reconnecting.
        assert_eq!(error.to_string(), "not connected to NATS");
        server.start_again().await;
        eventually("the connection to be back", || async { publisher.is_connected().then_some(()) }).await;
    }
    // Frozen: connected, but no answer at all comes.
    server.pause().await;
    for publisher in [NatsPublisher::jetstream(client.clone()), NatsPublisher::core(client.clone())] {
        let publisher = publisher.with_ack_timeout(Duration::from_millis(300));
        let error = publisher.publish(&message("x")).await.unwrap_err();
        assert_eq!(error.kind(), PublishErrorKind::Unavailable, "{error}");
    }
    server.unpause().await;
    server.remove().await;
}

async fn stream_comes_later(database: TestDatabase) {
    let url = servers::nats_url();
    let client = connect(&url).await;
    let prefix = unique("later");
    enqueue(&database.db, &format!("{prefix}.x"), 3).await;
    let relay = Relay::builder(database.db.clone(), NatsPublisher::jetstream(client.clone()))
        .poll_every(Duration::from_millis(20))
        .rest(Duration::from_millis(200))
        .build()
        .unwrap()
        .spawn();
    eventually("the rows to say why they rest", || async {
        let rows = rows(&database.db).await;
        let explained = rows.iter().filter(|row| {
            row.status == Status::Pending
                && row.attempts == 0
                && row.last_error.as_deref().is_some_and(|error| error.contains("no stream takes"))
        });
        (explained.count() == 3).then_some(())
    })
    .await;
    let config = jetstream::stream::Config {
        name: prefix.to_uppercase(),
        subjects: vec![format!("{prefix}.>")],
        ..Default::default()
    };
    let context = jetstream::new(client);
    context.create_stream(config).await.unwrap();
    eventually("the rows to be sent", || async {
        (count(&database.db, Status::Sent).await == 3).then_some(())
    })
    .await;
    relay.shutdown().await.unwrap();
    context.delete_stream(prefix.to_uppercase()).await.unwrap();
    assert!(rows(&database.db).await.iter().all(|row| row.attempts == 1));
}

async fn restart(database: TestDatabase) {
    const MESSAGES: usize = 2_000;
    let server = servers::OwnNats::start().await;
    let client = connect(&server.url).await;
    let context = jetstream::new(client.clone());
    let config = jetstream::stream::Config {
        name: "RESTART".to_owned(),
        subjects: vec!["restart.>".to_owned()],
        ..Default::default()
    };
    context.create_stream(config).await.unwrap();
    let publisher = Arc::new(NatsPublisher::jetstream(client).with_ack_timeout(Duration::from_secs(1)));
    let relay = Relay::builder(database.db.clone(), publisher)
        .poll_every(Duration::from_millis(20))
        .batch_size(100)
        .max_in_flight(50)
        .build()
        .unwrap()
        .spawn();
    for stop in [false, true, false, true, false] {
        let before = count(&database.db, Status::Sent).await;
        if stop {
            server.stop().await;
        }
        enqueue(&database.db, "restart.x", MESSAGES / 5).await;
        if stop {
            server.start_again().await;
        }
        eventually("the relay to go on", || async {
            (count(&database.db, Status::Sent).await > before).then_some(())
        })
        .await;
    }
    eventually("everything to be sent", || async {
        (count(&database.db, Status::Sent).await == MESSAGES).then_some(())
    })
    .await;
    let report = relay.shutdown().await.unwrap();
    assert_eq!(report.failed, 0, "{report}");
    let mut stream = context.get_stream("RESTART").await.unwrap();
    assert_eq!(stream.info().await.unwrap().state.messages, MESSAGES as u64);
    // Only a message that was alone in flight when the connection broke may be charged: one for each stop.
    let charged = rows(&database.db).await.iter().filter(|row| row.attempts > 1).count();
    assert!(charged <= 2, "{charged} messages were charged for an outage");
    server.remove().await;
}

/// A stream of a test without the settings that the others share.
fn bare_stream(prefix: &str, duplicate_window: Duration) -> jetstream::stream::Config {
    jetstream::stream::Config {
        name: prefix.to_uppercase(),
        subjects: vec![format!("{prefix}.>")],
        duplicate_window,
        ..Default::default()
    }
}

async fn ensures() {
    let client = connect(&servers::nats_url()).await;
    let (publisher, context) = (NatsPublisher::jetstream(client.clone()), jetstream::new(client));
    let prefix = unique("ensured");
    let minute = bare_stream(&prefix, Duration::from_secs(60));
    publisher.ensure_stream(minute.clone()).await.unwrap();
    publisher.ensure_stream(minute.clone()).await.unwrap();
    let longer = bare_stream(&prefix, Duration::from_secs(600));
    let mut wider = minute.clone();
    wider.subjects.push(format!("{prefix}-more.>"));
    for (other, said) in [(longer, "drops repeats within 60s, not 600s"), (wider, "does not take")] {
        let error = publisher.ensure_stream(other).await.unwrap_err();
        assert_eq!(error.kind(), PublishErrorKind::Configuration);
        assert!(
            error.to_string().contains(said) && error.to_string().contains("nats stream edit"),
            "{error}"
        );
    }
    let config = context.get_stream(prefix.to_uppercase()).await.unwrap().cached_info().config.clone();
    assert_eq!((config.subjects, config.duplicate_window), (minute.subjects, minute.duplicate_window));
    context.delete_stream(prefix.to_uppercase()).await.unwrap();
}

/// What a relay says at its start, and that it does not start where it is to refuse.
async fn destination(database: TestDatabase) {
    let client = connect(&servers::nats_url()).await;
    let context = jetstream::new(client.clone());
    let prefix = unique("checked");
    let topic = format!("{prefix}.x");
    enqueue(&database.db, &topic, 2).await;
    let relay = |publisher: NatsPublisher| {
        let builder = Relay::builder(database.db.clone(), publisher).poll_every(Duration::from_millis(20));
        builder.destination_check(DestinationCheck::Refuse).build().unwrap()
    };
    let publisher = || NatsPublisher::jetstream(client.clone());
    let faults = async |publisher| relay(publisher).check_destination().await.unwrap().join("; ");

    let said = faults(publisher()).await;
    assert!(said.contains("no stream takes") && said.contains(&topic), "{said}");
    let said = faults(publisher().with_expected_stream(prefix.to_uppercase())).await;
    assert!(said.contains(&format!("nats stream add {}", prefix.to_uppercase())), "{said}");

    let mut config = bare_stream(&prefix, Duration::from_secs(120));
    context.create_stream(config.clone()).await.unwrap();
    // Five times lease, sweep interval and publish timeout, and the backoffs: 5 × 40 s + 15 s.
    let said = faults(publisher()).await;
    assert!(
        said.contains(&format!("nats stream edit {} --dupe-window 215s", prefix.to_uppercase())),
        "{said}"
    );
    let said = faults(publisher().with_expected_stream("ANOTHER")).await;
    assert!(said.contains("ANOTHER is expected"), "{said}");
    let error = relay(publisher()).run(std::future::pending()).await.unwrap_err();
    assert!(matches!(&error, RelayError::Destination(faults) if faults.len() == 1), "{error}");
    assert_eq!(count(&database.db, Status::Pending).await, 2);

    config.duplicate_window = Duration::from_secs(215);
    context.update_stream(config.clone()).await.unwrap();
    assert_eq!(faults(publisher()).await, "");
    let handle = relay(publisher()).spawn();
    eventually("the rows to be sent", || async {
        (count(&database.db, Status::Sent).await == 2).then_some(())
    })
    .await;
    handle.shutdown().await.unwrap();
    context.delete_stream(prefix.to_uppercase()).await.unwrap();

    config.no_ack = true;
    enqueue(&database.db, &topic, 1).await;
    context.create_stream(config).await.unwrap();
    let said = faults(publisher()).await;
    assert!(said.contains("acknowledges nothing"), "{said}");
    context.delete_stream(prefix.to_uppercase()).await.unwrap();
}
