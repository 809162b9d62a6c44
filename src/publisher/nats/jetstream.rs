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

use super::{
    connection::{Before, Connection},
    headers, subject,
};
use crate::{
    message::Message,
    publisher::{Ack, PublishError},
};

/// The client's own limit of messages in flight; the relay's is the one that counts.
const MAX_IN_FLIGHT: usize = 65_536;

pub(super) struct JetStream {
    context: jetstream::Context,
    connection: Connection,
    expected_stream: Option<String>,
}

impl JetStream {
    pub(super) fn new(client: Client) -> Self {
        Self {
            context: context(&client, Duration::from_secs(4)),
            connection: Connection::new(client),
            expected_stream: None,
        }
    }

    pub(super) fn set_ack_timeout(&mut self, limit: Duration) {
        self.context = context(&self.connection.client, limit);
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

    async fn explain(
        &self,
        message: &Message,
        before: &Before,
        error: jetstream::context::PublishError,
    ) -> PublishError {
        match error.kind() {
            Kind::TimedOut => {
                self.connection.no_answer(before, "JetStream's acknowledgement").with_source(error)
            }
            Kind::StreamNotFound => {
                self.connection.answered();
                self.no_stream(message).await.with_source(error)
            }
            Kind::MaxPayloadExceeded => {
                let limit = self.connection.client.max_payload();
                PublishError::permanent(format!("payload too large ({} > {limit})", message.wire_size()))
                    .with_source(error)
            }
            Kind::BrokenPipe | Kind::MaxAckPending => {
                PublishError::unavailable("the NATS client is closing or overloaded").with_source(error)
            }
            _ => self.refused(error),
        }
    }

    /// What the server said in its answer, by JetStream's error codes.
    fn refused(&self, error: jetstream::context::PublishError) -> PublishError {
        let answer = std::error::Error::source(&error)
            .and_then(|source| source.downcast_ref::<jetstream::Error>())
            .cloned();
        let Some(answer) = answer else {
            // Not an answer at all: the client could not send.
            return PublishError::unavailable(format!("NATS: {error}")).with_source(error);
        };
        self.connection.answered();
        let reason = format!("JetStream refused: {answer}");
        match answer.error_code().0 {
            // The message is larger than the stream takes.
            10054 => PublishError::permanent(reason),
            // Another stream than the one expected; the stream is full or sealed; JetStream has no room left,
            // or is not switched on for this account.
            10060 | 10077 | 10109 | 10023 | 10047 | 10039 | 10076 => PublishError::configuration(reason),
            // No leader at the moment.
            10008 | 10009 => PublishError::unavailable(reason),
            _ => PublishError::transient(reason),
        }
        .with_source(error)
    }

    /// Nobody took the subject. A missing stream and one without a leader look the same, so ask.
    async fn no_stream(&self, message: &Message) -> PublishError {
        let topic = message.topic();
        match self.context.stream_by_subject(topic).await {
            Ok(stream) => {
                PublishError::unavailable(format!("the stream {stream} does not answer at the moment"))
            }
            Err(error) if error.kind() == GetStreamByNameErrorKind::NotFound => {
                PublishError::configuration(format!(
                    "no stream takes the subject {topic:?}: create one, for example with \
                     `nats stream add --subjects '{topic}'`, or add the subject to an existing one"
                ))
            }
            Err(error) if self.connection.is_up() => PublishError::configuration(format!(
                "no stream takes the subject {topic:?}, and JetStream does not say why: {error}; \
                 is JetStream switched on (`nats-server -js`)?"
            )),
            Err(error) => PublishError::unavailable(format!("JetStream does not answer: {error}")),
        }
    }
}

fn context(client: &Client, ack_timeout: Duration) -> jetstream::Context {
    ContextBuilder::new()
        .timeout(ack_timeout)
        .ack_timeout(ack_timeout)
        .max_ack_inflight(MAX_IN_FLIGHT)
        .backpressure_on_inflight(true)
        .build(client.clone())
}
