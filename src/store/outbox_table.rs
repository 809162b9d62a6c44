//! The trait by which an application's own entity becomes an outbox.

use sea_orm::EntityTrait;
use sea_orm_outbox_entity::outbox_message::{self, Column as C};

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
