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
        let text = |role: &&Role| {
            !role.is_text() && !matches!(role.column_type, ColumnType::Enum { .. } | ColumnType::Custom(_))
        };
        let texts = [&self.topic, &self.status, &self.claimed_by, &self.last_error].into_iter();
        let optional = [
            &self.content_type,
            &self.event_type,
            &self.aggregate_type,
            &self.aggregate_id,
            &self.ordering_key,
        ];
        if let Some(role) = texts.chain(optional.into_iter().flatten()).find(text) {
            return Err(self.fault(format!("{} is no text", role.name)));
        }
        let texts = self.statuses;
        if (1..4).any(|i| texts[..i].iter().any(|text| text.eq_ignore_ascii_case(texts[i]))) {
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
    /// How many characters it holds, where there is a limit.
    length: Option<i64>,
    /// Which of the status texts it does not take, if it is an enum.
    unknown: Option<String>,
}

/// What must be true of a column.
#[derive(Clone, Copy)]
struct Need {
    null: Null,
    form: Form,
}

#[derive(Clone, Copy, PartialEq)]
enum Null {
    Never,
    Possible,
    Whatever,
}

#[derive(Clone, Copy)]
enum Form {
    Integer,
    Uuid,
    Time,
    /// With room for so many characters.
    Text(usize),
    Status,
    Whatever,
}

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
        let columns = self.described().await.unwrap_or_default();
        let missing: Vec<String> = match &columns[..] {
            [] => Vec::new(),
            columns => self
                .table
                .roles
                .all()
                .filter(|(role, _)| self.find(columns, role).is_none())
                .map(|(role, _)| missing(role))
                .collect(),
        };
        match missing.is_empty() {
            true => self.schema(vec![format!("it cannot be used: {refused}")]),
            false => self.schema(missing),
        }
    }

    fn find<'a>(&self, columns: &'a [Described], role: &Role) -> Option<&'a Described> {
        columns.iter().find(|column| match self.table.dialect {
            Dialect::Postgres => column.name == role.name,
            Dialect::MySql | Dialect::Sqlite => column.name.eq_ignore_ascii_case(role.name),
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
            // All of it but the last two words has been read before. PostgreSQL has them: there it is the right to
            // write that is missing.
            Err(StoreError::Table(_)) if *dialect == Dialect::MySql => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn described(&self) -> Result<Vec<Described>, StoreError> {
        let table = &*self.table;
        let sql = match table.dialect {
            Dialect::Postgres => {
                let statuses = table.roles.statuses.map(literal).join(", ");
                let relation = literal(&table.name);
                format!(
                    "\
                    SELECT a.attname::text,
                        format_type(COALESCE(NULLIF(t.typbasetype, 0), t.oid), NULL),
                        (CASE WHEN a.attnotnull THEN 0 ELSE 1 END)::bigint,
                        (CASE WHEN a.atttypid IN ('varchar'::regtype, 'bpchar'::regtype) AND a.atttypmod > 4
                            THEN a.atttypmod - 4 END)::bigint,
                        CASE WHEN t.typtype = 'e' THEN (
                            SELECT string_agg(s.label, ', ') FROM unnest(ARRAY[{statuses}]) AS s(label)
                            WHERE s.label NOT IN (SELECT enumlabel::text FROM pg_enum WHERE enumtypid = t.oid)
                        ) END
                    FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
                    WHERE a.attrelid = {relation}::regclass AND a.attnum > 0 AND NOT a.attisdropped"
                )
            }
            // The kind of text that the views of information_schema give differs from server to server.
            Dialect::MySql => format!(
                "\
                SELECT {name},
                    CASE WHEN data_type = 'datetime' AND datetime_precision < 3
                        THEN CONCAT('datetime(', datetime_precision, ')') ELSE {data_type} END,
                    CAST(is_nullable = 'YES' AS SIGNED),
                    CAST(character_maximum_length AS SIGNED),
                    CASE WHEN data_type = 'enum' THEN {column_type} END
                FROM information_schema.columns WHERE {HERE}",
                name = table.dialect.text("column_name"),
                data_type = table.dialect.text("data_type"),
                column_type = table.dialect.text("column_type"),
            ),
            Dialect::Sqlite => {
                r#"SELECT name, type, 1 - "notnull", NULL, NULL FROM pragma_table_xinfo($2, COALESCE($1, 'main'))"#
                    .to_owned()
            }
        };
        let values = match table.dialect {
            Dialect::Postgres => Vec::new(),
            Dialect::MySql | Dialect::Sqlite => self.place(),
        };
        let rows = self.run("describe the table", sql, values).await?;
        let mut columns = rows.iter().map(Described::read).collect::<Result<Vec<_>, _>>()?;
        if table.dialect == Dialect::MySql {
            for column in &mut columns {
                column.unknown =
                    column.unknown.take().and_then(|labels| unknown_to(&labels, table.roles.statuses));
            }
        }
        Ok(columns)
    }

    fn column_faults(&self, columns: &[Described]) -> Vec<String> {
        let (dialect, roles) = (self.table.dialect, &self.table.roles);
        let mut faults = Vec::new();
        for (role, need) in roles.all() {
            let Some(column) = self.find(columns, role) else {
                // SQLite reads a quoted name that is no column as a text.
                faults.push(missing(role));
                continue;
            };
            let Described { name, data_type, nullable, length, unknown } = column;
            match need.null {
                Null::Never if *nullable => faults.push(format!("{name} may be null: make it NOT NULL")),
                Null::Possible if !nullable => {
                    faults.push(format!("{name} is NOT NULL: it must be able to be null"));
                }
                _ => {}
            }
            let (fits, wanted) = match (dialect, need.form) {
                // There a column holds whatever it is given.
                (Dialect::Sqlite, _) | (_, Form::Whatever) => continue,
                (Dialect::Postgres, Form::Time) => {
                    (data_type == "timestamp with time zone", "timestamptz".to_owned())
                }
                (Dialect::MySql, Form::Time) => (data_type == "datetime", "datetime(6)".to_owned()),
                (Dialect::Postgres, Form::Uuid) => (data_type == "uuid", "uuid".to_owned()),
                (Dialect::MySql, Form::Uuid) => {
                    (matches!(&data_type[..], "binary" | "varbinary"), "binary(16)".to_owned())
                }
                (Dialect::Postgres, Form::Integer) => {
                    (matches!(&data_type[..], "smallint" | "integer" | "bigint"), "bigint".to_owned())
                }
                (Dialect::MySql, Form::Integer) => (data_type.ends_with("int"), "bigint".to_owned()),
                (_, Form::Text(room)) => (true, format!("a text of {room} characters")),
                (_, Form::Status) => (true, "a text".to_owned()),
            };
            if !fits {
                faults.push(format!("{name} is {data_type}: it must be {wanted}"));
            }
            let room = match need.form {
                Form::Text(room) => room,
                Form::Status => roles.statuses.iter().map(|text| text.chars().count()).max().unwrap_or(0),
                _ => continue,
            };
            if unknown.is_none()
                && length.is_some_and(|length| length < i64::try_from(room).unwrap_or(i64::MAX))
            {
                let length = length.unwrap_or_default();
                faults.push(format!("{name} holds {length} characters: it must hold {room}"));
            }
            if let (Form::Status, Some(unknown)) = (need.form, unknown) {
                faults.push(format!(
                    "{name} is an enum without {unknown}: add it to the enum, or give its texts by `status_text`"
                ));
            }
        }
        faults
    }

    async fn index_faults(&self) -> Result<Vec<String>, StoreError> {
        let Table { dialect, roles, name, .. } = &*self.table;
        let key = match self.ordering {
            super::Ordering::Unordered => None,
            super::Ordering::PerKey { .. } => roles.ordering_key.as_ref().zip(roles.sent_at.as_ref()),
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

fn missing(role: &Role) -> String {
    format!("there is no column {}: add it, or name another for its role", role.name)
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

/// Which status texts are missing from `enum('a','b')`, as MySQL describes a column.
fn unknown_to(labels: &str, statuses: [&str; 4]) -> Option<String> {
    let labels = labels.to_lowercase();
    let missing: Vec<&str> =
        statuses.into_iter().filter(|text| !labels.contains(&literal(text).to_lowercase())).collect();
    (!missing.is_empty()).then(|| missing.join(", "))
}

impl Roles {
    fn all(&self) -> impl Iterator<Item = (&Role, Need)> {
        let need = |null, form| Need { null, form };
        let key = if self.has_uuid_key() { Form::Uuid } else { Form::Integer };
        let must = [
            // SQLite does not call a key NOT NULL.
            (&self.id, need(Null::Whatever, key)),
            // A row without one of these fails alone.
            (&self.message_id, need(Null::Whatever, Form::Uuid)),
            (&self.topic, need(Null::Whatever, Form::Whatever)),
            (&self.payload, need(Null::Whatever, Form::Whatever)),
            (&self.status, need(Null::Never, Form::Status)),
            (&self.version, need(Null::Never, Form::Integer)),
            (&self.attempts, need(Null::Never, Form::Integer)),
            (&self.available_at, need(Null::Possible, Form::Time)),
            (&self.claimed_by, need(Null::Possible, Form::Text(100))),
            (&self.lease_until, need(Null::Possible, Form::Time)),
            (&self.last_error, need(Null::Possible, Form::Text(2_000))),
        ];
        let optional = need(Null::Possible, Form::Whatever);
        let may = [
            (&self.headers, need(Null::Whatever, Form::Whatever)),
            (&self.content_type, need(Null::Whatever, Form::Whatever)),
            (&self.event_type, optional),
            (&self.aggregate_type, optional),
            (&self.aggregate_id, optional),
            (&self.ordering_key, optional),
            (&self.requeues, need(Null::Never, Form::Integer)),
            (&self.sent_at, need(Null::Possible, Form::Time)),
            (&self.failed_at, need(Null::Possible, Form::Time)),
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
            length: row.try_get_by_index(3)?,
            unknown: row.try_get_by_index(4)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(change: impl FnOnce(&mut Roles)) -> String {
        let mut roles = Roles::default();
        change(&mut roles);
        roles.check().expect_err("it is refused").to_string()
    }

    #[test]
    fn a_column_of_a_wrong_type_is_refused_by_name() {
        assert!(Roles::default().check().is_ok());
        for (fault, expected) in [
            (fault(|roles| roles.id = roles.topic.clone()), "the key topic is neither an integer nor a UUID"),
            (fault(|roles| roles.message_id = roles.id.clone()), "the message id id is no UUID"),
            (fault(|roles| roles.version = roles.topic.clone()), "topic is no integer"),
            (fault(|roles| roles.aggregate_id = Some(roles.id.clone())), "id is no text"),
            (fault(|roles| roles.statuses = ["new", "taken", "done", "Done"]), "the same text"),
            (fault(|roles| roles.statuses = ["", "taken", "done", "dead"]), "1 to 100 characters"),
        ] {
            assert!(fault.contains("outbox_message") && fault.contains(expected), "{fault}");
        }
    }

    #[test]
    fn order_per_key_needs_a_key_that_rises() {
        let mut roles = Roles::default();
        assert!(roles.check_ordering().is_ok());
        roles.id = roles.message_id.clone();
        let fault = roles.check_ordering().expect_err("a UUID does not rise").to_string();
        assert!(fault.contains("an integer key that rises, and message_id is a UUID"), "{fault}");
    }

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

    #[test]
    fn an_enum_says_what_it_does_not_take() {
        assert_eq!(unknown_to("enum('a','b','C','d')", ["a", "b", "c", "d"]), None);
        assert_eq!(unknown_to("enum('a','bb')", ["a", "b", "c", "bb"]), Some("b, c".to_owned()));
    }
}
