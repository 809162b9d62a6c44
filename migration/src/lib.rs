//! The tables of `sea-orm-outbox`, in two forms.
//!
//! **In your own migrator**, appended to your list, so that one history table knows all migrations:
//!
//! ```
//! use sea_orm_outbox_migration::{MigrationTrait, MigratorTrait};
//!
//! struct Migrator;
//!
//! impl MigratorTrait for Migrator {
//!     fn migrations() -> Vec<Box<dyn MigrationTrait>> {
//!         let mut all: Vec<Box<dyn MigrationTrait>> = vec![/* your own */];
//!         all.extend(sea_orm_outbox_migration::migrations());
//!         all
//!     }
//! }
//! # assert_eq!(Migrator::migrations().len(), 1);
//! ```
//!
//! **Stand-alone**: [`Migrator`] keeps its history in a table of its own, `outbox_migrations`, because
//! SeaORM refuses a history that lists migrations it does not know. Several processes may run it at once.

mod m20261130_000001_create_outbox_message;
mod m20261130_000002_notify_of_outbox_messages;
mod migrator;

pub use migrator::{Migrator, NotifyingMigrator};
pub use sea_orm_migration::{MigrationTrait, MigratorTrait};

/// All migrations, oldest first, to append to those of an application.
///
/// Their names begin with `outbox_`, so that they cannot meet those of the application.
pub fn migrations() -> Vec<Box<dyn MigrationTrait>> {
    vec![Box::new(m20261130_000001_create_outbox_message::Migration)]
}

/// Optional, to append after [`migrations`]: on PostgreSQL a trigger that notifies the channel `outbox_message` once for
/// each transaction that inserts messages, so that relays which listen need not wait for their next look. Elsewhere it
/// does nothing.
///
/// It costs writers something: PostgreSQL orders the commits of transactions that notify. [`NotifyingMigrator`] is the
/// stand-alone form.
pub fn notifying() -> Vec<Box<dyn MigrationTrait>> {
    vec![Box::new(m20261130_000002_notify_of_outbox_messages::Migration)]
}
