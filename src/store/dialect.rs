//! What differs between the databases, in one place.

use std::time::Duration;

use sea_orm::{DbBackend, Statement, Value};

use super::StoreError;

/// A database whose statements we know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    Postgres,
    /// MySQL and MariaDB.
    MySql,
    Sqlite,
}

/// The form of every time in SQLite: the one in which texts compare as the times they stand for, whether
/// they come from here, from a column default or from a value bound by SeaORM.
const SQLITE_TIME: &str = "%Y-%m-%dT%H:%M:%f+00:00";

impl Dialect {
    pub(crate) fn of(backend: DbBackend) -> Result<Self, StoreError> {
        match backend {
            DbBackend::Postgres => Ok(Self::Postgres),
            DbBackend::MySql => Ok(Self::MySql),
            DbBackend::Sqlite => Ok(Self::Sqlite),
            other => Err(StoreError::Unsupported(format!("{other:?}"))),
        }
    }

    fn backend(self) -> DbBackend {
        match self {
            Self::Postgres => DbBackend::Postgres,
            Self::MySql => DbBackend::MySql,
            Self::Sqlite => DbBackend::Sqlite,
        }
    }

    /// Now, to compare with: the same throughout a statement.
    pub(crate) fn now(self) -> String {
        match self {
            Self::Postgres => "statement_timestamp()".to_owned(),
            Self::MySql => "UTC_TIMESTAMP(6)".to_owned(),
            Self::Sqlite => format!("strftime('{SQLITE_TIME}', 'now')"),
        }
    }

    /// Now, to write down.
    pub(super) fn clock(self) -> String {
        match self {
            Self::Postgres => "clock_timestamp()".to_owned(),
            Self::MySql | Self::Sqlite => self.now(),
        }
    }

    /// So many milliseconds from now, to write down.
    pub(crate) fn clock_plus_ms(self, ms: &str) -> String {
        match self {
            Self::Postgres => format!("clock_timestamp() + {ms} * interval '1 millisecond'"),
            Self::MySql => format!("UTC_TIMESTAMP(6) + INTERVAL ({ms} * 1000) MICROSECOND"),
            Self::Sqlite => {
                format!("strftime('{SQLITE_TIME}', 'now', printf('%+.3f seconds', {ms} / 1000.0))")
            }
        }
    }

    /// A name in SQL.
    pub(super) fn quote(self, name: &str) -> String {
        match self {
            Self::Postgres | Self::Sqlite => format!("\"{}\"", name.replace('"', "\"\"")),
            Self::MySql => format!("`{}`", name.replace('`', "``")),
        }
    }

    /// A number of whatever width, as one of 64 bits.
    pub(super) fn integer(self, number: &str) -> String {
        match self {
            Self::Postgres => format!("({number})::bigint"),
            Self::MySql => format!("CAST({number} AS SIGNED)"),
            // Where a table is not STRICT, a column may hold anything.
            Self::Sqlite => format!("CAST({number} AS INTEGER)"),
        }
    }

    /// A text, JSON or an enum, as a text.
    pub(super) fn text(self, value: &str) -> String {
        match self {
            Self::Postgres => format!("({value})::text"),
            Self::MySql => format!("CAST({value} AS CHAR CHARACTER SET utf8mb4)"),
            Self::Sqlite => value.to_owned(),
        }
    }

    /// A statement that names its parameters `$1`, `$2`, … as often and in the order that it likes.
    ///
    /// MySQL only knows `?`: there each use gets a value of its own.
    pub(super) fn statement(self, sql: String, values: Vec<Value>) -> Statement {
        if self != Self::MySql {
            return Statement::from_sql_and_values(self.backend(), sql, values);
        }
        let (mut positional, mut used) = (String::with_capacity(sql.len()), Vec::new());
        let mut rest = sql.as_str();
        while let Some(at) = rest.find(['$', '\'', '`']) {
            let (before, from) = rest.split_at(at);
            positional.push_str(before);
            let length = match from.as_bytes()[0] {
                b'$' => {
                    let digits = from[1..].bytes().take_while(u8::is_ascii_digit).count();
                    let number: usize = from[1..=digits].parse().unwrap_or(0);
                    match number.checked_sub(1).and_then(|index| values.get(index)) {
                        Some(value) => {
                            positional.push('?');
                            used.push(value.clone());
                        }
                        None => positional.push_str(&from[..=digits]),
                    }
                    digits + 1
                }
                // A `$` in a name or a text is part of it. A doubled quote ends one text and begins the next.
                quote => {
                    let end = from[1..].bytes().position(|byte| byte == quote);
                    let length = end.map_or(from.len(), |end| end + 2);
                    positional.push_str(&from[..length]);
                    length
                }
            };
            rest = &from[length..];
        }
        positional.push_str(rest);
        Statement::from_sql_and_values(self.backend(), positional, used)
    }
}

/// What each transaction of ours sets first on PostgreSQL, in one round trip.
///
/// All our statements find their rows by an index, in the order of a batch. What the planner knows of the table
/// is of no help with that: a queue looks empty whenever it is analysed. One that was never analysed looks as if
/// fewer rows were due than a claim asks for, and a bitmap scan would read and sort the whole backlog for each.
pub(super) fn postgres_settings(statement_timeout: Duration) -> String {
    // PostgreSQL keeps these in a signed 32-bit number of milliseconds.
    let ms = statement_timeout.as_millis().clamp(1, i32::MAX as u128);
    format!(
        "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; \
         SET LOCAL plan_cache_mode = force_custom_plan; \
         SET LOCAL enable_seqscan = off; \
         SET LOCAL enable_bitmapscan = off; \
         SET LOCAL enable_hashjoin = off; \
         SET LOCAL enable_mergejoin = off; \
         SET LOCAL statement_timeout = {ms}; \
         SET LOCAL idle_in_transaction_session_timeout = {ms}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mysql_gets_a_value_for_each_use() {
        let sql =
            "SELECT `a$1`, '$2 it''s $1' FROM t WHERE x = $2 AND y > $1 AND z > $1 LIMIT $10".to_owned();
        let values: Vec<Value> = (1..=10_i64).map(Value::from).collect();
        let statement = Dialect::MySql.statement(sql, values);
        assert_eq!(
            statement.sql,
            "SELECT `a$1`, '$2 it''s $1' FROM t WHERE x = ? AND y > ? AND z > ? LIMIT ?"
        );
        let expected: Vec<Value> = [2_i64, 1, 1, 10].map(Value::from).into();
        assert_eq!(statement.values.map(|values| values.0), Some(expected));
    }
}
