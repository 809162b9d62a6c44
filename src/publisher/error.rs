use std::error::Error;

/// What kind of failure a publish met: it decides what becomes of the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PublishErrorKind {
    /// Another try may succeed: the attempt is spent, the message waits out its backoff.
    Transient,
    /// It can never succeed (too large, refused for its form): the message ends `FAILED` at once.
    Permanent,
    /// The destination is not set up (no stream takes the subject, not authorised): the message rests and no
    /// attempt is spent; it goes on by itself once the destination is there.
    Configuration,
    /// The broker is away: the message is given back, no attempt is spent, and the relay pauses.
    Unavailable,
}

/// Why a message was not published, or not certainly.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct PublishError {
    kind: PublishErrorKind,
    reason: String,
    connection_lost: bool,
    #[source]
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl PublishError {
    /// Another try may succeed.
    pub fn transient(reason: impl Into<String>) -> Self {
        Self::new(PublishErrorKind::Transient, reason)
    }

    /// It can never succeed.
    pub fn permanent(reason: impl Into<String>) -> Self {
        Self::new(PublishErrorKind::Permanent, reason)
    }

    /// The destination is not set up. Let the reason say what to do: it is what an operator reads.
    pub fn configuration(reason: impl Into<String>) -> Self {
        Self::new(PublishErrorKind::Configuration, reason)
    }

    /// The broker is away.
    pub fn unavailable(reason: impl Into<String>) -> Self {
        Self::new(PublishErrorKind::Unavailable, reason)
    }

    /// The connection to the broker broke while the message was in flight: the broker is away, and it may be
    /// because of this message. If no other was in flight beside it, the attempt is spent.
    pub fn connection_lost(reason: impl Into<String>) -> Self {
        Self { connection_lost: true, ..Self::new(PublishErrorKind::Unavailable, reason) }
    }

    /// The error that caused this one.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Whether the connection broke while the message was in flight.
    pub fn is_connection_lost(&self) -> bool {
        self.connection_lost
    }

    /// What kind it is.
    pub fn kind(&self) -> PublishErrorKind {
        self.kind
    }

    fn new(kind: PublishErrorKind, reason: impl Into<String>) -> Self {
        Self { kind, reason: reason.into(), connection_lost: false, source: None }
    }
}
