//! Whether the table and the server have what the relay needs.

mod columns;
mod entity;
mod indexes;

use sea_orm::{DbErr, QueryResult};

use super::{
    Store, StoreError,
    dialect::Dialect,
    fenced::{Column, given},
    table::{Roles, Table},
};

/// What a look at the table found that a relay can live with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableReport {
    /// Whether [`ClaimStrategy::SkipLocked`](super::ClaimStrategy::SkipLocked) can be used.
    pub skip_locked: bool,
    /// Status texts that mean nothing, among the first 10,000 unfinished rows, and how many rows have each. No relay
    /// touches them.
    pub unknown_statuses: Vec<(String, u64)>,
}

/// Where MySQL and MariaDB describe the table.
const HERE: &str = "table_schema = COALESCE($1, DATABASE()) AND table_name = $2";

impl Store {
    /// Checks that the table is there with every column that the relay uses, that the columns can hold what they are
    /// for, that the indexes are there without which every claim would read the whole table, and what the server is
    /// able to do. It reads the catalogue and at most 10,000 entries of the due index.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] or [`StoreError::Timeout`] when the database does not answer,
    /// [`StoreError::Table`] when it answers that the table cannot be read, [`StoreError::Schema`] with everything
    /// that is wrong with it, [`StoreError::Unsupported`] when the server is too old.
    pub async fn check_table(&self) -> Result<TableReport, StoreError> {
        let table = &*self.table;
        let all: Vec<String> = table.roles.all().map(|(role, _)| table.quoted(role)).collect();
        let sql = format!("SELECT {} FROM {} WHERE 1 = 0", all.join(", "), table.name);
        if let Err(error) = self.run("check the table", sql, Vec::new()).await {
            return Err(self.unusable(error).await);
        }
        self.check_server().await?;

        let mut faults = self.column_faults(&self.described().await?);
        faults.extend(self.index_faults().await?);
        if !faults.is_empty() {
            return Err(self.schema(faults));
        }
        let skip_locked = match self.has_skip_locked().await {
            Err(error @ StoreError::Table(_)) => return Err(self.unusable(error).await),
            other => other?,
        };
        Ok(TableReport { skip_locked, unknown_statuses: self.unknown_statuses().await? })
    }

    fn schema(&self, faults: Vec<String>) -> StoreError {
        StoreError::Schema { table: self.table.roles.name.clone(), faults }
    }

    /// Says of a table of one's own what is missing, where that can be found out.
    async fn unusable(&self, error: StoreError) -> StoreError {
        let StoreError::Table(refused) = error else { return error };
        if self.table.roles.name == Roles::default().name {
            return StoreError::Table(refused);
        }
        let described = self.described().await.unwrap_or_default();
        let missing: Vec<String> = match &described[..] {
            [] => Vec::new(),
            described => self
                .table
                .roles
                .all()
                .filter(|(role, _)| self.find(described, role).is_none())
                .map(|(role, _)| columns::missing(role))
                .collect(),
        };
        match missing.is_empty() {
            true => self.schema(vec![format!("it cannot be used: {refused}")]),
            false => self.schema(missing),
        }
    }

    /// Batches are handed to MySQL and MariaDB as JSON.
    async fn check_server(&self) -> Result<(), StoreError> {
        if self.table.dialect != Dialect::MySql {
            return Ok(());
        }
        let sql = format!("SELECT version FROM {}", given(&self.table, &[("text", Column::Text)]));
        match self.run("check the server", sql, vec!["[]".into()]).await {
            Err(StoreError::Table(_)) => {
                let version = self.run("check the server", "SELECT VERSION()".to_owned(), Vec::new()).await?;
                let version = version.first().and_then(|row| row.try_get_by_index::<String>(0).ok());
                Err(StoreError::Unsupported(version.unwrap_or_else(|| "this server".to_owned())))
            }
            other => other.map(|_| ()),
        }
    }

    async fn has_skip_locked(&self) -> Result<bool, StoreError> {
        let Table { dialect, name, id, .. } = &*self.table;
        if *dialect == Dialect::Sqlite {
            return Ok(true);
        }
        let sql = format!("SELECT {id} FROM {name} WHERE 1 = 0 FOR UPDATE SKIP LOCKED");
        match self.run("check the server", sql, Vec::new()).await {
            Ok(_) => Ok(true),
            // All of it but the last two words has been read before. PostgreSQL has them: there it is the right to
            // write that is missing.
            Err(StoreError::Table(_)) if *dialect == Dialect::MySql => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn unknown_statuses(&self) -> Result<Vec<(String, u64)>, StoreError> {
        let Table { dialect, name, id, status, available_at, pending, processing, .. } = &*self.table;
        let sql = format!(
            "\
            SELECT {text}, {count} FROM (
                SELECT {status} FROM {name}
                WHERE {available_at} IS NOT NULL ORDER BY {available_at}, {id} LIMIT 10000
            ) AS unfinished
            WHERE {status} NOT IN ({pending}, {processing})
            GROUP BY {status}",
            text = dialect.text(status),
            count = dialect.integer("COUNT(*)"),
        );
        let rows = self.run("look for unknown statuses", sql, Vec::new()).await?;
        let read = |row: &QueryResult| -> Result<_, DbErr> {
            Ok((row.try_get_by_index::<String>(0)?, row.try_get_by_index::<i64>(1)?.unsigned_abs()))
        };
        Ok(rows.iter().map(read).collect::<Result<_, _>>()?)
    }

    /// Schema and name of the table, as values.
    fn place(&self) -> Vec<sea_orm::Value> {
        vec![self.table.roles.schema.clone().into(), self.table.roles.name.clone().into()]
    }
}
