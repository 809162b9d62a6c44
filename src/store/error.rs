use std::time::Duration;

use sea_orm::{DbBackend, DbErr, RuntimeErr};

/// Why a statement of the store did not happen. Losing a race is not among them: that is a value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The outbox has no statements for this database.
    #[error("the outbox does not support {0:?} yet: use PostgreSQL or SQLite")]
    Unsupported(DbBackend),
    /// The database does not answer.
    #[error("the database cannot be reached: {0}")]
    Unreachable(#[source] DbErr),
    /// The database answers, but not with our table.
    #[error(
        "the table outbox_message is missing or not as the migrations make it: {0}; \
         run the migrations of sea-orm-outbox (`Migrator::up`)"
    )]
    Table(#[source] DbErr),
    /// Another transaction was in the way; the same call may succeed at once.
    #[error("another transaction was in the way: {0}")]
    Contention(#[source] DbErr),
    /// A statement took too long. It may have happened all the same.
    #[error("the database took longer than {limit:?} to {what}")]
    Timeout {
        /// What it was asked to do.
        what: &'static str,
        /// How long it was given.
        limit: Duration,
    },
    /// Anything else that the database says.
    #[error("the database refused: {0}")]
    Database(#[source] DbErr),
}

impl From<DbErr> for StoreError {
    fn from(error: DbErr) -> Self {
        use sea_orm::SqlxError as Sqlx;
        let sqlx = match &error {
            DbErr::Conn(_) | DbErr::ConnectionAcquire(_) => return Self::Unreachable(error),
            DbErr::Exec(RuntimeErr::SqlxError(sqlx)) | DbErr::Query(RuntimeErr::SqlxError(sqlx)) => sqlx,
            _ => return Self::Database(error),
        };
        match &**sqlx {
            Sqlx::Io(_)
            | Sqlx::Tls(_)
            | Sqlx::Protocol(_)
            | Sqlx::PoolTimedOut
            | Sqlx::PoolClosed
            | Sqlx::WorkerCrashed => Self::Unreachable(error),
            Sqlx::Database(answer) => match answer.code().as_deref() {
                // Serialization failure and deadlock of PostgreSQL; SQLITE_BUSY and its kinds.
                Some("40001" | "40P01" | "5" | "261" | "517") => Self::Contention(error),
                // PostgreSQL: shutting down, crashed, starting, too many connections.
                Some("57P01" | "57P02" | "57P03" | "53300") => Self::Unreachable(error),
                _ => Self::Database(error),
            },
            _ => Self::Database(error),
        }
    }
}
