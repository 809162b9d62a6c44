use std::{
    fmt,
    sync::{Mutex, PoisonError},
};

use super::{Ack, PublishError, Publisher};
use crate::message::Message;

type Answer = Box<dyn Fn(&Message) -> Result<Ack, PublishError> + Send + Sync>;

/// A publisher for tests: it keeps what it was given, and answers as it is told to.
///
/// ```
/// # use sea_orm_outbox::publisher::RecordingPublisher;
/// # use sea_orm_outbox::{Ack, PublishError};
/// let accepting = RecordingPublisher::new();
/// let refusing = RecordingPublisher::answering(|message| match message.topic() {
///     "bad" => Err(PublishError::permanent("refused")),
///     _ => Ok(Ack::new()),
/// });
/// assert!(accepting.messages().is_empty());
/// ```
pub struct RecordingPublisher {
    answer: Answer,
    messages: Mutex<Vec<Message>>,
}

impl Default for RecordingPublisher {
    fn default() -> Self {
        Self::new()
    }
}

impl RecordingPublisher {
    /// Accepts every message.
    pub fn new() -> Self {
        Self::answering(|_| Ok(Ack::new()))
    }

    /// Answers each message as `answer` says.
    pub fn answering(answer: impl Fn(&Message) -> Result<Ack, PublishError> + Send + Sync + 'static) -> Self {
        Self { answer: Box::new(answer), messages: Mutex::default() }
    }

    /// Every message it was given, repeats and refused ones included, in the order of arrival.
    pub fn messages(&self) -> Vec<Message> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Publisher for RecordingPublisher {
    async fn publish(&self, message: &Message) -> Result<Ack, PublishError> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).push(message.clone());
        (self.answer)(message)
    }
}

impl fmt::Debug for RecordingPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordingPublisher").field("messages", &self.messages).finish_non_exhaustive()
    }
}
