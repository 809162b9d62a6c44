//! Load: fetch the payloads that were too large to come with their claims.

use std::collections::HashMap;

use bytes::Bytes;

use super::{
    Fence, Store, StoreError,
    claimed::{payload_column, read_payload},
    dialect::Dialect,
    fenced::{given, given_id, given_values, output_id},
    table::Table,
};

impl Store {
    /// Whether the database answers, and lets the table be read.
    pub(crate) async fn ping(&self) -> Result<(), StoreError> {
        let sql = format!("SELECT {} FROM {} WHERE 1 = 0", self.table.id, self.table.name);
        self.run("answer", sql, Vec::new()).await.map(|_| ())
    }

    /// The payloads of rows that still have the version named. Rows that somebody else has taken over are missing.
    ///
    /// # Errors
    /// When the database does not carry it out, or a payload cannot be read.
    pub async fn load(&self, rows: &[Fence]) -> Result<HashMap<Fence, Bytes>, StoreError> {
        if rows.is_empty() {
            return Ok(HashMap::new());
        }
        let table = &*self.table;
        let Table { name, id, version, .. } = table;
        // The batch first, so that each of its rows is looked up by its key.
        let join = if table.dialect == Dialect::MySql { "STRAIGHT_JOIN" } else { "JOIN" };
        let sql = format!(
            "\
            SELECT {output_id}, {version_read}, {payload}
            FROM {given} {join} {name} o ON o.{id} = {given_id}
            WHERE o.{version} = g.version",
            output_id = output_id(table),
            version_read = table.dialect.integer(&format!("o.{version}")),
            payload = payload_column(table, "o."),
            given = given(table, &[]),
            given_id = given_id(table),
        );
        let values = given_values(table, rows.iter().map(|fence| (*fence, [])).collect());
        let rows = self.run("load payloads", sql, values).await?;
        let mut payloads = HashMap::with_capacity(rows.len());
        for row in &rows {
            payloads.insert(Fence::read(row, table)?, read_payload(row, 2, table)?.into());
        }
        Ok(payloads)
    }
}
