//! A stream of its own for one test.

use std::{
    collections::HashMap,
    process,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use async_nats::{
    Client,
    jetstream::{self, consumer::PullConsumer, stream},
};
use futures_util::StreamExt;

use super::servers;

/// A JetStream stream that takes every subject under [`prefix`](Self::prefix).
pub(crate) struct TestStream {
    pub(crate) client: Client,
    pub(crate) url: String,
    pub(crate) name: String,
    /// The first token of every subject.
    pub(crate) prefix: String,
    stream: stream::Stream,
}

/// A message in the stream.
pub(crate) struct Stored {
    pub(crate) id: String,
    pub(crate) subject: String,
    pub(crate) headers: HashMap<String, String>,
    pub(crate) payload: Vec<u8>,
}

impl TestStream {
    pub(crate) async fn create() -> Self {
        let url = servers::nats_url();
        let client = connect(&url).await;
        let prefix = unique("test");
        let name = prefix.to_uppercase();
        let stream = jetstream::new(client.clone())
            .create_stream(stream::Config {
                name: name.clone(),
                subjects: vec![format!("{prefix}.>")],
                // Longer than repeats can come.
                duplicate_window: Duration::from_secs(3_600),
                ..Default::default()
            })
            .await
            .expect("the stream is created");
        Self { client, url, name, prefix, stream }
    }

    pub(crate) fn topic(&self, rest: &str) -> String {
        format!("{}.{rest}", self.prefix)
    }

    /// How many messages the stream holds.
    pub(crate) async fn count(&self) -> u64 {
        self.stream.get_info().await.expect("the stream answers").state.messages
    }

    /// Everything in the stream, oldest first.
    pub(crate) async fn messages(&self) -> Vec<Stored> {
        let count = self.count().await;
        let consumer: PullConsumer = self
            .stream
            .create_consumer(jetstream::consumer::pull::Config {
                ack_policy: jetstream::consumer::AckPolicy::None,
                inactive_threshold: Duration::from_secs(60),
                ..Default::default()
            })
            .await
            .expect("a consumer is created");
        let mut messages = consumer.messages().await.expect("the consumer answers");
        let mut stored = Vec::new();
        while (stored.len() as u64) < count {
            let message = super::within(Duration::from_secs(10), "a stored message", messages.next())
                .await
                .expect("the consumer goes on")
                .expect("a message arrives");
            let headers: HashMap<String, String> = message
                .headers
                .iter()
                .flat_map(|headers| headers.iter())
                .map(|(name, values)| (name.to_string(), values[0].to_string()))
                .collect();
            stored.push(Stored {
                id: headers.get("Nats-Msg-Id").cloned().unwrap_or_default(),
                subject: message.subject.to_string(),
                headers,
                payload: message.payload.to_vec(),
            });
        }
        stored
    }
}

impl Drop for TestStream {
    /// Leaves nothing behind on a server that outlives the test, also when the test panics.
    fn drop(&mut self) {
        let (url, name) = (self.url.clone(), self.name.clone());
        let deleting = std::thread::spawn(move || {
            super::runtime().block_on(async {
                let context = jetstream::new(connect(&url).await);
                // A test may have deleted it itself.
                let _ = context.delete_stream(&name).await;
            });
        });
        let _ = deleting.join();
    }
}

pub(crate) async fn connect(url: &str) -> Client {
    async_nats::ConnectOptions::new()
        .ping_interval(Duration::from_secs(2))
        .connect(url)
        .await
        .expect("NATS answers")
}

/// A name that no other test has.
pub(crate) fn unique(what: &str) -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    format!("{what}_{}_{}", process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}
