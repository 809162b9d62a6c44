//! A message: what is enqueued, what is published, and what is refused.

mod message_id;
mod new_message;
mod validate;

use std::collections::BTreeMap;

use bytes::Bytes;

pub use message_id::MessageId;
pub use new_message::NewMessage;
pub use validate::InvalidMessage;

#[cfg(feature = "nats")]
pub(crate) use validate::validate_topic;
pub(crate) use validate::{DEFAULT_MAX_MESSAGE_BYTES, validate};

/// The name of each header that a message brings along, besides those of its own.
pub mod header {
    /// The message id, by which JetStream recognises a repeat.
    pub const MESSAGE_ID: &str = "Nats-Msg-Id";
    /// How to read the payload.
    pub const CONTENT_TYPE: &str = "Content-Type";
    /// What happened.
    pub const EVENT_TYPE: &str = "Outbox-Event-Type";
    /// The kind of domain object that the message came from.
    pub const AGGREGATE_TYPE: &str = "Outbox-Aggregate-Type";
    /// Which one of them.
    pub const AGGREGATE_ID: &str = "Outbox-Aggregate-Id";
}

/// A message as a [`Publisher`](crate::Publisher) gets it: exactly what was enqueued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub(crate) id: MessageId,
    pub(crate) topic: String,
    pub(crate) aggregate: Option<(String, String)>,
    pub(crate) ordering_key: Option<String>,
    pub(crate) event_type: Option<String>,
    pub(crate) content_type: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) payload: Bytes,
}

impl Message {
    /// The identity: the same in every repeat.
    pub fn id(&self) -> MessageId {
        self.id
    }

    /// The destination: for NATS the subject.
    pub fn topic(&self) -> &str {
        &self.topic
    }

    /// The kind of domain object that the message came from.
    pub fn aggregate_type(&self) -> Option<&str> {
        self.aggregate.as_ref().map(|(kind, _)| kind.as_str())
    }

    /// Which one of them.
    pub fn aggregate_id(&self) -> Option<&str> {
        self.aggregate.as_ref().map(|(_, id)| id.as_str())
    }

    /// Messages with the same key belong in order.
    pub fn ordering_key(&self) -> Option<&str> {
        self.ordering_key.as_deref()
    }

    /// What happened, for consumers that share a topic.
    pub fn event_type(&self) -> Option<&str> {
        self.event_type.as_deref()
    }

    /// How to read the payload.
    pub fn content_type(&self) -> &str {
        &self.content_type
    }

    /// The headers that the application gave.
    pub fn headers(&self) -> &BTreeMap<String, String> {
        &self.headers
    }

    /// The bytes to publish. Cloning them does not copy.
    pub fn payload(&self) -> &Bytes {
        &self.payload
    }

    /// Every header that goes over the wire, the message id first, then those of [`header`], then
    /// those of the application.
    pub fn wire_headers(&self) -> impl Iterator<Item = (&str, String)> {
        let own = [
            (header::MESSAGE_ID, Some(self.id.to_string())),
            (header::CONTENT_TYPE, Some(self.content_type.clone())),
            (header::EVENT_TYPE, self.event_type.clone()),
            (header::AGGREGATE_TYPE, self.aggregate_type().map(str::to_owned)),
            (header::AGGREGATE_ID, self.aggregate_id().map(str::to_owned)),
        ];
        own.into_iter()
            .filter_map(|(name, value)| value.map(|value| (name, value)))
            .chain(self.headers.iter().map(|(name, value)| (name.as_str(), value.clone())))
    }

    /// What the message takes of a NATS server's `max_payload`: headers count as well as the payload.
    pub fn wire_size(&self) -> usize {
        self.wire_header_size() + self.payload.len()
    }

    /// The bytes of the header block: the line `NATS/1.0`, one line for each header, and an empty line; each ends
    /// with two bytes (NATS client protocol, `HPUB`).
    pub(crate) fn wire_header_size(&self) -> usize {
        let headers: usize = self
            .wire_headers()
            .map(|(name, value)| name.len() + ": ".len() + value.len() + "\r\n".len())
            .sum();
        "NATS/1.0\r\n".len() + headers + "\r\n".len()
    }
}
