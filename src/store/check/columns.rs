//! Whether the columns of the table can hold what they are for.

use sea_orm::{DbErr, QueryResult};

use super::HERE;
use crate::store::{
    Store, StoreError,
    dialect::Dialect,
    table::{Role, Roles, literal},
};

/// What the database says of a column.
pub(super) struct Described {
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
pub(super) struct Need {
    null: Null,
    form: Form,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Null {
    Never,
    Possible,
    Whatever,
}

#[derive(Clone, Copy)]
pub(super) enum Form {
    Integer,
    Uuid,
    Time,
    /// With room for so many characters.
    Text(usize),
    Status,
    Whatever,
}

impl Store {
    pub(super) fn find<'a>(&self, columns: &'a [Described], role: &Role) -> Option<&'a Described> {
        columns.iter().find(|column| match self.table.dialect {
            Dialect::Postgres => column.name == role.name,
            Dialect::MySql | Dialect::Sqlite => column.name.eq_ignore_ascii_case(role.name),
        })
    }

    pub(super) async fn described(&self) -> Result<Vec<Described>, StoreError> {
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

    pub(super) fn column_faults(&self, columns: &[Described]) -> Vec<String> {
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
}

pub(super) fn missing(role: &Role) -> String {
    format!("there is no column {}: add it, or name another for its role", role.name)
}

/// Which status texts are missing from `enum('a','b')`, as MySQL describes a column.
fn unknown_to(labels: &str, statuses: [&str; 4]) -> Option<String> {
    let labels = labels.to_lowercase();
    let missing: Vec<&str> =
        statuses.into_iter().filter(|text| !labels.contains(&literal(text).to_lowercase())).collect();
    (!missing.is_empty()).then(|| missing.join(", "))
}

impl Roles {
    pub(super) fn all(&self) -> impl Iterator<Item = (&Role, Need)> {
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

    #[test]
    fn an_enum_says_what_it_does_not_take() {
        assert_eq!(unknown_to("enum('a','b','C','d')", ["a", "b", "c", "d"]), None);
        assert_eq!(unknown_to("enum('a','bb')", ["a", "b", "c", "bb"]), Some("b, c".to_owned()));
    }
}
