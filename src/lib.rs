//! The transactional outbox for SeaORM, relayed to NATS by optimistic locking.
//!
//! A service writes its business row and a message in one SeaORM transaction ([`Outbox`]). Any number of relays
//! ([`Relay`]) move the messages to a broker ([`Publisher`], [`NatsPublisher`]). Who may publish a row is decided by
//! its version: a relay claims rows with `UPDATE … WHERE id = ? AND version = ?`, ends that short transaction,
//! publishes with no lock held, and settles under the version that the claim gave it. The same optimistic locking is
//! there for your own entities ([`Versioned`]).
//!
//! Begin with the examples at [`Outbox`] and [`Relay`]. On from there:
//!
//! - [what is guaranteed, and what is not](docs::guarantees)
//! - [the life cycle of a message](docs::lifecycle)
//! - [operations: before going live, settings, symptoms](docs::operations)
//! - [testing your service](docs::testing)
//!
//! # Features
//!
//! `postgres`, `sqlite` and `nats` are on by default; `mysql` (MySQL and MariaDB), `migration` (the migrations as a
//! module), `testing` (a publisher that records).

pub mod docs;
pub mod lifecycle;
pub mod message;
mod outbox;
pub mod publisher;
mod relay;
pub mod store;
mod versioned;
mod wake;

#[cfg(feature = "nats")]
pub use async_nats;
pub use bytes;
#[cfg(feature = "migration")]
pub use sea_orm_outbox_migration as migration;

pub use message::{InvalidMessage, Message, MessageId, NewMessage};
pub use outbox::{EnqueueError, Enqueued, Outbox};
#[cfg(feature = "nats")]
pub use publisher::NatsPublisher;
pub use publisher::{Ack, PublishError, PublishErrorKind, Publisher};
pub use relay::{
    ConfigError, DestinationCheck, Health, Relay, RelayBuilder, RelayError, RelayHandle, Report,
};
pub use sea_orm_outbox_entity as entity;
pub use store::{BehindFailed, ClaimStrategy, Ordering, OutboxTable};
pub use versioned::{Versioned, VersionedError, VersionedExt};
#[cfg(feature = "postgres")]
pub use wake::ListenError;
pub use wake::Waker;
