//! The table of messages.

use sea_orm::entity::prelude::*;

use crate::Status;

/// A message and where it stands.
#[sea_orm::model]
#[derive(Clone, Debug, PartialEq, Eq, DeriveEntityModel)]
#[sea_orm(table_name = "outbox_message")]
pub struct Model {
    /// Rises with every row. Not the order of commits.
    #[sea_orm(primary_key)]
    pub id: i64,
    /// The identity by which a broker and a consumer recognise a repeat.
    #[sea_orm(unique)]
    pub message_id: Uuid,
    /// The destination: for NATS the subject.
    #[sea_orm(column_type = "String(StringLen::N(255))")]
    pub topic: String,
    /// The kind of domain object that the message came from.
    #[sea_orm(column_type = "String(StringLen::N(100))", nullable)]
    pub aggregate_type: Option<String>,
    /// Which one of them.
    #[sea_orm(column_type = "String(StringLen::N(255))", nullable)]
    pub aggregate_id: Option<String>,
    /// Messages with the same key belong in order.
    #[sea_orm(column_type = "String(StringLen::N(255))", nullable)]
    pub ordering_key: Option<String>,
    /// What happened, for consumers that share a topic.
    #[sea_orm(column_type = "String(StringLen::N(100))", nullable)]
    pub event_type: Option<String>,
    /// How to read the payload.
    #[sea_orm(column_type = "String(StringLen::N(100))")]
    pub content_type: String,
    /// A JSON object of text values, sent as headers.
    #[sea_orm(column_type = "JsonBinary")]
    pub headers: Json,
    /// Where the message stands.
    pub status: Status,
    /// Rises with every change of the row: what optimistic locking compares.
    pub version: i64,
    /// How often the message was claimed since it was enqueued or requeued.
    pub attempts: i32,
    /// How often it was requeued.
    pub requeues: i32,
    /// Not before this time; null once the message is finished.
    pub available_at: Option<DateTimeUtc>,
    /// `relay:batch` of the claim.
    #[sea_orm(column_type = "String(StringLen::N(100))", nullable)]
    pub claimed_by: Option<String>,
    /// Until when the claim is trusted.
    pub lease_until: Option<DateTimeUtc>,
    /// When the broker's acknowledgement was recorded.
    pub sent_at: Option<DateTimeUtc>,
    /// When the message was given up.
    pub failed_at: Option<DateTimeUtc>,
    /// When the message was enqueued.
    pub created_at: DateTimeUtc,
    /// What went wrong last, at most 2,000 characters.
    #[sea_orm(column_type = "Text", nullable)]
    pub last_error: Option<String>,
    /// The bytes to publish, exactly as given.
    #[sea_orm(column_type = "Blob")]
    pub payload: Vec<u8>,
}

impl ActiveModelBehavior for ActiveModel {}
