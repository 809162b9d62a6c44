//! Publishing to NATS: JetStream, which stores and acknowledges, or core NATS, which only passes on.

mod connection;
mod core;
mod elections;
mod jetstream;
mod stream;

use std::{fmt, time::Duration};

use async_nats::{Client, HeaderMap, HeaderName, HeaderValue};

use self::{core::Core, jetstream::JetStream};
use super::{Ack, PublishError, Publisher};
use crate::message::{Message, validate_topic};

const DEFAULT_ACK_TIMEOUT: Duration = Duration::from_secs(4);

/// Publishes to NATS.
///
/// Each message goes out with the headers of [`Message::wire_headers`]: `Nats-Msg-Id`, `Content-Type`,
/// `Outbox-Event-Type`, `Outbox-Aggregate-Type`, `Outbox-Aggregate-Id`, and those of the application.
///
/// The client's own settings decide how a lost connection is noticed and restored. Recommended:
/// `retry_on_initial_connect()` to start before the server does, and a `ping_interval` of about 10 s, since a
/// server that froze is noticed after some three of them.
pub struct NatsPublisher(Mode);

enum Mode {
    JetStream(Box<JetStream>),
    Core(Core),
}

impl NatsPublisher {
    /// Publishes to JetStream and waits for its acknowledgement.
    ///
    /// A stream must take the subject; without one the message rests with a reason that says so. JetStream drops
    /// a repeat within the stream's duplicate window (2 minutes unless set), by the message id; such an
    /// acknowledgement counts as success. An acknowledgement means that the server has stored the message, not
    /// that the disk has it: see the server's `sync_interval`.
    pub fn jetstream(client: Client) -> Self {
        Self(Mode::JetStream(Box::new(JetStream::new(client))))
    }

    /// Publishes to core NATS: whoever listens at that moment gets it, nobody else ever will.
    ///
    /// Success means that the server took the message from the connection, confirmed by a round trip after it;
    /// it does not mean that anybody received it. The round trip is a request on a fresh `_INBOX.` subject, so
    /// the credentials must allow to publish there.
    pub fn core(client: Client) -> Self {
        Self(Mode::Core(Core::new(client)))
    }

    /// How long to wait for the server's acknowledgement. Default: 4 s.
    ///
    /// Keep it at four fifths of the relay's publish timeout (default 5 s) or less: when it is over, the server is
    /// asked for a fifth of this time why, so that an outage is not charged to the message.
    #[must_use]
    pub fn with_ack_timeout(mut self, limit: Duration) -> Self {
        match &mut self.0 {
            Mode::JetStream(jetstream) => jetstream.set_ack_timeout(limit),
            Mode::Core(core) => core.set_ack_timeout(limit),
        }
        self
    }

    /// Lets JetStream refuse messages that another stream than this one would take. Core NATS knows no
    /// streams: there it changes nothing.
    #[must_use]
    pub fn with_expected_stream(mut self, stream: impl Into<String>) -> Self {
        if let Mode::JetStream(jetstream) = &mut self.0 {
            jetstream.set_expected_stream(stream.into());
        }
        self
    }
}

impl NatsPublisher {
    /// Creates a stream, unless there is one with its name that takes its subjects, acknowledges, and drops repeats
    /// for at least as long. An existing stream is never changed. With core NATS it does nothing.
    ///
    /// # Errors
    /// [`Configuration`](super::PublishErrorKind::Configuration) when the existing stream differs, with what to do, or
    /// when the server refuses; [`Unavailable`](super::PublishErrorKind::Unavailable) when it does not answer.
    pub async fn ensure_stream(
        &self,
        config: async_nats::jetstream::stream::Config,
    ) -> Result<(), PublishError> {
        match &self.0 {
            Mode::JetStream(jetstream) => jetstream.ensure_stream(config).await,
            Mode::Core(_) => Ok(()),
        }
    }
}

impl Publisher for NatsPublisher {
    async fn publish(&self, message: &Message) -> Result<Ack, PublishError> {
        match &self.0 {
            Mode::JetStream(jetstream) => jetstream.publish(message).await,
            Mode::Core(core) => core.publish(message).await,
        }
    }

    async fn check(&self, topics: &[String], repeats_within: Duration) -> Result<Vec<String>, PublishError> {
        match &self.0 {
            Mode::JetStream(jetstream) => jetstream.check(topics, repeats_within).await,
            Mode::Core(_) => Ok(Vec::new()),
        }
    }

    fn is_connected(&self) -> bool {
        match &self.0 {
            Mode::JetStream(jetstream) => jetstream.connection().is_up(),
            Mode::Core(core) => core.connection().is_up(),
        }
    }
}

impl fmt::Debug for NatsPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            Mode::JetStream(_) => "NatsPublisher(JetStream)",
            Mode::Core(_) => "NatsPublisher(core)",
        })
    }
}

fn headers(message: &Message) -> Result<HeaderMap, PublishError> {
    let mut headers = HeaderMap::new();
    for (name, value) in message.wire_headers() {
        // The library checks both when a message is enqueued; a row may come from elsewhere.
        let refused =
            |error: String| PublishError::permanent(format!("the header {name:?} cannot be sent: {error}"));
        let value: HeaderValue = value.parse().map_err(|error| refused(format!("{error}")))?;
        let name: HeaderName = name.parse().map_err(|error| refused(format!("{error}")))?;
        headers.insert(name, value);
    }
    Ok(headers)
}

/// The topic, checked as when a message is enqueued: a row may come from elsewhere, and the server would store a
/// message even under a wildcard.
fn subject(message: &Message) -> Result<String, PublishError> {
    let topic = message.topic();
    validate_topic(topic).map_err(|error| PublishError::permanent(error.to_string()))?;
    Ok(topic.to_owned())
}
