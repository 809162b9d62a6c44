//! A notification for each statement that inserts messages, on PostgreSQL.

use sea_orm_migration::{async_trait, prelude::*, sea_orm::DbBackend};

pub(crate) struct Migration;

impl MigrationName for Migration {
    fn name(&self) -> &str {
        "outbox_m20261130_000002_notify_of_outbox_messages"
    }
}

/// One for a statement, however many rows it inserts, and one for a transaction, however many statements it has.
const UP: &str = "
CREATE FUNCTION outbox_message_notify() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NOTIFY outbox_message;
    RETURN NULL;
END $$;
CREATE TRIGGER outbox_message_notify AFTER INSERT ON outbox_message
    FOR EACH STATEMENT EXECUTE FUNCTION outbox_message_notify();
";

const DOWN: &str = "
DROP TRIGGER IF EXISTS outbox_message_notify ON outbox_message;
DROP FUNCTION IF EXISTS outbox_message_notify();
";

#[async_trait::async_trait]
impl MigrationTrait for Migration {
    async fn up(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(manager, UP).await
    }

    async fn down(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(manager, DOWN).await
    }
}

/// Other databases have no notifications: there it does nothing, so that one list serves all of them.
async fn run(manager: &SchemaManager<'_>, sql: &str) -> Result<(), DbErr> {
    if manager.get_database_backend() == DbBackend::Postgres {
        manager.get_connection().execute_unprepared(sql).await?;
    }
    Ok(())
}
