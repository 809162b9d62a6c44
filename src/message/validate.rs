//! What is refused at the edge, so that nothing is stored that could not be published.

use std::time::Duration;

use super::{Message, header};

/// What a NATS server takes unless its `max_payload` says otherwise: 1 MiB, headers included.
pub(crate) const DEFAULT_MAX_MESSAGE_BYTES: usize = 1024 * 1024;

/// The most that JetStream takes as headers, whatever its `max_payload` (its error 10097).
const MAX_HEADER_BYTES: usize = 65_535;

const MAX_DELAY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Why a message was refused. Nothing was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidMessage {
    /// The topic cannot be a NATS subject.
    #[error("the topic {topic:?} {reason}")]
    Topic {
        /// The topic.
        topic: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A text is empty.
    #[error("the {field} is empty")]
    Empty {
        /// Which text.
        field: &'static str,
    },
    /// A text does not fit its column.
    #[error("the {field} has {length} characters, more than {limit}")]
    TooLong {
        /// Which text.
        field: &'static str,
        /// How many characters it has.
        length: usize,
        /// How many it may have.
        limit: usize,
    },
    /// A text has a character that would break the header it is sent in.
    #[error("the {field} {value:?} contains a control character")]
    ControlCharacter {
        /// Which text.
        field: String,
        /// The text.
        value: String,
    },
    /// A header's name is empty or has a character that no header name may have.
    #[error("the header name {name:?} is not made of printable ASCII without spaces and colons")]
    HeaderName {
        /// The name.
        name: String,
    },
    /// A header's name is used by NATS or by the outbox.
    #[error("the header {name:?} is set by NATS or by the outbox and cannot be given")]
    ReservedHeader {
        /// The name.
        name: String,
    },
    /// The broker would not take it.
    #[error(
        "the message has {size} bytes with its headers, more than max_message_bytes = {limit}; \
         store the content elsewhere and send a reference, or raise the limit here and in the broker"
    )]
    TooLarge {
        /// How many bytes it has.
        size: usize,
        /// How many it may have.
        limit: usize,
    },
    /// JetStream would not take the headers.
    #[error(
        "the headers have {size} bytes together, more than {limit}, which is the most that JetStream takes"
    )]
    HeadersTooLarge {
        /// How many bytes they have.
        size: usize,
        /// How many they may have.
        limit: usize,
    },
    /// The delay is more than 100 years.
    #[error("the delay of {delay:?} is longer than 100 years")]
    DelayTooLong {
        /// The delay.
        delay: Duration,
    },
}

pub(crate) fn validate(message: &Message, delay: Duration, max_bytes: usize) -> Result<(), InvalidMessage> {
    validate_topic(&message.topic)?;
    text("content type", &message.content_type, 100)?;
    for (field, value, limit) in [
        ("aggregate type", message.aggregate_type(), 100),
        ("aggregate id", message.aggregate_id(), 255),
        ("ordering key", message.ordering_key(), 255),
        ("event type", message.event_type(), 100),
    ] {
        if let Some(value) = value {
            text(field, value, limit)?;
        }
    }
    for (name, value) in &message.headers {
        header_name(name)?;
        no_control_character(&format!("header {name}"), value)?;
    }
    let size = message.wire_header_size();
    if size > MAX_HEADER_BYTES {
        return Err(InvalidMessage::HeadersTooLarge { size, limit: MAX_HEADER_BYTES });
    }
    let size = message.wire_size();
    if size > max_bytes {
        return Err(InvalidMessage::TooLarge { size, limit: max_bytes });
    }
    if delay > MAX_DELAY {
        return Err(InvalidMessage::DelayTooLong { delay });
    }
    Ok(())
}

/// That a topic can be a NATS subject which a message is published to.
pub(crate) fn validate_topic(topic: &str) -> Result<(), InvalidMessage> {
    let refuse = |reason| Err(InvalidMessage::Topic { topic: topic.to_owned(), reason });
    if topic.is_empty() {
        return refuse("is empty");
    }
    if topic.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return refuse("contains white space or a control character");
    }
    if topic.contains(['*', '>']) {
        return refuse("contains a wildcard");
    }
    if topic.split('.').any(str::is_empty) {
        return refuse("has an empty token: each part between dots needs a character");
    }
    if topic.starts_with('$') || topic.starts_with("_INBOX.") {
        return refuse("begins with what NATS keeps for itself");
    }
    no_longer_than("topic", topic, 255)
}

fn text(field: &'static str, value: &str, limit: usize) -> Result<(), InvalidMessage> {
    if value.is_empty() {
        return Err(InvalidMessage::Empty { field });
    }
    no_control_character(field, value)?;
    no_longer_than(field, value, limit)
}

fn no_longer_than(field: &'static str, value: &str, limit: usize) -> Result<(), InvalidMessage> {
    let length = value.chars().count();
    if length > limit {
        return Err(InvalidMessage::TooLong { field, length, limit });
    }
    Ok(())
}

fn no_control_character(field: &str, value: &str) -> Result<(), InvalidMessage> {
    if value.chars().any(char::is_control) {
        return Err(InvalidMessage::ControlCharacter { field: field.to_owned(), value: value.to_owned() });
    }
    Ok(())
}

fn header_name(name: &str) -> Result<(), InvalidMessage> {
    let printable = |byte: u8| byte.is_ascii_graphic() && byte != b':';
    if name.is_empty() || !name.bytes().all(printable) {
        return Err(InvalidMessage::HeaderName { name: name.to_owned() });
    }
    let lower = name.to_ascii_lowercase();
    let ours = lower == header::CONTENT_TYPE.to_ascii_lowercase() || lower.starts_with("outbox-");
    if lower.starts_with("nats-") || ours {
        return Err(InvalidMessage::ReservedHeader { name: name.to_owned() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NewMessage;

    fn check(message: NewMessage) -> Result<(), InvalidMessage> {
        let delay = message.due_after();
        validate(&message.into_message(), delay, DEFAULT_MAX_MESSAGE_BYTES)
    }

    fn on(topic: &str) -> NewMessage {
        NewMessage::bytes(topic, "text/plain", "x")
    }

    #[test]
    fn topics_that_are_no_subject_are_refused() {
        for topic in [
            "",
            ".",
            "a.",
            ".a",
            "a..b",
            "a b",
            "a\tb",
            "a\n",
            "a\u{a0}b",
            "\0",
            "a.*",
            "a.>",
            ">",
            "a*b",
            "$SYS.x",
            "$JS.API.x",
            "_INBOX.x",
        ] {
            let refused = matches!(check(on(topic)), Err(InvalidMessage::Topic { .. }));
            assert!(refused, "{topic:?}");
        }
        for topic in ["a", "orders.created", "größe.ü", "a.$x", "x._INBOX.y", "_INBOXES"] {
            assert_eq!(check(on(topic)), Ok(()), "{topic:?}");
        }
    }

    #[test]
    fn texts_that_do_not_fit_are_refused() {
        assert_eq!(check(on(&"ü".repeat(255))), Ok(()));
        let too_long = |result| matches!(result, Err(InvalidMessage::TooLong { .. }));
        assert!(too_long(check(on(&"x".repeat(256)))));
        assert!(too_long(check(on("t").event_type("x".repeat(101)))));
        assert!(too_long(check(on("t").ordering_key("x".repeat(256)))));
        assert!(too_long(check(on("t").aggregate("x".repeat(101), 1))));
        assert!(too_long(check(on("t").aggregate("x", "x".repeat(256)))));
        let content_type = NewMessage::bytes("t", "x".repeat(101), "x");
        assert!(too_long(check(content_type)));
        assert_eq!(check(on("t").ordering_key("")), Err(InvalidMessage::Empty { field: "ordering key" }));
    }

    #[test]
    fn headers_that_would_break_the_wire_are_refused() {
        assert_eq!(check(on("t").header("tenant", "acme ü")), Ok(()));
        assert_eq!(check(on("t").header("empty", "")), Ok(()));
        for name in ["", "a b", "a:b", "ü", "a\r\nb"] {
            let refused = matches!(check(on("t").header(name, "x")), Err(InvalidMessage::HeaderName { .. }));
            assert!(refused, "{name:?}");
        }
        for name in ["Nats-Msg-Id", "nats-x", "NATS-Expected-Stream", "content-type", "Outbox-X"] {
            let result = check(on("t").header(name, "x"));
            assert!(matches!(result, Err(InvalidMessage::ReservedHeader { .. })), "{name:?}");
        }
        for value in ["a\nb", "a\rb", "\0", "\u{7f}"] {
            for message in [
                on("t").header("x", value),
                on("t").event_type(value),
                on("t").aggregate("order", value),
                on("t").ordering_key(value),
                NewMessage::bytes("t", value, "x"),
            ] {
                assert!(matches!(check(message), Err(InvalidMessage::ControlCharacter { .. })));
            }
        }
    }

    #[test]
    fn the_limit_counts_the_headers() {
        let overhead = on("t").into_message().wire_size() - 1;
        let of_size = |bytes: usize| check(NewMessage::bytes("t", "text/plain", vec![0; bytes]));
        assert_eq!(of_size(DEFAULT_MAX_MESSAGE_BYTES - overhead), Ok(()));
        assert_eq!(
            of_size(DEFAULT_MAX_MESSAGE_BYTES - overhead + 1),
            Err(InvalidMessage::TooLarge {
                size: DEFAULT_MAX_MESSAGE_BYTES + 1,
                limit: DEFAULT_MAX_MESSAGE_BYTES
            })
        );
    }

    #[test]
    fn headers_have_a_limit_of_their_own() {
        let with = |bytes: usize| on("t").header("x", "y".repeat(bytes));
        let overhead = with(0).into_message().wire_header_size();
        assert_eq!(check(with(MAX_HEADER_BYTES - overhead)), Ok(()));
        let limit = MAX_HEADER_BYTES;
        let refused = Err(InvalidMessage::HeadersTooLarge { size: limit + 1, limit });
        assert_eq!(check(with(limit - overhead + 1)), refused);
    }

    #[test]
    fn a_delay_beyond_every_calendar_is_refused() {
        assert_eq!(check(on("t").delay(MAX_DELAY)), Ok(()));
        let delay = Duration::MAX;
        assert_eq!(check(on("t").delay(delay)), Err(InvalidMessage::DelayTooLong { delay }));
    }
}
