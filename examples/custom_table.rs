//! An application whose outbox is a table of its own, with its own names and a column more.
//!
//! ```sh
//! cargo run --example custom_table
//! ```
//!
//! It needs no server: the database is SQLite in memory, the broker prints what it is given. You will see three
//! parcels being booked, one booking that is rolled back, and what was sent; the program checks that it is right.

use std::{
    error::Error,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use sea_orm::{
    ActiveValue::Set, ColumnTrait, ConnectOptions, ConnectionTrait, Database, DatabaseConnection,
    EntityTrait, PaginatorTrait, QueryFilter, TransactionTrait,
};
use sea_orm_outbox::{
    Ack, Message, NewMessage, Outbox, OutboxTable, PublishError, Publisher, Relay, entity::Status,
};
use tokio::time::{Instant, sleep};

/// The outbox of this application: what the roles of `OutboxTable` are for is up to it to name.
#[allow(unreachable_pub)] // The derive wants it so.
mod courier {
    use sea_orm::entity::prelude::*;

    #[sea_orm::model]
    #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
    #[sea_orm(table_name = "courier_bag")]
    pub struct Model {
        #[sea_orm(primary_key, auto_increment = false)]
        pub letter: Uuid,
        pub address: String,
        #[sea_orm(column_type = "Json")]
        pub content: Json,
        pub state: String,
        pub revision: i64,
        pub tries: i32,
        pub due: Option<DateTimeUtc>,
        pub courier: Option<String>,
        pub courier_until: Option<DateTimeUtc>,
        #[sea_orm(column_type = "Text", nullable)]
        pub trouble: Option<String>,
        /// Of no interest to the outbox. It is not null, so the database needs a default for it.
        pub region: String,
    }

    impl ActiveModelBehavior for ActiveModel {}
}

/// The business table.
#[allow(unreachable_pub)] // The derive wants it so.
mod parcel {
    use sea_orm::entity::prelude::*;

    #[sea_orm::model]
    #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
    #[sea_orm(table_name = "parcel")]
    pub struct Model {
        #[sea_orm(primary_key)]
        pub id: i64,
        pub item: String,
    }

    impl ActiveModelBehavior for ActiveModel {}
}

#[rustfmt::skip]
impl OutboxTable for courier::Entity {
    fn id() -> courier::Column { courier::Column::Letter }
    fn message_id() -> courier::Column { courier::Column::Letter }
    fn topic() -> courier::Column { courier::Column::Address }
    fn payload() -> courier::Column { courier::Column::Content }
    fn status() -> courier::Column { courier::Column::State }
    fn version() -> courier::Column { courier::Column::Revision }
    fn attempts() -> courier::Column { courier::Column::Tries }
    fn available_at() -> courier::Column { courier::Column::Due }
    fn claimed_by() -> courier::Column { courier::Column::Courier }
    fn lease_until() -> courier::Column { courier::Column::CourierUntil }
    fn last_error() -> courier::Column { courier::Column::Trouble }

    fn status_text(status: Status) -> &'static str {
        match status {
            Status::Pending => "waiting",
            Status::Processing => "on its way",
            Status::Sent => "delivered",
            Status::Failed => "lost",
        }
    }
}

const TABLES: &str = "
    CREATE TABLE parcel (id integer PRIMARY KEY AUTOINCREMENT, item text NOT NULL);
    CREATE TABLE courier_bag (
        letter uuid_text NOT NULL PRIMARY KEY, address text NOT NULL, content json_text NOT NULL,
        state text NOT NULL, revision bigint NOT NULL, tries int NOT NULL, due text, courier text,
        courier_until text, trouble text, region text NOT NULL DEFAULT 'north'
    );
    CREATE INDEX courier_bag_due_idx ON courier_bag (due, letter) WHERE due IS NOT NULL;";

/// A broker that prints what it is given.
#[derive(Default)]
struct Printer(Mutex<Vec<Message>>);

impl Publisher for Printer {
    async fn publish(&self, message: &Message) -> Result<Ack, PublishError> {
        println!("sent       {} {}", message.topic(), String::from_utf8_lossy(message.payload()));
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(message.clone());
        Ok(Ack::new())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut options = ConnectOptions::new("sqlite::memory:");
    options.max_connections(1).sqlx_logging(false);
    let db = Database::connect(options).await?;
    db.execute_unprepared(TABLES).await?;

    for item in ["a book", "a lamp", "a chair"] {
        book(&db, item, true).await?;
    }
    book(&db, "a piano", false).await?;

    let printer = Arc::new(Printer::default());
    let relay = Relay::builder(db.clone(), printer.clone())
        .table::<courier::Entity>()
        .poll_every(Duration::from_millis(50))
        .build()?
        .spawn();
    let deadline = Instant::now() + Duration::from_secs(30);
    while delivered(&db).await? < 3 && Instant::now() < deadline {
        sleep(Duration::from_millis(20)).await;
    }
    println!("relay      {}", relay.shutdown().await?);

    let (rows, sent) =
        (courier::Entity::find().all(&db).await?, printer.0.lock().map_or(0, |sent| sent.len()));
    let right = rows.len() == 3
        && sent == 3
        && rows.iter().all(|row| row.state == "delivered" && row.revision == 2 && row.region == "north");
    println!("table      {} rows, {} delivered", rows.len(), delivered(&db).await?);
    if right { Ok(()) } else { Err(format!("three messages should have been sent: {rows:#?}").into()) }
}

/// Books a parcel: its row and its message are committed together, or neither is.
async fn book(db: &DatabaseConnection, item: &str, commit: bool) -> Result<(), Box<dyn Error>> {
    let txn = db.begin().await?;
    let parcel = parcel::ActiveModel { item: Set(item.to_owned()), ..Default::default() };
    let id = parcel::Entity::insert(parcel).exec(&txn).await?.last_insert_id;
    let message = NewMessage::json("parcels.booked", &serde_json::json!({"parcel": id, "item": item}))?;
    Outbox::for_table::<courier::Entity>().enqueue(&txn, message).await?;
    if commit {
        txn.commit().await?;
        println!("booked     {item}");
    } else {
        txn.rollback().await?;
        println!("cancelled  {item}, and its message with it");
    }
    Ok(())
}

async fn delivered(db: &DatabaseConnection) -> Result<u64, sea_orm::DbErr> {
    courier::Entity::find().filter(courier::Column::State.eq("delivered")).count(db).await
}
