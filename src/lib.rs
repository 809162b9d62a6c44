//! The transactional outbox for SeaORM.

pub mod lifecycle;
pub mod message;
mod outbox;
pub mod publisher;
mod relay;
pub mod store;
mod versioned;

#[cfg(feature = "migration")]
pub use sea_orm_outbox_migration as migration;

pub use message::{InvalidMessage, Message, MessageId, NewMessage};
pub use outbox::{EnqueueError, Enqueued, Outbox};
#[cfg(feature = "nats")]
pub use publisher::NatsPublisher;
pub use publisher::{Ack, PublishError, PublishErrorKind, Publisher};
pub use relay::{ConfigError, Relay, RelayBuilder, RelayError, RelayHandle, Report};
pub use sea_orm_outbox_entity as entity;
pub use versioned::{Versioned, VersionedError, VersionedExt};
