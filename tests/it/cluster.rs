//! Streams of three replicas: another server becomes the leader, and servers die.

use std::{collections::HashSet, sync::Arc, time::Duration};

use async_nats::{
    Client,
    jetstream::{self, stream},
};
use futures_util::StreamExt;
use libtest_mimic::Trial;
use sea_orm_outbox::{NatsPublisher, Relay, RelayHandle, entity::Status};
use tokio::time::{sleep, timeout};

use crate::support::{
    Kind, TestDatabase, eventually, eventually_within, on_database,
    rows::{count, enqueue, rows},
    servers::NatsCluster,
};

const STREAM: &str = "CLUSTER";
const TOPIC: &str = "cluster.x";

pub(crate) fn tests() -> Vec<Trial> {
    vec![
        on_database(
            Kind::Postgres,
            "cluster::elections_of_a_leader_cost_no_attempt_and_lose_nothing",
            elections,
        ),
        on_database(
            Kind::Postgres,
            "cluster::a_leader_that_is_killed_costs_no_attempt_and_loses_nothing",
            killed,
        ),
    ]
}

async fn connect(urls: &[String]) -> Client {
    async_nats::ConnectOptions::new()
        .ping_interval(Duration::from_secs(2))
        .ignore_discovered_servers()
        .connect(urls)
        .await
        .expect("the cluster answers")
}

/// The stream as a test sees and disturbs it, through a connection of its own.
struct Replicated {
    client: Client,
    context: jetstream::Context,
}

impl Replicated {
    async fn create(cluster: &NatsCluster) -> Self {
        let client = connect(&cluster.urls).await;
        let context = jetstream::new(client.clone());
        let config = stream::Config {
            name: STREAM.to_owned(),
            subjects: vec![TOPIC.to_owned()],
            num_replicas: 3,
            // Longer than repeats can come.
            duplicate_window: Duration::from_secs(3_600),
            ..Default::default()
        };
        eventually_within(Duration::from_secs(60), "the cluster to be of use", || async {
            context.create_stream(config.clone()).await.ok().map(|_| ())
        })
        .await;
        Self { client, context }
    }

    async fn info(&self) -> stream::Info {
        eventually("the stream to answer", || async {
            let asked = timeout(Duration::from_secs(2), self.context.get_stream(STREAM)).await;
            asked.ok()?.ok().map(|stream| stream.cached_info().clone())
        })
        .await
    }

    /// The name of the server that leads the stream.
    async fn leader(&self) -> String {
        eventually("the stream to have a leader", || async { self.info().await.cluster?.leader }).await
    }

    /// Has another server become the leader.
    async fn step_down(&self) {
        let subject = format!("$JS.API.STREAM.LEADER.STEPDOWN.{STREAM}");
        let answer = eventually("the leader to step down", || async {
            self.client.request(subject.clone(), Default::default()).await.ok()
        })
        .await;
        let answer = String::from_utf8_lossy(&answer.payload).into_owned();
        assert!(answer.contains("\"success\":true"), "{answer}");
    }

    /// The ids of all messages in the stream.
    async fn ids(&self) -> Vec<String> {
        let count = self.info().await.state.messages;
        let stream = self.context.get_stream(STREAM).await.unwrap();
        let consumer = stream
            .create_consumer(jetstream::consumer::pull::OrderedConfig::default())
            .await
            .expect("a consumer is created");
        let messages = consumer.messages().await.unwrap().take(count as usize);
        messages
            .map(|message| {
                let headers = message.unwrap().headers.clone().unwrap();
                headers.get("Nats-Msg-Id").unwrap().to_string()
            })
            .collect()
            .await
    }
}

async fn relay(database: &TestDatabase, client: Client) -> RelayHandle {
    let publisher = NatsPublisher::jetstream(client).with_ack_timeout(Duration::from_secs(1));
    Relay::builder(database.db.clone(), Arc::new(publisher))
        .poll_every(Duration::from_millis(20))
        .batch_size(100)
        .max_in_flight(50)
        .build()
        .unwrap()
        .spawn()
}

/// Writes messages until the disturbance is over; how many.
async fn enqueue_during(database: &TestDatabase, disturbance: impl Future<Output = ()>) -> usize {
    tokio::pin!(disturbance);
    let mut messages = 0;
    loop {
        enqueue(&database.db, TOPIC, 50).await;
        messages += 50;
        tokio::select! {
            biased;
            () = &mut disturbance => return messages,
            () = sleep(Duration::from_millis(30)) => {}
        }
    }
}

/// Waits until something more is sent.
async fn until_going_on(database: &TestDatabase) {
    let before = count(&database.db, Status::Sent).await;
    eventually_within(Duration::from_secs(20), "the relay to go on", || async {
        (count(&database.db, Status::Sent).await > before).then_some(())
    })
    .await;
}

async fn check(database: &TestDatabase, stream: &Replicated, messages: usize) {
    eventually_within(Duration::from_secs(60), "everything to be sent", || async {
        (count(&database.db, Status::Sent).await == messages).then_some(())
    })
    .await;
    let rows = rows(&database.db).await;
    let charged: Vec<_> =
        rows.iter().filter(|row| row.attempts != 1).map(|row| (row.attempts, &row.last_error)).collect();
    assert!(charged.is_empty(), "{charged:?}");
    let stored = stream.ids().await;
    let expected: HashSet<String> = rows.iter().map(|row| row.message_id.to_string()).collect();
    assert_eq!(stored.len(), messages, "each once");
    assert_eq!(stored.into_iter().collect::<HashSet<_>>(), expected);
}

async fn elections(database: TestDatabase) {
    let cluster = NatsCluster::start().await;
    let stream = Replicated::create(&cluster).await;
    let relay = relay(&database, connect(&cluster.urls).await).await;
    let disturbance = async {
        for _ in 0..8 {
            until_going_on(&database).await;
            stream.step_down().await;
            until_going_on(&database).await;
        }
    };
    let messages = enqueue_during(&database, disturbance).await;
    check(&database, &stream, messages).await;
    let report = relay.shutdown().await.unwrap();
    assert_eq!((report.retried, report.failed), (0, 0), "{report}");
    cluster.remove().await;
}

async fn killed(database: TestDatabase) {
    let cluster = Arc::new(NatsCluster::start().await);
    let stream = Replicated::create(&cluster).await;
    let database = Arc::new(database);
    let (db, servers) = (database.clone(), cluster.clone());
    let run = async move || {
        let client = connect(&servers.urls).await;
        let relay = relay(&db, client.clone()).await;
        let disturbance = async {
            // First the one that the relay is connected to, then one that it is not.
            for connected in [true, false] {
                until_going_on(&db).await;
                let leader = loop {
                    let leader = stream.leader().await;
                    if (leader == client.server_info().server_name) == connected {
                        break leader;
                    }
                    stream.step_down().await;
                    sleep(Duration::from_millis(300)).await;
                };
                servers.stop(&leader).await;
                until_going_on(&db).await;
                servers.start_again(&leader).await;
                eventually("it to catch up", || async {
                    let replicas = stream.info().await.cluster?.replicas;
                    replicas.iter().all(|replica| replica.current && !replica.offline).then_some(())
                })
                .await;
            }
        };
        let messages = enqueue_during(&db, disturbance).await;
        check(&db, &stream, messages).await;
        assert!(relay.health().is_ready());
        let report = relay.shutdown().await.unwrap();
        assert_eq!((report.retried, report.failed), (0, 0), "{report}");
    };
    run().await;
    if let Some(cluster) = Arc::into_inner(cluster) {
        cluster.remove().await;
    }
}
