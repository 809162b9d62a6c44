//! Where messages go: the trait [`Publisher`] and those that come with the library.

mod error;
#[cfg(feature = "nats")]
mod nats;
#[cfg(feature = "testing")]
mod recording;

use std::{future::Future, sync::Arc, time::Duration};

pub use error::{PublishError, PublishErrorKind};
#[cfg(feature = "nats")]
pub use nats::NatsPublisher;
#[cfg(feature = "testing")]
pub use recording::RecordingPublisher;

use crate::message::Message;

/// Hands one message to a broker and waits until the broker has it.
///
/// The relay keeps many calls in flight, polls them in one task, and limits each in time; an implementation
/// neither collects batches nor retries. It must send [`Message::id`] along, in the way by which the broker or
/// the consumer recognises a repeat: after a crash between publishing and settling the same message comes again.
///
/// ```
/// use sea_orm_outbox::{Ack, Message, PublishError, Publisher};
///
/// struct Stdout;
///
/// impl Publisher for Stdout {
///     async fn publish(&self, message: &Message) -> Result<Ack, PublishError> {
///         println!("{} {}", message.topic(), message.id());
///         Ok(Ack::new())
///     }
/// }
/// ```
pub trait Publisher: Send + Sync + 'static {
    /// Publishes a message; `Ok` means that the broker has it.
    ///
    /// Dropping the future gives the wait up. The message may reach the broker all the same.
    fn publish(&self, message: &Message) -> impl Future<Output = Result<Ack, PublishError>> + Send;

    /// Whether the broker can be reached, as far as is known without asking it.
    ///
    /// While it cannot, the relay claims nothing, and a publish that ran into its time limit counts as
    /// [`PublishErrorKind::Unavailable`]. The default is `true`.
    fn is_connected(&self) -> bool {
        true
    }

    /// Looks whether the destinations of these topics are what the promises rest on: they exist, they acknowledge, and
    /// they drop repeats that come within `repeats_within` of the first copy. Each fault says what to do.
    ///
    /// The relay asks when it starts. The default finds no fault.
    ///
    /// # Errors
    /// When it cannot be found out now.
    fn check(
        &self,
        topics: &[String],
        repeats_within: Duration,
    ) -> impl Future<Output = Result<Vec<String>, PublishError>> + Send {
        let _ = (topics, repeats_within);
        async { Ok(Vec::new()) }
    }
}

/// A publisher that several relays share.
impl<P: Publisher> Publisher for Arc<P> {
    fn publish(&self, message: &Message) -> impl Future<Output = Result<Ack, PublishError>> + Send {
        (**self).publish(message)
    }

    fn is_connected(&self) -> bool {
        (**self).is_connected()
    }

    fn check(
        &self,
        topics: &[String],
        repeats_within: Duration,
    ) -> impl Future<Output = Result<Vec<String>, PublishError>> + Send {
        (**self).check(topics, repeats_within)
    }
}

/// The broker's word that it has a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ack {
    duplicate: bool,
}

impl Ack {
    /// The broker has the message.
    pub fn new() -> Self {
        Self::default()
    }

    /// The broker had the message already, and dropped this copy. A success like any other.
    pub fn duplicate() -> Self {
        Self { duplicate: true }
    }

    /// Whether the broker had it already.
    pub fn is_duplicate(&self) -> bool {
        self.duplicate
    }
}
