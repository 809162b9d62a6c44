//! Tables of an application's own, and what a test needs to know of any table.

use std::{fmt::Debug, marker::PhantomData};

use sea_orm::{ConnectionTrait, DatabaseConnection, IdenStatic, QueryOrder};
use sea_orm_outbox::{
    NewMessage, Outbox, OutboxTable,
    entity::{Status, outbox_message},
    store::{Fence, Store},
};

use super::{Kind, TestDatabase};

/// An entity that the tests can look into.
pub(crate) trait Own: OutboxTable {
    /// The statements that make its table.
    fn ddl(kind: Kind) -> Vec<String>;
    /// What a test wants to see of a row.
    fn seen(row: &Self::Model) -> Seen;
    /// A message with everything that the table has columns for.
    fn message(number: usize) -> NewMessage;
    /// Whether the payload is kept as JSON, whose bytes may differ.
    const JSON: bool = false;
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Seen {
    pub(crate) fence: Fence,
    pub(crate) status: String,
    pub(crate) attempts: i64,
    pub(crate) last_error: Option<String>,
    pub(crate) is_due: bool,
    pub(crate) is_claimed: bool,
}

impl Own for outbox_message::Entity {
    fn ddl(_: Kind) -> Vec<String> {
        // The migrations make it.
        Vec::new()
    }

    fn seen(row: &Self::Model) -> Seen {
        Seen {
            fence: Fence::from(row),
            status: row.status.as_str().to_owned(),
            attempts: row.attempts.into(),
            last_error: row.last_error.clone(),
            is_due: row.available_at.is_some(),
            is_claimed: row.claimed_by.is_some() || row.lease_until.is_some(),
        }
    }

    fn message(number: usize) -> NewMessage {
        NewMessage::json("t", &number).expect("a number is JSON").aggregate("order", number).header("a", "b")
    }
}

/// The table of an entity, in one database.
pub(crate) struct Bench<E> {
    pub(crate) db: DatabaseConnection,
    pub(crate) store: Store,
    kind: Kind,
    entity: PhantomData<E>,
}

impl<E: Own> Bench<E> {
    pub(crate) async fn create(database: &TestDatabase) -> Self {
        Self::create_with(database, str::to_owned).await
    }

    /// With statements that are changed first.
    pub(crate) async fn create_with(database: &TestDatabase, change: impl Fn(&str) -> String) -> Self {
        for sql in E::ddl(database.kind) {
            let sql = change(&sql);
            database.db.execute_unprepared(&sql).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
        }
        let db = database.db.clone();
        let store = Store::for_table::<E>(db.clone()).expect("the entity can be an outbox");
        Self { db, store, kind: database.kind, entity: PhantomData }
    }

    pub(crate) async fn enqueue(&self, count: usize) {
        let messages = (0..count).map(E::message);
        Outbox::for_table::<E>().enqueue_many(&self.db, messages).await.expect("messages are enqueued");
    }

    /// All rows by id.
    pub(crate) async fn rows(&self) -> Vec<E::Model> {
        E::find().order_by_asc(E::id()).all(&self.db).await.expect("the rows can be read")
    }

    pub(crate) async fn seen(&self) -> Vec<Seen> {
        self.rows().await.iter().map(E::seen).collect()
    }

    /// The only row.
    pub(crate) async fn one(&self) -> Seen {
        let mut seen = self.seen().await;
        assert_eq!(seen.len(), 1, "one row is expected");
        seen.remove(0)
    }

    pub(crate) async fn count(&self, status: Status) -> usize {
        self.seen().await.iter().filter(|row| row.status == E::status_text(status)).count()
    }

    pub(crate) async fn empty(&self) {
        self.execute(&format!("DELETE FROM {}", self.name())).await;
    }

    /// Changes every row behind everybody's back.
    pub(crate) async fn set(&self, column: E::Column, value: &str) {
        self.execute(&format!("UPDATE {} SET {} = {value}", self.name(), self.quoted(column))).await;
    }

    /// Makes every lease end a moment ago, as if its time had passed.
    pub(crate) async fn let_leases_end(&self) {
        let sql = format!(
            "UPDATE {} SET {} = {} WHERE {} = '{}'",
            self.name(),
            self.quoted(E::lease_until()),
            self.quoted(E::available_at()),
            self.quoted(E::status()),
            E::status_text(Status::Processing),
        );
        self.execute(&sql).await;
    }

    pub(crate) async fn execute(&self, sql: &str) {
        self.db.execute_unprepared(sql).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
    }

    pub(crate) fn name(&self) -> String {
        let entity = E::default();
        match entity.schema_name() {
            Some(schema) => format!("{}.{}", self.quote(schema), self.quote(entity.table_name())),
            None => self.quote(entity.table_name()),
        }
    }

    pub(crate) fn quoted(&self, column: E::Column) -> String {
        self.quote(column.as_str())
    }

    fn quote(&self, name: &str) -> String {
        match self.kind {
            Kind::MySql | Kind::MariaDb => format!("`{name}`"),
            _ => format!("\"{name}\""),
        }
    }
}

/// Rows as a test compares them.
pub(crate) fn shown(rows: &impl Debug) -> String {
    format!("{rows:?}")
}

/// How a database spells a type.
pub(crate) fn spelled(kind: Kind, postgres: &str, mysql: &str, sqlite: &str) -> String {
    match kind {
        Kind::Postgres | Kind::OldestPostgres => postgres,
        Kind::MySql | Kind::MariaDb => mysql,
        Kind::Sqlite => sqlite,
    }
    .to_owned()
}

pub(crate) fn time(kind: Kind) -> String {
    spelled(kind, "timestamptz", "datetime(6)", "text")
}

pub(crate) fn uuid(kind: Kind) -> String {
    spelled(kind, "uuid", "binary(16)", "uuid_text")
}

pub(crate) fn counter(kind: Kind, integer: &str) -> String {
    match kind {
        Kind::Sqlite => "integer PRIMARY KEY AUTOINCREMENT".to_owned(),
        Kind::MySql | Kind::MariaDb => format!("{integer} AUTO_INCREMENT PRIMARY KEY"),
        _ => format!("{integer} GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY"),
    }
}

/// An integer key, names of its own for everything, every role, a status that is an enum of the database.
macro_rules! delivery {
    ($module:ident $(, schema_name = $schema:tt)?) => {
        #[allow(unreachable_pub)]
        pub(crate) mod $module {
            use sea_orm::entity::prelude::*;
            use sea_orm_outbox::{NewMessage, OutboxTable, entity::Status, store::Fence};

            use super::{Kind, Own, Seen, counter, spelled, time, uuid};

            #[derive(Clone, Copy, Debug, PartialEq, Eq, EnumIter, DeriveActiveEnum)]
            #[sea_orm(rs_type = "String", db_type = "Enum", enum_name = "delivery_state")]
            pub(crate) enum State {
                #[sea_orm(string_value = "waiting")]
                Waiting,
                #[sea_orm(string_value = "taken")]
                Taken,
                #[sea_orm(string_value = "done")]
                Done,
                #[sea_orm(string_value = "dead")]
                Dead,
            }

            #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
            #[sea_orm(table_name = "Delivery Log" $(, schema_name = $schema)?)]
            pub struct Model {
                #[sea_orm(primary_key)]
                pub no: i64,
                pub tenant: String,
                pub delivery_id: Uuid,
                pub subject: String,
                pub object_kind: Option<String>,
                pub object_no: Option<String>,
                pub sequence: Option<String>,
                pub happened: Option<String>,
                pub mime: String,
                #[sea_orm(column_type = "JsonBinary")]
                pub meta: Json,
                #[sea_orm(column_type = "JsonBinary")]
                pub body: Json,
                pub state: State,
                pub revision: i64,
                pub tries: i32,
                pub rounds: i32,
                #[sea_orm(column_name = "dueAt")]
                pub due_at: Option<DateTimeUtc>,
                pub owner: Option<String>,
                pub owned_until: Option<DateTimeUtc>,
                pub done_at: Option<DateTimeUtc>,
                pub dead_at: Option<DateTimeUtc>,
                #[sea_orm(column_type = "Text", nullable)]
                pub trouble: Option<String>,
            }

            #[derive(Clone, Copy, Debug, EnumIter, DeriveRelation)]
            pub enum Relation {}

            impl ActiveModelBehavior for ActiveModel {}

            impl OutboxTable for Entity {
                fn id() -> Column { Column::No }
                fn message_id() -> Column { Column::DeliveryId }
                fn topic() -> Column { Column::Subject }
                fn payload() -> Column { Column::Body }
                fn status() -> Column { Column::State }
                fn version() -> Column { Column::Revision }
                fn attempts() -> Column { Column::Tries }
                fn available_at() -> Column { Column::DueAt }
                fn claimed_by() -> Column { Column::Owner }
                fn lease_until() -> Column { Column::OwnedUntil }
                fn last_error() -> Column { Column::Trouble }
                fn headers() -> Option<Column> { Some(Column::Meta) }
                fn content_type() -> Option<Column> { Some(Column::Mime) }
                fn event_type() -> Option<Column> { Some(Column::Happened) }
                fn aggregate_type() -> Option<Column> { Some(Column::ObjectKind) }
                fn aggregate_id() -> Option<Column> { Some(Column::ObjectNo) }
                fn ordering_key() -> Option<Column> { Some(Column::Sequence) }
                fn requeues() -> Option<Column> { Some(Column::Rounds) }
                fn sent_at() -> Option<Column> { Some(Column::DoneAt) }
                fn failed_at() -> Option<Column> { Some(Column::DeadAt) }

                fn status_text(status: Status) -> &'static str {
                    match status {
                        Status::Pending => "waiting",
                        Status::Processing => "taken",
                        Status::Sent => "done",
                        Status::Failed => "dead",
                    }
                }
            }

            impl Own for Entity {
                const JSON: bool = true;

                fn ddl(kind: Kind) -> Vec<String> {
                    let schema: &[&str] = &[$($schema)?];
                    let mut all = Vec::new();
                    let (mut table, mut state) = (
                        spelled(kind, "\"Delivery Log\"", "`Delivery Log`", "\"Delivery Log\""),
                        spelled(kind, "delivery_state", "enum('waiting', 'taken', 'done', 'dead')", "text"),
                    );
                    for schema in schema {
                        all.push(format!("CREATE SCHEMA \"{schema}\""));
                        (table, state) = (format!("\"{schema}\".{table}"), format!("\"{schema}\".{state}"));
                    }
                    if let Kind::Postgres | Kind::OldestPostgres = kind {
                        all.push(format!("CREATE TYPE {state} AS ENUM ('waiting', 'taken', 'done', 'dead')"));
                    }
                    let (due, no) = (spelled(kind, "\"dueAt\"", "`dueAt`", "\"dueAt\""), counter(kind, "bigint"));
                    let (time, uuid) = (time(kind), uuid(kind));
                    let json = spelled(kind, "jsonb", "json", "jsonb_text");
                    let only = |condition: &str| match kind {
                        Kind::MySql | Kind::MariaDb => String::new(),
                        _ => format!(" WHERE {condition}"),
                    };
                    all.push(format!(
                        "CREATE TABLE {table} (no {no}, tenant varchar(20) NOT NULL DEFAULT 'main',
                         delivery_id {uuid} NOT NULL UNIQUE, subject varchar(255) NOT NULL, object_kind varchar(100),
                         object_no varchar(255), sequence varchar(255), happened varchar(100),
                         mime varchar(100) NOT NULL, meta {json} NOT NULL, body {json} NOT NULL, state {state} NOT NULL,
                         revision bigint NOT NULL, tries int NOT NULL, rounds int NOT NULL, {due} {time} NULL,
                         owner varchar(100), owned_until {time} NULL, done_at {time} NULL, dead_at {time} NULL,
                         trouble text)"
                    ));
                    all.push(format!("CREATE INDEX delivery_due ON {table} ({due}, no){}", only(&format!("{due} IS NOT NULL"))));
                    all.push(match kind {
                        Kind::MySql | Kind::MariaDb => format!("CREATE INDEX delivery_key ON {table} (sequence, done_at, no)"),
                        _ => format!("CREATE INDEX delivery_key ON {table} (sequence, no) WHERE sequence IS NOT NULL AND done_at IS NULL"),
                    });
                    // An index on an expression has no first column.
                    if kind != Kind::MariaDb {
                        all.push(format!("CREATE INDEX delivery_expression ON {table} ((lower(subject)))"));
                    }
                    all
                }

                fn seen(row: &Model) -> Seen {
                    assert_eq!(row.tenant, "main");
                    assert_eq!(row.done_at.is_some(), row.state == State::Done);
                    assert_eq!(row.dead_at.is_some(), row.state == State::Dead);
                    Seen {
                        fence: Fence::new(row.no, row.revision),
                        status: row.state.to_value(),
                        attempts: row.tries.into(),
                        last_error: row.trouble.clone(),
                        is_due: row.due_at.is_some(),
                        is_claimed: row.owner.is_some() || row.owned_until.is_some(),
                    }
                }

                fn message(number: usize) -> NewMessage {
                    let body = serde_json::json!({"number": number, "a": [null, "ü"]});
                    NewMessage::json("deliveries.größe", &body)
                        .expect("it is JSON")
                        .aggregate("order", number % 3)
                        .event_type("delivered")
                        .header("tenant", "acme ü '; --")
                }
            }
        }
    };
}

delivery!(delivery);
delivery!(delivery_in_schema, schema_name = "Shop");

/// A UUID that is key and message id at once, and only what must be.
#[allow(unreachable_pub)]
pub(crate) mod parcel {
    use sea_orm::entity::prelude::*;
    use sea_orm_outbox::{NewMessage, OutboxTable, store::Fence};

    use super::{Kind, Own, Seen, spelled, time, uuid};

    #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
    #[sea_orm(table_name = "parcel")]
    pub struct Model {
        #[sea_orm(primary_key, auto_increment = false)]
        pub id: Uuid,
        pub topic: String,
        #[sea_orm(column_type = "Blob")]
        pub payload: Vec<u8>,
        pub status: String,
        pub version: i64,
        pub attempts: i16,
        pub available_at: Option<DateTimeUtc>,
        pub claimed_by: Option<String>,
        pub lease_until: Option<DateTimeUtc>,
        pub last_error: Option<String>,
    }

    #[derive(Clone, Copy, Debug, EnumIter, DeriveRelation)]
    pub enum Relation {}

    impl ActiveModelBehavior for ActiveModel {}

    #[rustfmt::skip]
    impl OutboxTable for Entity {
        fn id() -> Column { Column::Id }
        fn message_id() -> Column { Column::Id }
        fn topic() -> Column { Column::Topic }
        fn payload() -> Column { Column::Payload }
        fn status() -> Column { Column::Status }
        fn version() -> Column { Column::Version }
        fn attempts() -> Column { Column::Attempts }
        fn available_at() -> Column { Column::AvailableAt }
        fn claimed_by() -> Column { Column::ClaimedBy }
        fn lease_until() -> Column { Column::LeaseUntil }
        fn last_error() -> Column { Column::LastError }
    }

    impl Own for Entity {
        fn ddl(kind: Kind) -> Vec<String> {
            let (time, uuid) = (time(kind), uuid(kind));
            let bytes = spelled(kind, "bytea", "longblob", "blob");
            vec![
                format!(
                    "CREATE TABLE parcel (id {uuid} NOT NULL PRIMARY KEY, topic varchar(255) NOT NULL,
                     payload {bytes} NOT NULL, status varchar(10) NOT NULL, version bigint NOT NULL,
                     attempts smallint NOT NULL, available_at {time} NULL, claimed_by varchar(100),
                     lease_until {time} NULL, last_error varchar(2000))"
                ),
                "CREATE INDEX parcel_due ON parcel (available_at, id)".to_owned(),
            ]
        }

        fn seen(row: &Model) -> Seen {
            Seen {
                fence: Fence::new(row.id, row.version),
                status: row.status.clone(),
                attempts: row.attempts.into(),
                last_error: row.last_error.clone(),
                is_due: row.available_at.is_some(),
                is_claimed: row.claimed_by.is_some() || row.lease_until.is_some(),
            }
        }

        fn message(number: usize) -> NewMessage {
            let bytes = vec![0, 255, 128, u8::try_from(number % 256).unwrap_or_default()];
            NewMessage::bytes("parcels", "application/octet-stream", bytes)
        }
    }
}

/// Narrow integers and texts.
macro_rules! note {
    ($module:ident, $integer:ty, $spelled:literal) => {
        #[allow(unreachable_pub)]
        pub(crate) mod $module {
            use sea_orm::entity::prelude::*;
            use sea_orm_outbox::{NewMessage, OutboxTable, store::Fence};

            use super::{Kind, Own, Seen, counter, time, uuid};

            #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
            #[sea_orm(table_name = "note")]
            pub struct Model {
                #[sea_orm(primary_key)]
                pub id: $integer,
                pub message_id: Uuid,
                pub topic: Option<String>,
                #[sea_orm(column_type = "Text", nullable)]
                pub headers: Option<String>,
                #[sea_orm(column_type = "Text", nullable)]
                pub payload: Option<String>,
                pub ordering_key: Option<String>,
                pub status: String,
                pub version: $integer,
                pub attempts: i32,
                pub available_at: Option<DateTimeUtc>,
                pub claimed_by: Option<String>,
                pub lease_until: Option<DateTimeUtc>,
                pub sent_at: Option<DateTimeUtc>,
                #[sea_orm(column_type = "Text", nullable)]
                pub last_error: Option<String>,
            }

            #[derive(Clone, Copy, Debug, EnumIter, DeriveRelation)]
            pub enum Relation {}

            impl ActiveModelBehavior for ActiveModel {}

            impl OutboxTable for Entity {
                fn id() -> Column { Column::Id }
                fn message_id() -> Column { Column::MessageId }
                fn topic() -> Column { Column::Topic }
                fn payload() -> Column { Column::Payload }
                fn status() -> Column { Column::Status }
                fn version() -> Column { Column::Version }
                fn attempts() -> Column { Column::Attempts }
                fn available_at() -> Column { Column::AvailableAt }
                fn claimed_by() -> Column { Column::ClaimedBy }
                fn lease_until() -> Column { Column::LeaseUntil }
                fn last_error() -> Column { Column::LastError }
                fn headers() -> Option<Column> { Some(Column::Headers) }
                fn ordering_key() -> Option<Column> { Some(Column::OrderingKey) }
                fn sent_at() -> Option<Column> { Some(Column::SentAt) }
            }

            impl Own for Entity {
                fn ddl(kind: Kind) -> Vec<String> {
                    let (id, integer) = (counter(kind, $spelled), $spelled);
                    let (time, uuid) = (time(kind), uuid(kind));
                    vec![
                        // No constraint that could be missing is there.
                        format!(
                            "CREATE TABLE note (id {id}, message_id {uuid} UNIQUE, topic varchar(255), headers text,
                             payload text, ordering_key varchar(255), status varchar(10) NOT NULL, version {integer} NOT NULL,
                             attempts int NOT NULL, available_at {time} NULL, claimed_by varchar(100),
                             lease_until {time} NULL, sent_at {time} NULL, last_error text)"
                        ),
                        "CREATE INDEX note_due ON note (available_at, id)".to_owned(),
                        "CREATE INDEX note_key ON note (ordering_key, sent_at, id)".to_owned(),
                    ]
                }

                fn seen(row: &Model) -> Seen {
                    Seen {
                        fence: Fence::new(i64::from(row.id), i64::from(row.version)),
                        status: row.status.clone(),
                        attempts: row.attempts.into(),
                        last_error: row.last_error.clone(),
                        is_due: row.available_at.is_some(),
                        is_claimed: row.claimed_by.is_some() || row.lease_until.is_some(),
                    }
                }

                fn message(number: usize) -> NewMessage {
                    NewMessage::bytes("notes", "application/octet-stream", format!("ü {number}"))
                        .header("number", number.to_string())
                        .ordering_key(format!("key {}", number % 3))
                }
            }
        }
    };
}

note!(note, i32, "int");
note!(note_unsigned, u32, "int unsigned");
