//! Whether the indexes are there without which every claim would read the whole table.

use sea_orm::{DbErr, QueryResult};

use super::HERE;
use crate::store::{
    Ordering, Store, StoreError,
    dialect::Dialect,
    table::{Role, Table, literal},
};

impl Store {
    pub(super) async fn index_faults(&self) -> Result<Vec<String>, StoreError> {
        let Table { dialect, roles, name, .. } = &*self.table;
        let key = match self.ordering {
            Ordering::Unordered => None,
            Ordering::PerKey { .. } => roles.ordering_key.as_ref().zip(roles.sent_at.as_ref()),
        };
        let quoted = |role: &Role| dialect.quote(role.name);
        let due = &roles.available_at;
        let mut wanted = vec![(due, vec![format!("{} is not null", due.name)], {
            let (column, id) = (quoted(due), quoted(&roles.id));
            match dialect {
                Dialect::MySql => format!("({column}, {id})"),
                _ => format!("({column}, {id}) WHERE {column} IS NOT NULL"),
            }
        })];
        if let Some((key, sent_at)) = key {
            let (column, sent, id) = (quoted(key), quoted(sent_at), quoted(&roles.id));
            let harmless = vec![format!("{} is not null", key.name), format!("{} is null", sent_at.name)];
            let definition = match dialect {
                Dialect::MySql => format!("({column}, {sent}, {id})"),
                _ => format!("({column}, {id}) WHERE {column} IS NOT NULL AND {sent} IS NULL"),
            };
            wanted.push((key, harmless, definition));
        }
        let indexes = self.indexes().await?;
        let missing = wanted.into_iter().filter(|(role, harmless, _)| {
            !indexes.iter().any(|index| {
                index.leading.eq_ignore_ascii_case(role.name)
                    && index.conditions.iter().all(|c| harmless.iter().any(|h| h.eq_ignore_ascii_case(c)))
            })
        });
        Ok(missing
            .map(|(role, _, definition)| {
                // PostgreSQL would cut a longer name off, MySQL would refuse it.
                let index: String = format!("{}_{}", roles.name, role.name).chars().take(40).collect();
                format!(
                    "no index that serves all unfinished rows begins with {}, and every claim would read the whole \
                     table: CREATE INDEX {} ON {name} {definition}",
                    role.name,
                    dialect.quote(&format!("{index}_idx")),
                )
            })
            .collect())
    }

    async fn indexes(&self) -> Result<Vec<Index>, StoreError> {
        let (sql, values) = match self.table.dialect {
            // Of an index on an expression the first column is none.
            Dialect::Postgres => (
                format!(
                    "\
                    SELECT a.attname::text, pg_get_expr(i.indpred, i.indrelid) FROM pg_index i
                    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
                    JOIN pg_class c ON c.oid = i.indexrelid
                    JOIN pg_am m ON m.oid = c.relam
                    WHERE i.indisvalid AND m.amname = 'btree' AND i.indrelid = {}::regclass",
                    literal(&self.table.name)
                ),
                Vec::new(),
            ),
            Dialect::MySql => (
                format!(
                    "SELECT {}, NULL FROM information_schema.statistics \
                     WHERE seq_in_index = 1 AND column_name IS NOT NULL AND {HERE}",
                    self.table.dialect.text("column_name")
                ),
                self.place(),
            ),
            Dialect::Sqlite => {
                let master = self.table.roles.schema.as_deref().unwrap_or("main");
                let sql = format!(
                    "\
                    SELECT c.name, (
                        SELECT substr(m.sql, instr(lower(m.sql), ' where ') + 7) FROM {master}.sqlite_master m
                        WHERE m.type = 'index' AND m.name = i.name AND i.partial = 1
                    )
                    FROM pragma_index_list($2, COALESCE($1, 'main')) i
                    JOIN pragma_index_info(i.name, COALESCE($1, 'main')) c
                    WHERE c.seqno = 0 AND c.name IS NOT NULL",
                    master = self.table.dialect.quote(master),
                );
                (sql, self.place())
            }
        };
        let rows = self.run("look for indexes", sql, values).await?;
        let read = |row: &QueryResult| -> Result<_, DbErr> {
            let condition: Option<String> = row.try_get_by_index(1)?;
            Ok(Index {
                leading: row.try_get_by_index(0)?,
                conditions: conditions(&condition.unwrap_or_default()),
            })
        };
        Ok(rows.iter().map(read).collect::<Result<_, _>>()?)
    }
}

/// An index of the table.
struct Index {
    leading: String,
    /// What is true of the rows in it: nothing, where it has all.
    conditions: Vec<String>,
}

/// The parts of a condition in SQL, without the marks that do not matter.
fn conditions(sql: &str) -> Vec<String> {
    let plain: String = sql.chars().filter(|c| !matches!(c, '(' | ')' | '"' | '`' | '[' | ']')).collect();
    let words: Vec<String> = plain.split_whitespace().map(str::to_lowercase).collect();
    let parts = words.split(|word| word == "and").map(|part| part.join(" "));
    parts.filter(|part| !part.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_is_known_however_it_is_written() {
        let expected = ["key is not null", "sent_at is null"];
        for sql in
            ["((key IS NOT NULL) AND (sent_at IS NULL))", "\"key\" IS NOT  NULL\n and [sent_at] is null"]
        {
            assert_eq!(conditions(sql), expected, "{sql}");
        }
        assert!(conditions("").is_empty());
    }
}
