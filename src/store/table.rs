//! Which table the outbox is, and which of its columns play which roles.

use std::fmt;

use sea_orm::{
    ColumnTrait, ColumnType, EntityTrait,
    sea_query::{Alias, DynIden, IntoIden, TableRef},
};
use sea_orm_outbox_entity::outbox_message::{self, Column as C};

use super::dialect::Dialect;
use crate::lifecycle::Status;

/// The column roles of an application's own SeaORM entity, so that the outbox works on its table.
///
/// Most applications need none of this: the entity `outbox_message` with its migration is the default
/// everywhere. Implement it for an entity of your own, and give that to
/// [`RelayBuilder::table`](crate::RelayBuilder::table), [`Outbox::for_table`](crate::Outbox::for_table) and
/// [`Store::for_table`](super::Store::for_table).
///
/// A role without a default must be there; what the compiler cannot see is checked when the relay starts
/// ([`Store::check_table`](super::Store::check_table)): the columns, whether they may be null, the types of the
/// times, and the indexes, with the DDL to create one that is missing. Columns without a role are left to the
/// application; those that are not null need a default of the database for [`Outbox`](crate::Outbox) to insert.
///
/// | role | column type | |
/// |---|---|---|
/// | `id` | a signed or unsigned integer, or `Uuid` | the primary key; order per key needs an integer that rises; a UUID needs SQLite 3.41 |
/// | `message_id` | `Uuid`, unique | may be the same column as a UUID `id` |
/// | `topic` | text | |
/// | `claimed_by`, `last_error` | text, nullable | at least 100 and 2,000 characters |
/// | `payload` | bytes, text or JSON | published as it is stored; JSON keeps its meaning, not its bytes |
/// | `status` | text, or an enum of the database | with the texts of [`status_text`](Self::status_text) |
/// | `version`, `attempts`, `requeues` | integer, not null | raised and never reset (`version`) |
/// | `available_at` | time, nullable | null once the row is finished; the due index is on it and the id |
/// | `lease_until`, `sent_at`, `failed_at` | time, nullable | |
/// | `headers` | JSON or text | an object of texts |
/// | `ordering_key` | text, nullable | order per key needs it, `sent_at`, and an index on it |
/// | `event_type`, `aggregate_type`, `aggregate_id` | text, nullable | |
/// | `content_type` | text | |
///
/// Times are `timestamptz` on PostgreSQL, `datetime(6)` in UTC on MySQL and MariaDB, and on SQLite the text that
/// SeaORM writes for `DateTimeUtc`.
///
/// A row that is wrong, say one whose headers are no object of texts or whose topic is null, ends `FAILED` with the
/// reason in `last_error`, and harms no other.
///
/// ```
/// # mod courier {
/// #     use sea_orm::entity::prelude::*;
/// #     #[sea_orm::model]
/// #     #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
/// #     #[sea_orm(table_name = "courier_bag")]
/// #     pub struct Model {
/// #         #[sea_orm(primary_key, auto_increment = false)]
/// #         pub letter: Uuid,
/// #         pub address: String,
/// #         pub content: Vec<u8>,
/// #         pub state: String,
/// #         pub revision: i64,
/// #         pub tries: i32,
/// #         pub due: Option<DateTimeUtc>,
/// #         pub courier: Option<String>,
/// #         pub courier_until: Option<DateTimeUtc>,
/// #         pub trouble: Option<String>,
/// #     }
/// #     impl ActiveModelBehavior for ActiveModel {}
/// # }
/// use courier::Column;
/// use sea_orm_outbox::OutboxTable;
///
/// impl OutboxTable for courier::Entity {
///     fn id() -> Column { Column::Letter }
///     fn message_id() -> Column { Column::Letter }
///     fn topic() -> Column { Column::Address }
///     fn payload() -> Column { Column::Content }
///     fn status() -> Column { Column::State }
///     fn version() -> Column { Column::Revision }
///     fn attempts() -> Column { Column::Tries }
///     fn available_at() -> Column { Column::Due }
///     fn claimed_by() -> Column { Column::Courier }
///     fn lease_until() -> Column { Column::CourierUntil }
///     fn last_error() -> Column { Column::Trouble }
/// }
/// ```
///
/// A role that is left out does not compile:
///
/// ```compile_fail,E0046
/// # mod courier {
/// #     use sea_orm::entity::prelude::*;
/// #     #[sea_orm::model]
/// #     #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
/// #     #[sea_orm(table_name = "courier_bag")]
/// #     pub struct Model {
/// #         #[sea_orm(primary_key, auto_increment = false)]
/// #         pub letter: Uuid,
/// #         pub address: String,
/// #     }
/// #     impl ActiveModelBehavior for ActiveModel {}
/// # }
/// use courier::Column;
/// use sea_orm_outbox::OutboxTable;
///
/// impl OutboxTable for courier::Entity {
///     fn id() -> Column { Column::Letter }
///     fn message_id() -> Column { Column::Letter }
///     fn topic() -> Column { Column::Address }
///     // … and no version
/// }
/// ```
pub trait OutboxTable: EntityTrait {
    /// The primary key.
    fn id() -> Self::Column;
    /// The identity by which a broker and a consumer recognise a repeat.
    fn message_id() -> Self::Column;
    /// The destination.
    fn topic() -> Self::Column;
    /// What is published.
    fn payload() -> Self::Column;
    /// Where the message stands.
    fn status() -> Self::Column;
    /// What optimistic locking compares.
    fn version() -> Self::Column;
    /// How often the message was claimed.
    fn attempts() -> Self::Column;
    /// Not before this time.
    fn available_at() -> Self::Column;
    /// Who claimed the message.
    fn claimed_by() -> Self::Column;
    /// Until when the claim is trusted.
    fn lease_until() -> Self::Column;
    /// What went wrong last.
    fn last_error() -> Self::Column;

    /// A JSON object of text values, sent as headers.
    fn headers() -> Option<Self::Column> {
        None
    }
    /// How to read the payload. Without it, JSON payloads are `application/json`, others
    /// `application/octet-stream`.
    fn content_type() -> Option<Self::Column> {
        None
    }
    /// What happened, for consumers that share a topic.
    fn event_type() -> Option<Self::Column> {
        None
    }
    /// The kind of domain object that the message came from.
    fn aggregate_type() -> Option<Self::Column> {
        None
    }
    /// Which one of them.
    fn aggregate_id() -> Option<Self::Column> {
        None
    }
    /// Messages with the same key belong in order. Order per key needs it, and `sent_at`.
    fn ordering_key() -> Option<Self::Column> {
        None
    }
    /// How often the message was requeued.
    fn requeues() -> Option<Self::Column> {
        None
    }
    /// When the broker's acknowledgement was recorded.
    fn sent_at() -> Option<Self::Column> {
        None
    }
    /// When the message was given up.
    fn failed_at() -> Option<Self::Column> {
        None
    }

    /// The text in the status column.
    fn status_text(status: Status) -> &'static str {
        status.as_str()
    }
}

impl OutboxTable for outbox_message::Entity {
    fn id() -> C {
        C::Id
    }
    fn message_id() -> C {
        C::MessageId
    }
    fn topic() -> C {
        C::Topic
    }
    fn payload() -> C {
        C::Payload
    }
    fn status() -> C {
        C::Status
    }
    fn version() -> C {
        C::Version
    }
    fn attempts() -> C {
        C::Attempts
    }
    fn available_at() -> C {
        C::AvailableAt
    }
    fn claimed_by() -> C {
        C::ClaimedBy
    }
    fn lease_until() -> C {
        C::LeaseUntil
    }
    fn last_error() -> C {
        C::LastError
    }
    fn headers() -> Option<C> {
        Some(C::Headers)
    }
    fn content_type() -> Option<C> {
        Some(C::ContentType)
    }
    fn event_type() -> Option<C> {
        Some(C::EventType)
    }
    fn aggregate_type() -> Option<C> {
        Some(C::AggregateType)
    }
    fn aggregate_id() -> Option<C> {
        Some(C::AggregateId)
    }
    fn ordering_key() -> Option<C> {
        Some(C::OrderingKey)
    }
    fn requeues() -> Option<C> {
        Some(C::Requeues)
    }
    fn sent_at() -> Option<C> {
        Some(C::SentAt)
    }
    fn failed_at() -> Option<C> {
        Some(C::FailedAt)
    }
}

/// The roles of one entity, by name.
#[derive(Clone, Debug)]
pub(crate) struct Roles {
    pub(super) table: TableRef,
    pub(super) schema: Option<String>,
    pub(super) name: String,
    pub(super) id: Role,
    pub(super) message_id: Role,
    pub(super) topic: Role,
    pub(super) payload: Role,
    pub(super) status: Role,
    pub(super) version: Role,
    pub(super) attempts: Role,
    pub(super) available_at: Role,
    pub(super) claimed_by: Role,
    pub(super) lease_until: Role,
    pub(super) last_error: Role,
    pub(super) headers: Option<Role>,
    pub(super) content_type: Option<Role>,
    pub(super) event_type: Option<Role>,
    pub(super) aggregate_type: Option<Role>,
    pub(super) aggregate_id: Option<Role>,
    pub(super) ordering_key: Option<Role>,
    pub(super) requeues: Option<Role>,
    pub(super) sent_at: Option<Role>,
    pub(super) failed_at: Option<Role>,
    pub(super) statuses: [&'static str; 4],
}

/// One column.
#[derive(Clone, Debug)]
pub(super) struct Role {
    pub(super) name: &'static str,
    pub(super) column_type: ColumnType,
}

impl Role {
    fn of(column: impl ColumnTrait) -> Self {
        Self { name: column.as_str(), column_type: column.def().get_column_type().clone() }
    }

    pub(super) fn iden(&self) -> DynIden {
        Alias::new(self.name).into_iden()
    }

    /// Whether it is read as a text without being converted.
    pub(super) fn is_text(&self) -> bool {
        matches!(self.column_type, ColumnType::Char(_) | ColumnType::String(_) | ColumnType::Text)
    }

    pub(super) fn is_json(&self) -> bool {
        matches!(self.column_type, ColumnType::Json | ColumnType::JsonBinary)
    }
}

impl Roles {
    pub(crate) fn of<E: OutboxTable>() -> Self {
        let entity = E::default();
        Self {
            table: entity.table_ref(),
            schema: entity.schema_name().map(str::to_owned),
            name: entity.table_name().to_owned(),
            id: Role::of(E::id()),
            message_id: Role::of(E::message_id()),
            topic: Role::of(E::topic()),
            payload: Role::of(E::payload()),
            status: Role::of(E::status()),
            version: Role::of(E::version()),
            attempts: Role::of(E::attempts()),
            available_at: Role::of(E::available_at()),
            claimed_by: Role::of(E::claimed_by()),
            lease_until: Role::of(E::lease_until()),
            last_error: Role::of(E::last_error()),
            headers: E::headers().map(Role::of),
            content_type: E::content_type().map(Role::of),
            event_type: E::event_type().map(Role::of),
            aggregate_type: E::aggregate_type().map(Role::of),
            aggregate_id: E::aggregate_id().map(Role::of),
            ordering_key: E::ordering_key().map(Role::of),
            requeues: E::requeues().map(Role::of),
            sent_at: E::sent_at().map(Role::of),
            failed_at: E::failed_at().map(Role::of),
            statuses: [Status::Pending, Status::Processing, Status::Sent, Status::Failed].map(E::status_text),
        }
    }

    /// The text that stands for a status.
    pub(super) fn status_text(&self, status: Status) -> &'static str {
        let [pending, processing, sent, failed] = self.statuses;
        match status {
            Status::Pending => pending,
            Status::Processing => processing,
            Status::Sent => sent,
            Status::Failed => failed,
        }
    }

    pub(super) fn has_uuid_key(&self) -> bool {
        matches!(self.id.column_type, ColumnType::Uuid)
    }
}

impl Default for Roles {
    fn default() -> Self {
        Self::of::<outbox_message::Entity>()
    }
}

/// The same for the statements of one database: names quoted, values converted.
#[derive(Clone)]
pub(super) struct Table {
    pub(super) dialect: Dialect,
    pub(super) roles: Roles,
    pub(super) name: String,
    pub(super) id: String,
    pub(super) status: String,
    pub(super) version: String,
    pub(super) attempts: String,
    pub(super) available_at: String,
    pub(super) claimed_by: String,
    pub(super) lease_until: String,
    pub(super) last_error: String,
    /// The literals `'PENDING'` and so on.
    pub(super) pending: String,
    pub(super) processing: String,
    pub(super) sent: String,
    pub(super) failed: String,
}

impl Table {
    pub(super) fn new(roles: Roles, dialect: Dialect) -> Self {
        let quoted = |role: &Role| dialect.quote(role.name);
        let name = match &roles.schema {
            Some(schema) => format!("{}.{}", dialect.quote(schema), dialect.quote(&roles.name)),
            None => dialect.quote(&roles.name),
        };
        let [pending, processing, sent, failed] = roles.statuses.map(literal);
        Self {
            dialect,
            name,
            id: quoted(&roles.id),
            status: quoted(&roles.status),
            version: quoted(&roles.version),
            attempts: quoted(&roles.attempts),
            available_at: quoted(&roles.available_at),
            claimed_by: quoted(&roles.claimed_by),
            lease_until: quoted(&roles.lease_until),
            last_error: quoted(&roles.last_error),
            pending,
            processing,
            sent,
            failed,
            roles,
        }
    }

    pub(super) fn quoted(&self, role: &Role) -> String {
        self.dialect.quote(role.name)
    }

    /// A role that an entity need not have.
    pub(super) fn optional(&self, role: &Option<Role>) -> Option<String> {
        role.as_ref().map(|role| self.quoted(role))
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// A text in SQL.
pub(super) fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}
