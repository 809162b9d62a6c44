//! Whether the table and the server have what the relay needs.

use sea_orm::{ColumnType, DbErr, QueryResult};

use super::{
    Store, StoreError,
    dialect::Dialect,
    fenced::{Column, given},
    table::{Role, Roles, Table, literal},
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

impl Roles {
    /// What the entity says by itself.
    pub(super) fn check(&self) -> Result<(), StoreError> {
        let integer = |role: &Role| {
            matches!(
                role.column_type,
                ColumnType::TinyInteger
                    | ColumnType::SmallInteger
                    | ColumnType::Integer
                    | ColumnType::BigInteger
                    | ColumnType::TinyUnsigned
                    | ColumnType::SmallUnsigned
                    | ColumnType::Unsigned
                    | ColumnType::BigUnsigned
            )
        };
        if !integer(&self.id) && !self.has_uuid_key() {
            return Err(self.fault(format!("the key {} is neither an integer nor a UUID", self.id.name)));
        }
        if !matches!(self.message_id.column_type, ColumnType::Uuid) {
            return Err(self.fault(format!("the message id {} is no UUID", self.message_id.name)));
        }
        for role in [Some(&self.version), Some(&self.attempts), self.requeues.as_ref()].into_iter().flatten()
        {
            if !integer(role) {
                return Err(self.fault(format!("{} is no integer", role.name)));
            }
        }
        let mut texts = self.statuses;
        texts.sort_unstable();
        if texts.windows(2).any(|pair| pair[0].eq_ignore_ascii_case(pair[1])) {
            return Err(self.fault(format!("two statuses have the same text: {:?}", self.statuses)));
        }
        // A settlement hands the text over as it is.
        if self.statuses.iter().any(|text| text.is_empty() || text.chars().count() > 100) {
            return Err(self.fault("a status text must have 1 to 100 characters".to_owned()));
        }
        Ok(())
    }

    /// What order per key asks of the entity.
    pub(super) fn check_ordering(&self) -> Result<(), StoreError> {
        if self.ordering_key.is_none() || self.sent_at.is_none() {
            return Err(self.fault("order per key needs the roles ordering_key and sent_at".to_owned()));
        }
        if self.has_uuid_key() {
            let fault =
                format!("order per key needs an integer key that rises, and {} is a UUID", self.id.name);
            return Err(self.fault(fault));
        }
        Ok(())
    }

    fn fault(&self, fault: String) -> StoreError {
        StoreError::Entity { table: self.name.clone(), fault }
    }
}

/// What the database says of a column.
struct Described {
    name: String,
    data_type: String,
    nullable: bool,
}

/// What must be true of a column.
#[derive(Clone, Copy)]
enum Need {
    NotNull,
    Nullable,
    NullableTime,
    Anything,
}

impl Store {
    /// Checks that the table is there with every column that the relay uses, that the columns can hold what they are
    /// for, that the indexes are there without which every claim would read the whole table, and what the server is
    /// able to do.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] or [`StoreError::Timeout`] when the database does not answer,
    /// [`StoreError::Table`] when it answers that the table cannot be read, [`StoreError::Schema`] with everything
    /// that is wrong with it, [`StoreError::Unsupported`] when the server is too old.
    pub async fn check_table(&self) -> Result<TableReport, StoreError> {
        let table = &*self.table;
        let all: Vec<String> = table.roles.all().map(|(role, _)| table.quoted(role)).collect();
        let sql = format!("SELECT {} FROM {} WHERE 1 = 0", all.join(", "), table.name);
        self.run("check the table", sql, Vec::new()).await?;
        self.check_server().await?;

        let mut faults = self.column_faults().await?;
        faults.extend(self.index_faults().await?);
        if !faults.is_empty() {
            return Err(StoreError::Schema { table: table.roles.name.clone(), faults });
        }
        Ok(TableReport {
            skip_locked: self.has_skip_locked().await?,
            unknown_statuses: self.unknown_statuses().await?,
        })
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
            // All of it but the last two words has been read before.
            Err(StoreError::Table(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn column_faults(&self) -> Result<Vec<String>, StoreError> {
        let (dialect, roles) = (self.table.dialect, &self.table.roles);
        let sql = match dialect {
            Dialect::Postgres => format!(
                "\
                SELECT attname::text, format_type(atttypid, NULL), CASE WHEN attnotnull THEN 0 ELSE 1 END::bigint
                FROM pg_attribute WHERE attrelid = {}::regclass AND attnum > 0 AND NOT attisdropped",
                literal(&self.table.name)
            ),
            Dialect::MySql => format!(
                "\
                SELECT column_name,
                    CASE WHEN data_type = 'datetime' AND datetime_precision < 3
                        THEN CONCAT('datetime(', datetime_precision, ')') ELSE data_type END,
                    CAST(is_nullable = 'YES' AS SIGNED)
                FROM information_schema.columns WHERE {HERE}"
            ),
            Dialect::Sqlite => {
                r#"SELECT name, type, 1 - "notnull" FROM pragma_table_info($2, COALESCE($1, 'main'))"#.to_owned()
            }
        };
        let values = match dialect {
            Dialect::Postgres => Vec::new(),
            Dialect::MySql | Dialect::Sqlite => self.place(),
        };
        let rows = self.run("describe the table", sql, values).await?;
        let columns: Vec<Described> = rows.iter().map(Described::read).collect::<Result<_, _>>()?;

        let mut faults = Vec::new();
        for (role, need) in roles.all() {
            let Some(column) = columns.iter().find(|column| column.name == role.name) else { continue };
            let Described { name, data_type, nullable } = column;
            match need {
                Need::NotNull if *nullable => faults.push(format!("{name} may be null: make it NOT NULL")),
                Need::Nullable | Need::NullableTime if !nullable => {
                    faults.push(format!("{name} is NOT NULL: it must be able to be null"));
                }
                _ => {}
            }
            let wanted = match dialect {
                Dialect::Postgres => "timestamp with time zone",
                Dialect::MySql => "datetime",
                Dialect::Sqlite => continue,
            };
            if matches!(need, Need::NullableTime) && data_type != wanted {
                let written = if dialect == Dialect::MySql { "datetime(6)" } else { "timestamptz" };
                faults.push(format!("{name} is {data_type}: it must be {written}"));
            }
        }
        Ok(faults)
    }

    async fn index_faults(&self) -> Result<Vec<String>, StoreError> {
        let Table { dialect, roles, name, .. } = &*self.table;
        let key = match self.ordering {
            super::Ordering::Unordered => None,
            super::Ordering::PerKey { .. } => roles.ordering_key.as_ref().zip(roles.sent_at.as_ref()),
        };
        let quoted = |role: &Role| dialect.quote(role.name);
        let mut wanted = vec![(&roles.available_at, {
            let (column, id) = (quoted(&roles.available_at), quoted(&roles.id));
            match dialect {
                Dialect::MySql => format!("({column}, {id})"),
                _ => format!("({column}, {id}) WHERE {column} IS NOT NULL"),
            }
        })];
        if let Some((key, sent_at)) = key {
            let (column, sent_at, id) = (quoted(key), quoted(sent_at), quoted(&roles.id));
            wanted.push((
                key,
                match dialect {
                    Dialect::MySql => format!("({column}, {sent_at}, {id})"),
                    _ => format!("({column}, {id}) WHERE {column} IS NOT NULL AND {sent_at} IS NULL"),
                },
            ));
        }
        let leading = self.leading_columns().await?;
        let missing =
            wanted.into_iter().filter(|(role, _)| !leading.iter().any(|column| column == role.name));
        Ok(missing
            .map(|(role, definition)| {
                let index = dialect.quote(&format!("{}_{}_idx", roles.name, role.name));
                format!(
                    "no index begins with {}, and every claim would read the whole table: \
                     CREATE INDEX {index} ON {name} {definition}",
                    role.name
                )
            })
            .collect())
    }

    /// The first column of each index.
    async fn leading_columns(&self) -> Result<Vec<String>, StoreError> {
        let (sql, values) = match self.table.dialect {
            Dialect::Postgres => (
                format!(
                    "\
                    SELECT a.attname::text FROM pg_index i
                    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
                    WHERE i.indisvalid AND i.indrelid = {}::regclass",
                    literal(&self.table.name)
                ),
                Vec::new(),
            ),
            Dialect::MySql => (
                format!(
                    "SELECT column_name FROM information_schema.statistics WHERE seq_in_index = 1 AND {HERE}"
                ),
                self.place(),
            ),
            Dialect::Sqlite => (
                "\
                SELECT c.name FROM pragma_index_list($2, COALESCE($1, 'main')) i
                JOIN pragma_index_info(i.name, COALESCE($1, 'main')) c
                WHERE c.seqno = 0"
                    .to_owned(),
                self.place(),
            ),
        };
        let rows = self.run("look for indexes", sql, values).await?;
        Ok(rows.iter().filter_map(|row| row.try_get_by_index::<Option<String>>(0).ok().flatten()).collect())
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

impl Roles {
    fn all(&self) -> impl Iterator<Item = (&Role, Need)> {
        use Need::{Anything, NotNull, Nullable, NullableTime};
        let must = [
            // SQLite does not call a key NOT NULL.
            (&self.id, Anything),
            (&self.message_id, NotNull),
            (&self.topic, NotNull),
            (&self.payload, NotNull),
            (&self.status, NotNull),
            (&self.version, NotNull),
            (&self.attempts, NotNull),
            (&self.available_at, NullableTime),
            (&self.claimed_by, Nullable),
            (&self.lease_until, NullableTime),
            (&self.last_error, Nullable),
        ];
        let may = [
            (&self.headers, Anything),
            (&self.content_type, Anything),
            (&self.event_type, Nullable),
            (&self.aggregate_type, Nullable),
            (&self.aggregate_id, Nullable),
            (&self.ordering_key, Nullable),
            (&self.requeues, NotNull),
            (&self.sent_at, NullableTime),
            (&self.failed_at, NullableTime),
        ];
        must.into_iter().chain(may.into_iter().filter_map(|(role, need)| Some((role.as_ref()?, need))))
    }
}

impl Described {
    fn read(row: &QueryResult) -> Result<Self, DbErr> {
        Ok(Self {
            name: row.try_get_by_index(0)?,
            data_type: row.try_get_by_index::<String>(1)?.to_lowercase(),
            nullable: row.try_get_by_index::<i64>(2)? == 1,
        })
    }
}
