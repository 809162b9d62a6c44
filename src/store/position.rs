use sea_orm::{
    DbErr, QueryResult, Value,
    prelude::{DateTime, DateTimeUtc},
};

use super::{RowId, dialect::Dialect, table::Table};

/// A place in the due index.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    available_at: Time,
    id: RowId,
}

/// A time as the database has it: one that was converted might compare otherwise.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Time {
    Utc(DateTimeUtc),
    Naive(DateTime),
    Text(String),
}

impl Position {
    /// Reads the time and the id from columns of a result.
    pub(super) fn read(row: &QueryResult, time: usize, id: usize, table: &Table) -> Result<Self, DbErr> {
        let available_at = match table.dialect {
            Dialect::Postgres => Time::Utc(row.try_get_by_index(time)?),
            Dialect::MySql => Time::Naive(row.try_get_by_index(time)?),
            Dialect::Sqlite => Time::Text(row.try_get_by_index(time)?),
        };
        Ok(Self { available_at, id: RowId::read(row, id, table)? })
    }

    /// The time, to be read: no earlier than a program can hold. PostgreSQL has `-infinity`, MariaDB a date of noughts.
    pub(super) fn output(table: &Table, prefix: &str) -> String {
        let time = format!("{prefix}{}", table.available_at);
        match table.dialect {
            Dialect::Postgres => format!("GREATEST({time}, '1000-01-01 00:00:00+00'::timestamptz)"),
            Dialect::MySql => format!("GREATEST({time}, CAST('1000-01-01' AS DATETIME(6)))"),
            Dialect::Sqlite => time,
        }
    }

    /// The condition that an entry of the due index stands after this place, to append, and the values of its two
    /// parameters, `$first` and the one after it. Nothing for the head of the queue.
    pub(super) fn after(position: Option<&Self>, table: &Table, first: usize) -> (String, Vec<Value>) {
        let Some(Self { available_at: time, id }) = position else { return (String::new(), Vec::new()) };
        let time = match time {
            Time::Utc(time) => Value::from(*time),
            Time::Naive(time) => Value::from(*time),
            Time::Text(time) => Value::from(time.clone()),
        };
        let (at, after_id) = (Self::parameter(table, first), Self::id_parameter(table, first + 1));
        let Table { available_at, id: key, .. } = table;
        let condition = match table.dialect {
            // MySQL finds no range of an index by comparing pairs.
            Dialect::MySql => {
                format!(" AND ({available_at} > {at} OR {available_at} = {at} AND {key} > {after_id})")
            }
            Dialect::Postgres | Dialect::Sqlite => {
                format!(" AND ({available_at}, {key}) > ({at}, {after_id})")
            }
        };
        (condition, vec![time, (*id).into()])
    }

    /// The parameter of the time.
    pub(super) fn parameter(table: &Table, number: usize) -> String {
        match table.dialect {
            Dialect::Postgres => format!("${number}::timestamptz"),
            Dialect::MySql => format!("CAST(${number} AS DATETIME(6))"),
            Dialect::Sqlite => format!("${number}"),
        }
    }

    /// The parameter of the id.
    pub(super) fn id_parameter(table: &Table, number: usize) -> String {
        match (table.dialect, table.roles.has_uuid_key()) {
            (Dialect::Postgres, true) => format!("${number}::uuid"),
            (Dialect::Postgres, false) => format!("${number}::bigint"),
            _ => format!("${number}"),
        }
    }
}
