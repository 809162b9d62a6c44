use std::time::Duration;

use sea_orm::{DbBackend, DbErr};
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
use sea_orm::{RuntimeErr, SqlxError};

/// Why a statement of the store did not happen. Losing a race is not among them: that is a value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The outbox has no statements for this database.
    #[error("the outbox does not support {0:?} yet: use PostgreSQL or SQLite")]
    Unsupported(DbBackend),
    /// The database cannot be reached, or cannot work: starting, stopping, read-only, out of space or of
    /// connections. It is worth waiting for.
    #[error("the database is not available: {0}")]
    Unavailable(#[source] DbErr),
    /// A statement took too long. It may have happened all the same.
    #[error("the database took longer than {limit:?} to {what}")]
    Timeout {
        /// What it was asked to do.
        what: &'static str,
        /// How long it was given.
        limit: Duration,
    },
    /// The table, a column or the right to use it is missing.
    #[error(
        "the table outbox_message is missing, not as the migrations make it, or not allowed to be used: {0}; \
         run the migrations of sea-orm-outbox (`Migrator::up`)"
    )]
    Table(#[source] DbErr),
    /// Another transaction was in the way; the same call may succeed at once.
    #[error("another transaction was in the way: {0}")]
    Contention(#[source] DbErr),
    /// The database does not take these values: a constraint or a type is against it.
    #[error("the database refused the values: {0}")]
    Refused(#[source] DbErr),
}

impl From<DbErr> for StoreError {
    fn from(error: DbErr) -> Self {
        match kind_of(&error) {
            Kind::Contention => Self::Contention(error),
            Kind::Refused => Self::Refused(error),
            Kind::Table => Self::Table(error),
            Kind::Unavailable => Self::Unavailable(error),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
#[cfg_attr(not(any(feature = "postgres", feature = "mysql", feature = "sqlite")), allow(dead_code))]
enum Kind {
    Contention,
    Refused,
    Table,
    /// Whatever we do not know is no reason to give a row up.
    Unavailable,
}

fn kind_of(error: &DbErr) -> Kind {
    match error {
        DbErr::Type(_) | DbErr::Json(_) | DbErr::TryIntoErr { .. } => Kind::Refused,
        #[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
        DbErr::Exec(RuntimeErr::SqlxError(error)) | DbErr::Query(RuntimeErr::SqlxError(error)) => {
            match &**error {
                SqlxError::Database(answer) => kind(&answer.code().unwrap_or_default()),
                SqlxError::ColumnDecode { .. } | SqlxError::Decode(_) | SqlxError::Encode(_) => Kind::Refused,
                _ => Kind::Unavailable,
            }
        }
        _ => Kind::Unavailable,
    }
}

/// What an error code says: five characters are an SQLSTATE, a number is an extended result code of SQLite.
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
fn kind(code: &str) -> Kind {
    if code.len() == 5 {
        return match code {
            // Serialization failure, deadlock, lock not available.
            "40001" | "40P01" | "55P03" => Kind::Contention,
            // Data exception, constraint violation, check option violation.
            _ if ["22", "23", "44"].contains(&&code[..2]) => Kind::Refused,
            // Syntax error or access rule violation: no such table, no such column, no right.
            _ if code.starts_with("42") => Kind::Table,
            _ => Kind::Unavailable,
        };
    }
    match code.parse::<u32>().map(|code| code & 0xff) {
        // BUSY, LOCKED.
        Ok(5 | 6) => Kind::Contention,
        // TOOBIG, CONSTRAINT, MISMATCH.
        Ok(18..=20) => Kind::Refused,
        // A statement that cannot be prepared: no such table, no such column.
        Ok(1) => Kind::Table,
        _ => Kind::Unavailable,
    }
}

#[cfg(all(test, any(feature = "postgres", feature = "mysql", feature = "sqlite")))]
mod tests {
    use super::*;

    #[test]
    fn codes_say_what_kind_of_error_it_is() {
        for code in ["40001", "40P01", "55P03", "5", "6", "261", "262", "517", "773"] {
            assert_eq!(kind(code), Kind::Contention, "{code}");
        }
        for code in ["22001", "23505", "23514", "44000", "18", "19", "20", "275", "2067"] {
            assert_eq!(kind(code), Kind::Refused, "{code}");
        }
        for code in ["42P01", "42703", "42501", "1"] {
            assert_eq!(kind(code), Kind::Table, "{code}");
        }
        // Read-only after a failover, cancelled, out of space, shutting down, full, a broken disk.
        for code in ["25006", "57014", "53100", "57P01", "08006", "25P02", "13", "10", "8", "14", "?", ""] {
            assert_eq!(kind(code), Kind::Unavailable, "{code}");
        }
    }
}
