//! The `outbox_message` entity: one row is one message to publish.
//!
//! Applications rarely need it. They write rows through `Outbox::enqueue` and leave the rest to the relay;
//! the entity is here for queries, admin pages and tests. Reading is always safe. Writing is not:
//! every change to a row must name the id *and* the version it expects, and raise the version,
//! which is what the functions of `sea-orm-outbox` do.

pub mod outbox_message;
mod status;

pub use outbox_message::Entity as OutboxMessage;
pub use status::Status;
