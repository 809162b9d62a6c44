//! What differs between the databases, in one place.

use std::time::Duration;

use sea_orm::{DbBackend, Value};

use super::{Fence, StoreError};

/// A database whose statements we know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    Postgres,
    Sqlite,
}

/// The form of every time in SQLite: the one in which texts compare as the times they stand for, whether
/// they come from here, from a column default or from a value bound by SeaORM.
const SQLITE_TIME: &str = "%Y-%m-%dT%H:%M:%f+00:00";

impl Dialect {
    pub(crate) fn of(backend: DbBackend) -> Result<Self, StoreError> {
        match backend {
            DbBackend::Postgres => Ok(Self::Postgres),
            DbBackend::Sqlite => Ok(Self::Sqlite),
            other => Err(StoreError::Unsupported(other)),
        }
    }

    /// Now, to compare with.
    pub(crate) fn now(self) -> String {
        match self {
            Self::Postgres => "statement_timestamp()".to_owned(),
            Self::Sqlite => format!("strftime('{SQLITE_TIME}', 'now')"),
        }
    }

    /// Now, to write down.
    pub(super) fn clock(self) -> String {
        match self {
            Self::Postgres => "clock_timestamp()".to_owned(),
            Self::Sqlite => self.now(),
        }
    }

    /// So many milliseconds from now, to write down.
    pub(crate) fn clock_plus_ms(self, ms: &str) -> String {
        match self {
            Self::Postgres => format!("clock_timestamp() + {ms} * interval '1 millisecond'"),
            Self::Sqlite => {
                format!("strftime('{SQLITE_TIME}', 'now', printf('%+.3f seconds', {ms} / 1000.0))")
            }
        }
    }

    /// A statement over a batch of rows, each with its fence and what else it is given.
    ///
    /// The given columns come as `g`, the rows of the table as `o`. The result is the fences that were
    /// lost (PostgreSQL) or written (SQLite, where a `WITH` cannot change data).
    pub(super) fn fenced(self, verb: Verb<'_>, given: &[(&str, Column)]) -> String {
        let source = self.given(given);
        let guard = match verb.guard() {
            Some(guard) => format!(" AND {guard}"),
            None => String::new(),
        };
        match (self, verb) {
            (Self::Postgres, Verb::Update { set, skip_locked, .. }) => {
                // A sweep must never wait for the owner, who may be settling many of these rows in
                // another order: it passes over rows that are locked.
                let (locked, join) = if skip_locked {
                    (
                        format!(
                            "\
                             locked AS MATERIALIZED (
                                 SELECT o.id FROM outbox_message o
                                 JOIN given g ON o.id = g.id AND o.version = g.version
                                 WHERE TRUE{guard}
                                 ORDER BY o.id
                                 FOR UPDATE OF o SKIP LOCKED
                             ), "
                        ),
                        " JOIN locked ON locked.id = g.id",
                    )
                } else {
                    (String::new(), "")
                };
                format!(
                    "\
                     WITH {source}, {locked}written AS (
                         UPDATE outbox_message o SET {set}
                         FROM given g{join}
                         WHERE o.id = g.id AND o.version = g.version{guard}
                         RETURNING g.id, g.version
                     )
                     SELECT id, version FROM given EXCEPT SELECT id, version FROM written"
                )
            }
            (Self::Postgres, Verb::Delete { .. }) => format!(
                "\
                 WITH {source}, written AS (
                     DELETE FROM outbox_message o
                     USING given g
                     WHERE o.id = g.id AND o.version = g.version{guard}
                     RETURNING g.id, g.version
                 )
                 SELECT id, version FROM given EXCEPT SELECT id, version FROM written"
            ),
            (Self::Sqlite, Verb::Update { set, raises_version, .. }) => {
                let expected = if raises_version { "version - 1" } else { "version" };
                format!(
                    "\
                     WITH {source}
                     UPDATE outbox_message AS o SET {set}
                     FROM given AS g
                     WHERE o.id = g.id AND o.version = g.version{guard}
                     RETURNING id, {expected}"
                )
            }
            (Self::Sqlite, Verb::Delete { .. }) => format!(
                "\
                 WITH {source}
                 DELETE FROM outbox_message AS o
                 WHERE (o.id, o.version) IN (SELECT id, version FROM given){guard}
                 RETURNING id, version"
            ),
        }
    }

    /// The fences that a statement of [`fenced`](Self::fenced) missed, from what it returned.
    pub(super) fn lost(self, given: &[Fence], returned: Vec<Fence>) -> Vec<Fence> {
        match self {
            Self::Postgres => returned,
            Self::Sqlite => {
                let written: std::collections::HashSet<Fence> = returned.into_iter().collect();
                given.iter().copied().filter(|fence| !written.contains(fence)).collect()
            }
        }
    }

    /// The common table expression `given`: one row for each fence.
    fn given(self, columns: &[(&str, Column)]) -> String {
        let all = [("id", Column::Integer), ("version", Column::Integer)];
        let all = all.iter().chain(columns).enumerate();
        match self {
            Self::Postgres => {
                let (arrays, names): (Vec<_>, Vec<_>) = all
                    .map(|(i, (name, column))| {
                        let sql_type = match column {
                            Column::Integer => "bigint",
                            Column::Text => "text",
                        };
                        (format!("${}::{sql_type}[]", i + 1), *name)
                    })
                    .unzip();
                format!(
                    "given AS MATERIALIZED (SELECT * FROM unnest({}) AS g({}))",
                    arrays.join(", "),
                    names.join(", ")
                )
            }
            Self::Sqlite => {
                let columns: Vec<_> = all.map(|(i, (name, _))| format!("value ->> {i} AS {name}")).collect();
                format!("given AS MATERIALIZED (SELECT {} FROM json_each($1))", columns.join(", "))
            }
        }
    }

    /// The parameters that [`given`](Self::given) reads: arrays on PostgreSQL, one JSON text on SQLite.
    pub(super) fn given_values<const N: usize>(
        self,
        rows: impl Iterator<Item = (Fence, [Given; N])>,
    ) -> Vec<Value> {
        match self {
            #[cfg(feature = "postgres")]
            Self::Postgres => {
                let mut fences = (Vec::new(), Vec::new());
                let mut columns: [Vec<Value>; N] = std::array::from_fn(|_| Vec::new());
                let mut types: [Option<sea_orm::sea_query::ArrayType>; N] = std::array::from_fn(|_| None);
                for (fence, given) in rows {
                    fences.0.push(fence.id);
                    fences.1.push(fence.version);
                    for (i, value) in given.into_iter().enumerate() {
                        types[i] = Some(value.array_type());
                        columns[i].push(value.into());
                    }
                }
                let mut values: Vec<Value> = vec![fences.0.into(), fences.1.into()];
                for (array_type, column) in types.into_iter().zip(columns) {
                    // Nothing to write: the statement is not run at all.
                    let array_type = array_type.unwrap_or(sea_orm::sea_query::ArrayType::BigInt);
                    values.push(Value::Array(array_type, Some(Box::new(column))));
                }
                values
            }
            _ => {
                let rows: Vec<serde_json::Value> = rows
                    .map(|(fence, given)| {
                        let mut row = vec![fence.id.into(), fence.version.into()];
                        row.extend(given.into_iter().map(serde_json::Value::from));
                        row.into()
                    })
                    .collect();
                vec![serde_json::Value::from(rows).to_string().into()]
            }
        }
    }
}

/// What a batch statement does to the rows whose fence still matches.
#[derive(Clone, Copy)]
pub(super) enum Verb<'a> {
    Update { set: &'a str, guard: Option<&'a str>, raises_version: bool, skip_locked: bool },
    Delete { guard: Option<&'a str> },
}

impl<'a> Verb<'a> {
    fn guard(self) -> Option<&'a str> {
        match self {
            Self::Update { guard, .. } | Self::Delete { guard } => guard,
        }
    }
}

/// The type of a given column.
#[derive(Clone, Copy)]
pub(super) enum Column {
    Integer,
    Text,
}

/// A value for a given column. There is no null: arrays with nulls cannot be bound.
pub(super) enum Given {
    Integer(i64),
    Text(String),
}

#[cfg(feature = "postgres")]
impl Given {
    fn array_type(&self) -> sea_orm::sea_query::ArrayType {
        match self {
            Self::Integer(_) => sea_orm::sea_query::ArrayType::BigInt,
            Self::Text(_) => sea_orm::sea_query::ArrayType::String,
        }
    }
}

impl From<Given> for Value {
    fn from(given: Given) -> Self {
        match given {
            Given::Integer(value) => value.into(),
            Given::Text(value) => value.into(),
        }
    }
}

impl From<Given> for serde_json::Value {
    fn from(given: Given) -> Self {
        match given {
            Given::Integer(value) => value.into(),
            Given::Text(value) => value.into(),
        }
    }
}

/// What each transaction of ours sets first, in one round trip.
pub(super) fn postgres_settings(statement_timeout: Duration) -> String {
    // PostgreSQL keeps these in a signed 32-bit number of milliseconds.
    let ms = statement_timeout.as_millis().clamp(1, i32::MAX as u128);
    format!(
        "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; \
         SET LOCAL plan_cache_mode = force_custom_plan; \
         SET LOCAL statement_timeout = {ms}; \
         SET LOCAL idle_in_transaction_session_timeout = {ms}"
    )
}
