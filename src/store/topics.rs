//! Which topics are in use.

use sea_orm::DbErr;

use super::{Store, StoreError, table::Table};

impl Store {
    /// At most `limit` topics of messages that wait, among the first 10,000 of them.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn topics(&self, limit: u64) -> Result<Vec<String>, StoreError> {
        let Table { name, id, available_at, roles, .. } = &*self.table;
        let topic = self.table.text(&roles.topic, "");
        let sql = format!(
            "\
            SELECT DISTINCT topic FROM (
                SELECT {topic} AS topic FROM {name}
                WHERE {available_at} IS NOT NULL ORDER BY {available_at}, {id} LIMIT 10000
            ) AS waiting
            ORDER BY topic LIMIT $1"
        );
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let rows = self.run("look for topics", sql, vec![limit.into()]).await?;
        let topics: Result<Vec<Option<String>>, DbErr> =
            rows.iter().map(|row| row.try_get_by_index(0)).collect();
        Ok(topics?.into_iter().flatten().collect())
    }
}
