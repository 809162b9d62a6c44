//! JetStream: stored, acknowledged, and repeats dropped by message id.

use std::{future::IntoFuture, time::Duration};

use async_nats::{
    Client,
    jetstream::{
        self,
        context::{ContextBuilder, GetStreamByNameErrorKind, PublishErrorKind as Kind},
        message::PublishMessage,
    },
};

use tokio::time::{Instant, timeout_at};

use super::{
    DEFAULT_ACK_TIMEOUT,
    connection::{Before, Connection},
    elections::Elections,
    headers, stream, subject,
};
use crate::{
    message::Message,
    publisher::{Ack, PublishError},
};

/// The client's own limit of messages in flight; the relay's is the one that counts.
const MAX_IN_FLIGHT: usize = 65_536;

pub(super) struct JetStream {
    context: jetstream::Context,
    ack_timeout: Duration,
    connection: Connection,
    expected_stream: Option<String>,
    elections: Elections,
}

impl JetStream {
    pub(super) fn new(client: Client) -> Self {
        Self {
            context: context(&client, DEFAULT_ACK_TIMEOUT),
            ack_timeout: DEFAULT_ACK_TIMEOUT,
            connection: Connection::new(client),
            expected_stream: None,
            elections: Elections::default(),
        }
    }

    pub(super) fn set_ack_timeout(&mut self, limit: Duration) {
        self.context = context(&self.connection.client, limit);
        self.ack_timeout = limit;
    }

    pub(super) fn set_expected_stream(&mut self, stream: String) {
        self.expected_stream = Some(stream);
    }

    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }

    pub(super) async fn publish(&self, message: &Message) -> Result<Ack, PublishError> {
        let before = self.connection.begin()?;
        let subject = subject(message)?;
        let mut publish =
            PublishMessage::build().payload(message.payload().clone()).headers(headers(message)?);
        if let Some(stream) = &self.expected_stream {
            publish = publish.expected_stream(stream);
        }
        let sent = self.context.send_publish(subject, publish).await;
        let acknowledged = match sent {
            Ok(ack) => ack.into_future().await,
            Err(error) => Err(error),
        };
        match acknowledged {
            Ok(ack) => {
                self.connection.answered();
                Ok(if ack.duplicate { Ack::duplicate() } else { Ack::new() })
            }
            Err(error) => Err(self.explain(message, &before, error).await),
        }
    }

    pub(super) async fn check(
        &self,
        topics: &[String],
        repeats_within: Duration,
    ) -> Result<Vec<String>, PublishError> {
        stream::faults(&self.context, topics, self.expected_stream.as_deref(), repeats_within).await
    }

    pub(super) async fn ensure_stream(&self, config: jetstream::stream::Config) -> Result<(), PublishError> {
        stream::ensure(&self.context, config).await
    }

    async fn explain(
        &self,
        message: &Message,
        before: &Before,
        error: jetstream::context::PublishError,
    ) -> PublishError {
        match error.kind() {
            Kind::TimedOut => self.no_answer(message, before).await,
            Kind::StreamNotFound => self.no_stream(message).await,
            Kind::MaxPayloadExceeded => {
                let expected = self
                    .expected_stream
                    .as_ref()
                    .map_or(0, |stream| "Nats-Expected-Stream: \r\n".len() + stream.len());
                let (size, limit) = (message.wire_size() + expected, self.connection.client.max_payload());
                PublishError::permanent(format!("payload too large ({size} > {limit})"))
            }
            Kind::BrokenPipe | Kind::MaxAckPending => {
                PublishError::unavailable("the NATS client is closing or overloaded")
            }
            _ => self.refused(&error),
        }
        .with_source(error)
    }

    /// No acknowledgement came in time. Whose fault is it?
    ///
    /// If the connection broke, or the server answers nothing at all, it is an outage. If the server answers and
    /// knows the stream, and kept acknowledging others meanwhile, the message is charged; unless another server may
    /// have become the stream's leader, since what the one before had not stored by then is lost without a word.
    async fn no_answer(&self, message: &Message, before: &Before) -> PublishError {
        const WHAT: &str = "JetStream's acknowledgement";
        if !self.connection.held(before) {
            return Connection::lost(WHAT);
        }
        let answered_others = self.connection.answered_since(before);
        let until = self.patience();
        match self.stream_of(message.topic(), until).await {
            Stream::Known(stream) if answered_others => {
                let asked = self.elections.none_since(&self.context, &stream, before.began);
                match timeout_at(until, asked).await {
                    Ok(Ok(true)) => PublishError::transient(format!("{WHAT} did not come in time")),
                    Ok(Ok(false)) => PublishError::configuration(format!(
                        "{WHAT} did not come in time: the stream {stream} may have had an election meanwhile"
                    )),
                    Ok(Err(_)) | Err(_) => PublishError::configuration(no_leader(&stream)),
                }
            }
            Stream::Known(stream) => PublishError::configuration(format!(
                "the stream {stream} takes the subject {:?} and does not acknowledge: it has no leader at the \
                 moment, or these credentials may not publish there",
                message.topic()
            )),
            Stream::None => PublishError::configuration(no_stream_takes(message.topic())),
            Stream::Silence(_) if !self.connection.held(before) => Connection::lost(WHAT),
            Stream::Silence(error) => {
                PublishError::unavailable(format!("neither {WHAT} nor another answer came in time: {error}"))
            }
        }
    }

    /// Nobody took the subject. A missing stream, one without a leader and JetStream being off look the same.
    async fn no_stream(&self, message: &Message) -> PublishError {
        match self.stream_of(message.topic(), self.patience()).await {
            Stream::Known(stream) => PublishError::configuration(no_leader(&stream)),
            Stream::None => PublishError::configuration(no_stream_takes(message.topic())),
            Stream::Silence(error) => PublishError::unavailable(format!(
                "JetStream does not answer: {error}; is it switched on (`nats-server -js`)?"
            )),
        }
    }

    /// Until when the server is asked for reasons: a part of the time that a publish has.
    fn patience(&self) -> Instant {
        Instant::now() + self.ack_timeout / 5
    }

    /// Asks the server which stream takes the subject.
    async fn stream_of(&self, topic: &str, until: Instant) -> Stream {
        let asked = timeout_at(until, self.context.stream_by_subject(topic)).await;
        match asked {
            Ok(Ok(stream)) => Stream::Known(stream),
            Ok(Err(error)) if error.kind() == GetStreamByNameErrorKind::NotFound => Stream::None,
            Ok(Err(error)) => Stream::Silence(error.to_string()),
            Err(_) => Stream::Silence("no answer".to_owned()),
        }
    }

    /// What the server said in its answer, by JetStream's error codes.
    fn refused(&self, error: &jetstream::context::PublishError) -> PublishError {
        let source = std::error::Error::source(error);
        let Some(answer) = source.and_then(|source| source.downcast_ref::<jetstream::Error>()) else {
            return match source.and_then(|source| source.downcast_ref::<serde_json::Error>()) {
                Some(_) => PublishError::configuration(format!(
                    "something other than JetStream answers on this subject: {error}"
                )),
                // The client could not send.
                None => PublishError::unavailable(format!("NATS: {error}")),
            };
        };
        self.connection.answered();
        let reason = format!("JetStream refused: {answer}");
        match answer.error_code().0 {
            // Larger than the stream takes; headers larger than the server takes.
            10054 | 10097 => PublishError::permanent(reason),
            // Another stream than the one expected; the stream is full or sealed or has no leader; JetStream has
            // no room left, or is not switched on for this account.
            10060 | 10077 | 10109 | 10008 | 10009 | 10023 | 10047 | 10039 | 10076 => {
                PublishError::configuration(reason)
            }
            // Too many requests, and whatever else is the state of the server.
            10167 => PublishError::unavailable(reason),
            _ if matches!(answer.code(), 429 | 503) => PublishError::unavailable(reason),
            _ => PublishError::transient(reason),
        }
    }
}

/// Which stream takes a subject.
enum Stream {
    Known(String),
    None,
    /// The server did not say.
    Silence(String),
}

pub(super) fn no_stream_takes(topic: &str) -> String {
    format!(
        "no stream takes the subject {topic:?}: create one, for example with \
         `nats stream add NAME --subjects '{topic}'`, or add the subject to an existing one"
    )
}

fn no_leader(stream: &str) -> String {
    format!("the stream {stream} has no leader at the moment")
}

fn context(client: &Client, ack_timeout: Duration) -> jetstream::Context {
    ContextBuilder::new()
        .timeout(ack_timeout)
        .ack_timeout(ack_timeout)
        .max_ack_inflight(MAX_IN_FLIGHT)
        .backpressure_on_inflight(true)
        .build(client.clone())
}
