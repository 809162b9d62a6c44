//! The life cycle of a message, as pure functions: no I/O, no clock, no randomness.
//!
//! Every change of a row is an [`Arrow`]. An arrow carries its own guard: what the row must still look
//! like for the change to happen. The statements of [`store`](crate::store) are written after them, and
//! whoever wants to check the protocol can do it here, without a database.

mod arrow;
mod decide;
mod retry_policy;

pub use arrow::{Arrow, Guard};
pub use decide::{Outcome, Transition, settle, sweep};
pub use retry_policy::RetryPolicy;
pub use sea_orm_outbox_entity::Status;

pub(crate) use decide::EXPIRED;
