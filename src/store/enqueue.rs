//! Enqueue: write messages in the caller's transaction.

use std::{collections::HashSet, time::Duration};

use sea_orm::{
    ColumnTrait, ConnectionTrait, DbErr, EntityTrait, QueryFilter,
    sea_query::{Expr, OnConflict, Query, SimpleExpr},
};
use sea_orm_outbox_entity::outbox_message::{Column, Entity, Model};
use uuid::Uuid;

use super::dialect::Dialect;
use crate::message::{Message, MessageId};

/// A message and when it becomes due.
pub(crate) struct EnqueuedRow {
    pub(crate) message: Message,
    pub(crate) delay: Duration,
}

/// Inserts rows with one statement and returns the ids that were there already; those are left alone.
///
/// Only a conflict on the message id is passed over (`ON CONFLICT (message_id)`): any other error of a row is
/// an error of the statement.
pub(crate) async fn insert<C: ConnectionTrait>(
    db: &C,
    dialect: Dialect,
    rows: &[EnqueuedRow],
    ids_may_exist: bool,
) -> Result<HashSet<MessageId>, DbErr> {
    let mut insert = Query::insert();
    insert.into_table(Entity).columns([
        Column::MessageId,
        Column::Topic,
        Column::AggregateType,
        Column::AggregateId,
        Column::OrderingKey,
        Column::EventType,
        Column::ContentType,
        Column::Headers,
        Column::AvailableAt,
        Column::Payload,
    ]);
    for EnqueuedRow { message, delay } in rows {
        let headers =
            serde_json::to_value(&message.headers).map_err(|error| DbErr::Json(error.to_string()))?;
        insert
            .values([
                Expr::val(message.id.as_uuid()),
                Expr::val(message.topic.clone()),
                Expr::val(message.aggregate_type().map(str::to_owned)),
                Expr::val(message.aggregate_id().map(str::to_owned)),
                Expr::val(message.ordering_key.clone()),
                Expr::val(message.event_type.clone()),
                Expr::val(message.content_type.clone()),
                Expr::val(headers),
                due(dialect, *delay),
                Expr::val(message.payload.to_vec()),
            ])
            .map_err(|error| DbErr::Custom(error.to_string()))?;
    }
    if !ids_may_exist {
        db.execute(&insert).await?;
        return Ok(HashSet::new());
    }
    insert
        .on_conflict(OnConflict::column(Column::MessageId).do_nothing().to_owned())
        .returning_col(Column::MessageId);
    let mut existing: HashSet<MessageId> = rows.iter().map(|row| row.message.id).collect();
    for row in db.query_all(&insert).await? {
        existing.remove(&row.try_get_by_index::<Uuid>(0)?.into());
    }
    Ok(existing)
}

/// The rows that have these message ids.
pub(crate) async fn stored<C: ConnectionTrait>(
    db: &C,
    ids: &HashSet<MessageId>,
) -> Result<Vec<Model>, DbErr> {
    let ids = ids.iter().map(MessageId::as_uuid);
    Entity::find().filter(Column::MessageId.is_in(ids)).all(db).await
}

/// By the database's clock, as everything that is compared with it later.
fn due(dialect: Dialect, delay: Duration) -> SimpleExpr {
    if delay.is_zero() {
        Expr::cust(dialect.now())
    } else {
        // Bound, so that each delay does not make another statement.
        let placeholder = match dialect {
            Dialect::Postgres => "$1::bigint",
            Dialect::Sqlite => "?",
        };
        let ms = i64::try_from(delay.as_millis()).unwrap_or(i64::MAX);
        Expr::cust_with_values(dialect.clock_plus_ms(placeholder), [ms])
    }
}
