use std::{fmt, str::FromStr};

use uuid::Uuid;

/// The identity of a message: what the broker and the consumer recognise a repeat by.
///
/// It is sent as `Nats-Msg-Id`. Two messages with different ids are never merged; two with the same id
/// are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MessageId(Uuid);

/// The namespace of [`MessageId::from_name`]: the UUID v5 of `sea-orm-outbox` in the DNS namespace.
/// It must never change: the same name has to give the same id for ever.
const NAMESPACE: Uuid = Uuid::from_u128(0x650f_9be3_1c56_5f40_9feb_d329_9b19_1527);

impl MessageId {
    /// A new id that no other message has: a UUID v7, which sorts by the time it was made.
    pub fn new() -> Self {
        Self(Uuid::now_v7())
    }

    /// The id of a natural key: the same name always gives the same id (a UUID v5).
    ///
    /// With it an enqueue that is repeated, say for the same request, stays one message as long as its
    /// row exists. Put the kind of thing into the name: `order-placed/4711`.
    ///
    /// ```
    /// use sea_orm_outbox::MessageId;
    ///
    /// assert_eq!(MessageId::from_name("order-placed/1"), MessageId::from_name("order-placed/1"));
    /// assert_ne!(MessageId::from_name("order-placed/1"), MessageId::from_name("order-placed/2"));
    /// ```
    pub fn from_name(name: &str) -> Self {
        Self(Uuid::new_v5(&NAMESPACE, name.as_bytes()))
    }

    /// The UUID.
    pub fn as_uuid(&self) -> Uuid {
        self.0
    }
}

impl Default for MessageId {
    /// A new id, see [`MessageId::new`].
    fn default() -> Self {
        Self::new()
    }
}

impl From<Uuid> for MessageId {
    fn from(id: Uuid) -> Self {
        Self(id)
    }
}

impl FromStr for MessageId {
    type Err = uuid::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Uuid::from_str(text).map(Self)
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_of_a_name_never_changes() {
        assert_eq!(NAMESPACE, Uuid::new_v5(&Uuid::NAMESPACE_DNS, b"sea-orm-outbox"));
        assert_eq!(
            MessageId::from_name("order-placed/1").to_string(),
            "eb09d34b-472b-5c46-840a-46f32b1be321"
        );
    }
}
