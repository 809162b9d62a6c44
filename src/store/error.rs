use std::time::Duration;

use sea_orm::DbErr;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
use sea_orm::{RuntimeErr, SqlxError};

/// Why a statement of the store did not happen. Losing a race is not among them: that is a value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The outbox has no statements for this database, or the server is too old for them.
    #[error(
        "the outbox does not support {0}: use PostgreSQL 13, MySQL 8, MariaDB 10.6, SQLite 3.38 or newer"
    )]
    Unsupported(String),
    /// A column of an application's own entity cannot play its role.
    #[error("the entity of table {table} cannot be an outbox: {fault}")]
    Entity {
        /// The table.
        table: String,
        /// Which column it is, and what it would have to be.
        fault: String,
    },
    /// The table in the database is not as the entity says, or lacks what the relay needs.
    #[error("the table {table} cannot be relayed: {}", faults.join("; "))]
    Schema {
        /// The table.
        table: String,
        /// Everything that is wrong with it, with what to do.
        faults: Vec<String>,
    },
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
        "the outbox table is missing, not as the migrations make it, or not allowed to be used: {0}; \
         unless it is a table of your own, run the migrations of sea-orm-outbox (`Migrator::up`)"
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
                SqlxError::Database(answer) => {
                    #[cfg(feature = "mysql")]
                    if let Some(answer) =
                        answer.try_downcast_ref::<sea_orm::sqlx::mysql::MySqlDatabaseError>()
                        && let Some(kind) = mysql_kind(answer.number())
                    {
                        return kind;
                    }
                    kind(&answer.code().unwrap_or_default())
                }
                SqlxError::ColumnDecode { .. } | SqlxError::Decode(_) | SqlxError::Encode(_) => Kind::Refused,
                _ => Kind::Unavailable,
            }
        }
        _ => Kind::Unavailable,
    }
}

/// What a number of MySQL or MariaDB says whose SQLSTATE is too general.
#[cfg(feature = "mysql")]
fn mysql_kind(number: u16) -> Option<Kind> {
    match number {
        // Lock wait timeout, deadlock, record changed since last read, lock not available at once.
        1205 | 1213 | 1020 | 3572 => Some(Kind::Contention),
        // Not null without a default, wrong value, truncated, check constraint (MySQL, MariaDB), invalid JSON.
        1364 | 1366 | 1265 | 3819 | 4025 | 3140 => Some(Kind::Refused),
        _ => None,
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

    #[cfg(feature = "mysql")]
    #[test]
    fn numbers_of_mysql_say_it_where_its_codes_do_not() {
        for number in [1205, 1213, 1020, 3572] {
            assert_eq!(mysql_kind(number), Some(Kind::Contention), "{number}");
        }
        for number in [1364, 1366, 1265, 3819, 4025, 3140] {
            assert_eq!(mysql_kind(number), Some(Kind::Refused), "{number}");
        }
        // Too many connections, read-only, gone away, killed: what their codes say.
        for number in [1040, 1290, 2006, 1927] {
            assert_eq!(mysql_kind(number), None, "{number}");
        }
    }
}
