use std::{collections::BTreeMap, fmt, time::Duration};

use bytes::Bytes;
use serde::Serialize;
use uuid::Uuid;

use super::{Message, MessageId};

/// A message to enqueue.
///
/// Nothing is checked until it is given to [`Outbox::enqueue`](crate::Outbox::enqueue), which refuses
/// what could not be published, see [`InvalidMessage`](crate::InvalidMessage).
///
/// ```
/// use std::time::Duration;
/// use sea_orm_outbox::NewMessage;
///
/// #[derive(serde::Serialize)]
/// struct OrderCreated { order: i64 }
///
/// let message = NewMessage::json("orders.created", &OrderCreated { order: 4711 })?
///     .aggregate("order", 4711)
///     .event_type("order-created")
///     .header("tenant", "acme")
///     .delay(Duration::from_secs(60));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a message does nothing until it is enqueued"]
pub struct NewMessage {
    message: Message,
    id: Option<MessageId>,
    delay: Duration,
}

impl NewMessage {
    /// A message whose payload is `value` as JSON, with the content type `application/json`.
    ///
    /// # Errors
    /// When `value` cannot be serialized.
    pub fn json<T: Serialize + ?Sized>(
        topic: impl Into<String>,
        value: &T,
    ) -> Result<Self, serde_json::Error> {
        Ok(Self::bytes(topic, "application/json", serde_json::to_vec(value)?))
    }

    /// A message whose payload is published exactly as given.
    pub fn bytes(
        topic: impl Into<String>,
        content_type: impl Into<String>,
        payload: impl Into<Bytes>,
    ) -> Self {
        Self {
            message: Message {
                // Made when it is enqueued: a clone is another message.
                id: MessageId::from(Uuid::nil()),
                topic: topic.into(),
                aggregate: None,
                ordering_key: None,
                event_type: None,
                content_type: content_type.into(),
                headers: BTreeMap::new(),
                payload: payload.into(),
            },
            id: None,
            delay: Duration::ZERO,
        }
    }

    /// The domain object that the message came from, say `("order", 4711)`.
    ///
    /// It is sent in headers, and unless [`ordering_key`](Self::ordering_key) says otherwise, the
    /// messages of one object share a key.
    pub fn aggregate(mut self, kind: impl Into<String>, id: impl fmt::Display) -> Self {
        self.message.aggregate = Some((kind.into(), id.to_string()));
        self
    }

    /// Messages with the same key belong in order. The key is stored; the relay does not use it yet.
    pub fn ordering_key(mut self, key: impl Into<String>) -> Self {
        self.message.ordering_key = Some(key.into());
        self
    }

    /// What happened, for consumers that share a topic. Sent in a header.
    pub fn event_type(mut self, event_type: impl Into<String>) -> Self {
        self.message.event_type = Some(event_type.into());
        self
    }

    /// A header of your own. A second value for the same name replaces the first. NATS drops blanks at the start of
    /// a value.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.message.headers.insert(name.into(), value.into());
        self
    }

    /// Do not publish before this long from now, by the database's clock. At most 100 years.
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// An id of your own, for example of a [name](MessageId::from_name): enqueueing the same id with
    /// the same content again is one message as long as its row exists.
    pub fn message_id(mut self, id: impl Into<MessageId>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// The message as a publisher will get it, with a new id unless one was given.
    pub fn into_message(mut self) -> Message {
        self.message.id = self.id.unwrap_or_default();
        self.message.ordering_key = self
            .message
            .ordering_key
            .take()
            .or_else(|| self.message.aggregate.as_ref().map(|(kind, id)| aggregate_key(kind, id)));
        self.message
    }

    pub(crate) fn id_is_given(&self) -> bool {
        self.id.is_some()
    }

    pub(crate) fn due_after(&self) -> Duration {
        self.delay
    }
}

/// One key for one domain object: no two pairs share one.
fn aggregate_key(kind: &str, id: &str) -> String {
    // With the first colon ending the kind, the rest is the id as it is.
    let key = format!("{}:{id}", kind.replace('%', "%25").replace(':', "%3A"));
    if key.chars().count() <= 255 {
        key
    } else {
        format!("sha1:{}", Uuid::new_v5(&Uuid::NAMESPACE_OID, key.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(kind: &str, id: &str) -> Option<String> {
        let message = NewMessage::bytes("t", "text/plain", "x").aggregate(kind, id);
        message.into_message().ordering_key
    }

    #[test]
    fn two_aggregates_never_share_a_key() {
        assert_eq!(key("order", "1").as_deref(), Some("order:1"));
        assert_ne!(key("a:b", "c"), key("a", "b:c"));
        assert_ne!(key("a%3Ab", "c"), key("a:b", "c"));
        let long = "x".repeat(255);
        assert_ne!(key("order", &long), key("orders", &long));
        assert!(key("order", &long).is_some_and(|key| key.len() <= 255));
    }

    #[test]
    fn a_key_that_is_given_wins() {
        let message = NewMessage::bytes("t", "text/plain", "x").aggregate("order", 1).ordering_key("k");
        assert_eq!(message.into_message().ordering_key(), Some("k"));
    }
}
