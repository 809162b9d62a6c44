//! The transactional outbox for SeaORM.

#[cfg(feature = "migration")]
pub use sea_orm_outbox_migration as migration;

mod versioned;
