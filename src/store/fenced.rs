//! Batch writes: one statement for many rows, each under its fence.

use std::collections::HashSet;

use sea_orm::{QueryResult, Value};

use super::{Fence, RowId, Store, StoreError, dialect::Dialect, table::Table};

/// MySQL wants to know which of the tables to lock; MariaDB does not know the word, and takes it for a comment.
pub(super) const FOR_UPDATE_OF_O: &str = "FOR UPDATE /*!80001 OF o */";

/// What a batch does to the rows whose fence still matches.
pub(super) struct Write<'a> {
    /// What it is, for errors.
    pub(super) what: &'static str,
    pub(super) verb: Verb,
    /// What must also be true of a row, beside its version.
    pub(super) guard: Option<String>,
    /// Whether rows that somebody has locked are passed over, and count as lost.
    pub(super) skip_locked: bool,
    /// What each row is given besides its fence: columns of `g`.
    pub(super) given: &'a [(&'a str, Column)],
}

pub(super) enum Verb {
    /// Columns, and the expressions for them. The rows of the table are `o`.
    Update {
        set: Vec<(String, String)>,
        raises_version: bool,
    },
    Delete,
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

impl Store {
    /// Writes a batch and returns the fences that were lost.
    pub(super) async fn write<const N: usize>(
        &self,
        write: &Write<'_>,
        rows: Vec<(Fence, [Given; N])>,
    ) -> Result<Vec<Fence>, StoreError> {
        // In the order of the primary key, so that two writers take row locks in the same order.
        let mut rows = rows;
        rows.sort_unstable_by_key(|(fence, _)| *fence);
        let fences: Vec<Fence> = rows.iter().map(|(fence, _)| *fence).collect();
        if fences.is_empty() {
            return Ok(Vec::new());
        }
        let sql = write.statement(&self.table);
        let values = given_values(&self.table, rows);
        match self.table.dialect {
            Dialect::Postgres => {
                let lost = self.run(write.what, sql, values).await?;
                self.fences(&lost)
            }
            Dialect::Sqlite => {
                let written = self.run(write.what, sql, values).await?;
                let written: HashSet<Fence> = self.fences(&written)?.into_iter().collect();
                Ok(fences.into_iter().filter(|fence| !written.contains(fence)).collect())
            }
            Dialect::MySql => self.write_and_count(write, sql, values, &fences).await,
        }
    }

    /// MySQL says how many rows it wrote, not which. Where that is not all of them, nothing is kept, and they are
    /// locked first to see which they are.
    async fn write_and_count(
        &self,
        write: &Write<'_>,
        sql: String,
        values: Vec<Value>,
        fences: &[Fence],
    ) -> Result<Vec<Fence>, StoreError> {
        let table = &self.table;
        let lock = format!(
            "\
            SELECT {id}, o.{version}
            FROM {given} STRAIGHT_JOIN {name} o ON o.{key} = {given_id}
            WHERE o.{version} = g.version{guard}
            {FOR_UPDATE_OF_O}{skip_locked}",
            id = output_id(table),
            key = table.id,
            version = table.version,
            name = table.name,
            given = given(table, write.given),
            given_id = given_id(table),
            guard = write.and_guard(),
            skip_locked = if write.skip_locked { " SKIP LOCKED" } else { "" },
        );
        let work = async {
            if !write.skip_locked {
                let txn = self.begin().await?;
                if txn.execute(sql.clone(), values.clone()).await? == fences.len() as u64 {
                    txn.commit().await?;
                    return Ok(Vec::new());
                }
                txn.rollback().await?;
            }
            let txn = self.begin().await?;
            let mut written = HashSet::new();
            for row in txn.query(lock, values.clone()).await? {
                written.insert(Fence::read(&row, table)?);
            }
            if !written.is_empty() {
                let ids: Vec<String> = written.iter().map(|fence| literal_id(fence.id)).collect();
                let sql = format!("{sql} AND o.{id} IN ({ids})", id = table.id, ids = ids.join(", "));
                txn.execute(sql, values).await?;
            }
            txn.commit().await?;
            Ok(fences.iter().copied().filter(|fence| !written.contains(fence)).collect())
        };
        self.timed(write.what, work).await
    }

    pub(super) fn fences(&self, rows: &[QueryResult]) -> Result<Vec<Fence>, StoreError> {
        Ok(rows.iter().map(|row| Fence::read(row, &self.table)).collect::<Result<_, _>>()?)
    }
}

impl Write<'_> {
    fn and_guard(&self) -> String {
        self.guard.as_ref().map(|guard| format!(" AND {guard}")).unwrap_or_default()
    }

    /// The result is the fences that were lost (PostgreSQL), those that were written (SQLite, where a `WITH` cannot
    /// change data), or nothing (MySQL).
    fn statement(&self, table: &Table) -> String {
        let Table { name, id, version, .. } = table;
        let (given, guard) = (given(table, self.given), self.and_guard());
        match (table.dialect, &self.verb) {
            (Dialect::Postgres, verb) => {
                // Whoever must not wait for the owner, who may be writing many of these rows in another order,
                // passes over rows that are locked.
                let (locked, join) = if self.skip_locked {
                    let locked = format!(
                        "\
                        locked AS MATERIALIZED (
                            SELECT o.{id} AS id FROM given g
                            JOIN {name} o ON o.{id} = g.id AND o.{version} = g.version
                            WHERE TRUE{guard}
                            ORDER BY o.{id}
                            FOR UPDATE OF o SKIP LOCKED
                        ), "
                    );
                    (locked, " JOIN locked ON locked.id = g.id")
                } else {
                    (String::new(), "")
                };
                let change = match verb {
                    Verb::Update { set, .. } => {
                        format!("UPDATE {name} o SET {} FROM given g{join}", assignments(set, ""))
                    }
                    Verb::Delete => format!("DELETE FROM {name} o USING given g{join}"),
                };
                format!(
                    "\
                    WITH given AS MATERIALIZED (SELECT * FROM {given}), {locked}written AS (
                        {change}
                        WHERE o.{id} = g.id AND o.{version} = g.version{guard}
                        RETURNING g.id, g.version
                    )
                    SELECT id, version FROM given EXCEPT SELECT id, version FROM written"
                )
            }
            (Dialect::Sqlite, Verb::Update { set, raises_version }) => {
                let expected = if *raises_version { format!("{version} - 1") } else { version.clone() };
                format!(
                    "\
                    WITH given AS MATERIALIZED (SELECT * FROM {given})
                    UPDATE {name} AS o SET {set}
                    FROM given AS g
                    WHERE o.{id} = g.id AND o.{version} = g.version{guard}
                    RETURNING {id}, {expected}",
                    set = assignments(set, ""),
                )
            }
            (Dialect::Sqlite, Verb::Delete) => format!(
                "\
                WITH given AS MATERIALIZED (SELECT * FROM {given})
                DELETE FROM {name} AS o
                WHERE (o.{id}, o.{version}) IN (SELECT id, version FROM given){guard}
                RETURNING {id}, {version}"
            ),
            // The batch first: its order is that of the primary key.
            (Dialect::MySql, verb) => {
                let rows = format!("{given} STRAIGHT_JOIN {name} o ON o.{id} = {}", given_id(table));
                let change = match verb {
                    Verb::Update { set, .. } => format!("UPDATE {rows} SET {}", assignments(set, "o.")),
                    Verb::Delete => format!("DELETE o FROM {rows}"),
                };
                format!("{change} WHERE o.{version} = g.version{guard}")
            }
        }
    }
}

fn assignments(set: &[(String, String)], prefix: &str) -> String {
    let set: Vec<_> = set.iter().map(|(column, value)| format!("{prefix}{column} = {value}")).collect();
    set.join(", ")
}

/// The batch as a table `g`: one row for each fence, with its id, its version and the columns given.
pub(super) fn given(table: &Table, columns: &[(&str, Column)]) -> String {
    let uuid = table.roles.has_uuid_key();
    let columns = columns.iter().enumerate().map(|(i, (name, column))| (i + 2, *name, *column));
    match table.dialect {
        Dialect::Postgres => {
            let id_type = if uuid { "uuid" } else { "bigint" };
            let mut arrays = vec![format!("$1::{id_type}[]"), "$2::bigint[]".to_owned()];
            let mut names = vec!["id", "version"];
            for (i, name, column) in columns {
                let sql_type = match column {
                    Column::Integer => "bigint",
                    Column::Text => "text",
                };
                arrays.push(format!("${}::{sql_type}[]", i + 1));
                names.push(name);
            }
            format!("unnest({}) AS g({})", arrays.join(", "), names.join(", "))
        }
        Dialect::Sqlite => {
            let id = if uuid { "unhex(value ->> 0)" } else { "value ->> 0" };
            let mut all = vec![format!("{id} AS id"), "value ->> 1 AS version".to_owned()];
            all.extend(columns.map(|(i, name, _)| format!("value ->> {i} AS {name}")));
            format!("(SELECT {} FROM json_each($1)) AS g", all.join(", "))
        }
        Dialect::MySql => {
            let id_type = if uuid { "CHAR(32)" } else { "BIGINT" };
            let mut all = vec![format!("id {id_type} PATH '$[0]'"), "version BIGINT PATH '$[1]'".to_owned()];
            all.extend(columns.map(|(i, name, column)| {
                let sql_type = match column {
                    Column::Integer => "BIGINT",
                    // On MariaDB it would otherwise be of the character set of the database.
                    Column::Text => "VARCHAR(2000) CHARACTER SET utf8mb4",
                };
                format!("{name} {sql_type} PATH '$[{i}]'")
            }));
            format!("JSON_TABLE($1, '$[*]' COLUMNS ({})) AS g", all.join(", "))
        }
    }
}

/// The id of a row of [`given`], as the table has it.
pub(super) fn given_id(table: &Table) -> &'static str {
    if table.dialect == Dialect::MySql && table.roles.has_uuid_key() { "UNHEX(g.id)" } else { "g.id" }
}

/// The id of `o`, as [`RowId::read`] reads it.
pub(super) fn output_id(table: &Table) -> String {
    let id = format!("o.{}", table.id);
    if table.roles.has_uuid_key() { id } else { table.dialect.integer(&id) }
}

/// The id in SQL, for lists that are too rare to be worth a parameter.
fn literal_id(id: RowId) -> String {
    match id {
        RowId::Integer(id) => id.to_string(),
        RowId::Uuid(id) => format!("x'{}'", id.simple()),
    }
}

/// The parameters that [`given`] reads: arrays on PostgreSQL, one JSON text elsewhere.
pub(super) fn given_values<const N: usize>(table: &Table, rows: Vec<(Fence, [Given; N])>) -> Vec<Value> {
    match table.dialect {
        #[cfg(feature = "postgres")]
        Dialect::Postgres => {
            use sea_orm::sea_query::ArrayType;
            let id_type = if table.roles.has_uuid_key() { ArrayType::Uuid } else { ArrayType::BigInt };
            let (mut ids, mut versions): (Vec<Value>, Vec<i64>) = (Vec::new(), Vec::new());
            let mut columns: [Vec<Value>; N] = std::array::from_fn(|_| Vec::new());
            let mut types: [ArrayType; N] = std::array::from_fn(|_| ArrayType::BigInt);
            for (fence, given) in rows {
                ids.push(fence.id.into());
                versions.push(fence.version);
                for (i, value) in given.into_iter().enumerate() {
                    types[i] = value.array_type();
                    columns[i].push(value.into());
                }
            }
            let mut values = vec![Value::Array(id_type, Some(Box::new(ids))), versions.into()];
            for (array_type, column) in types.into_iter().zip(columns) {
                values.push(Value::Array(array_type, Some(Box::new(column))));
            }
            values
        }
        _ => {
            let rows: Vec<serde_json::Value> = rows
                .into_iter()
                .map(|(fence, given)| {
                    let id = match fence.id {
                        RowId::Integer(id) => id.into(),
                        RowId::Uuid(id) => id.simple().to_string().into(),
                    };
                    let mut row = vec![id, fence.version.into()];
                    row.extend(given.into_iter().map(serde_json::Value::from));
                    row.into()
                })
                .collect();
            vec![serde_json::Value::from(rows).to_string().into()]
        }
    }
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
