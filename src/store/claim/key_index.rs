//! Which index finds the messages of a key, where the planner has to be told.

use std::sync::{Arc, Mutex, PoisonError};

use crate::store::{Store, StoreError, dialect::Dialect};

/// The name of the index, once it is known.
#[derive(Clone, Debug, Default)]
pub(in crate::store) struct KeyIndex(Arc<Mutex<Option<String>>>);

impl KeyIndex {
    fn get(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, hint: Option<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = hint;
    }

    /// It may have been dropped for another one.
    pub(in crate::store) fn forget(&self) {
        self.set(None);
    }
}

impl Store {
    /// The index hint for the table `p` that is searched for unfinished messages of a key.
    ///
    /// MySQL and MariaDB take the first match in the order of the id from whatever index has that order, and where
    /// few keys have many sent messages, they take the primary key or the whole index: every message ever sent, once
    /// for each key of a claim. No other form of the query keeps them from it.
    pub(super) async fn key_index_hint(&self) -> Result<String, StoreError> {
        let (table, roles) = (&self.table, &self.table.roles);
        let Some((key, sent_at)) = roles.ordering_key.as_ref().zip(roles.sent_at.as_ref()) else {
            return Ok(String::new());
        };
        if table.dialect != Dialect::MySql {
            return Ok(String::new());
        }
        if let Some(hint) = self.key_index.get() {
            return Ok(hint);
        }
        let sql = "\
            SELECT index_name FROM information_schema.statistics
            WHERE table_schema = COALESCE($1, DATABASE()) AND table_name = $2
                /*!80001 AND is_visible = 'YES' */ /*M!100600 AND ignored = 'NO' */
            GROUP BY index_name
            HAVING SUBSTRING_INDEX(GROUP_CONCAT(column_name ORDER BY seq_in_index), ',', 2) = CONCAT($3, ',', $4)
            LIMIT 1";
        let values = vec![
            roles.schema.clone().into(),
            roles.name.clone().into(),
            key.name.to_string().into(),
            sent_at.name.to_string().into(),
        ];
        let rows = self.run("look for the index of the key", sql.to_owned(), values).await?;
        let hint = match rows.first() {
            Some(row) => {
                format!(" FORCE INDEX ({})", table.dialect.quote(&row.try_get_by_index::<String>(0)?))
            }
            None => String::new(),
        };
        self.key_index.set(Some(hint.clone()));
        Ok(hint)
    }
}
