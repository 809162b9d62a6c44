//! A service that writes orders: each with its message, in one transaction.

use sea_orm::{
    ActiveValue::Set, ConnectionTrait, DatabaseConnection, DbErr, EntityTrait, Schema, TransactionTrait,
    entity::prelude::*,
};
use sea_orm_outbox::{NewMessage, Outbox};
use serde::Serialize;

/// The table of the service.
#[allow(unreachable_pub)] // The derive wants it so.
#[sea_orm::model]
#[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
#[sea_orm(table_name = "demo_order")]
pub struct Model {
    #[sea_orm(primary_key)]
    pub id: i64,
    pub item: String,
}

impl ActiveModelBehavior for ActiveModel {}

/// The event that others learn of.
#[derive(Serialize)]
struct OrderCreated<'a> {
    order: i64,
    item: &'a str,
}

pub(crate) async fn create_table(db: &DatabaseConnection) -> Result<(), DbErr> {
    let mut table = Schema::new(db.get_database_backend()).create_table_from_entity(Entity);
    db.execute(table.if_not_exists()).await?;
    Ok(())
}

/// Places an order: the row and its message are committed together, or neither is.
pub(crate) async fn place_order(
    db: &DatabaseConnection,
    outbox: &Outbox,
    topic: &str,
    item: &str,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let txn = db.begin().await?;
    let order = ActiveModel { item: Set(item.to_owned()), ..Default::default() };
    let order = Entity::insert(order).exec_with_returning(&txn).await?;
    let event = NewMessage::json(topic, &OrderCreated { order: order.id, item: &order.item })?
        .aggregate("order", order.id)
        .event_type("order-created");
    outbox.enqueue(&txn, event).await?;
    txn.commit().await?;
    Ok(())
}
