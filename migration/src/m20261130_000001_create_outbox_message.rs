//! The table of messages with its two indexes.

use sea_orm_migration::{async_trait, prelude::*, sea_orm::DbBackend};

pub(crate) struct Migration;

impl MigrationName for Migration {
    fn name(&self) -> &str {
        "outbox_m20261130_000001_create_outbox_message"
    }
}

#[async_trait::async_trait]
impl MigrationTrait for Migration {
    async fn up(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        let sql = match manager.get_database_backend() {
            DbBackend::Postgres => {
                include_str!("m20261130_000001_create_outbox_message/postgres.sql")
            }
            DbBackend::MySql => include_str!("m20261130_000001_create_outbox_message/mysql.sql"),
            DbBackend::Sqlite => include_str!("m20261130_000001_create_outbox_message/sqlite.sql"),
            other => {
                return Err(DbErr::Custom(format!(
                    "the outbox has no table for {other:?}: use PostgreSQL, MySQL, MariaDB or SQLite"
                )));
            }
        };
        manager.get_connection().execute_unprepared(sql).await?;
        Ok(())
    }

    async fn down(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        let sql = match manager.get_database_backend() {
            // Commits by itself, before the history is written: it may have been done already.
            DbBackend::MySql => "DROP TABLE IF EXISTS outbox_message",
            _ => "DROP TABLE outbox_message",
        };
        manager.get_connection().execute_unprepared(sql).await?;
        Ok(())
    }
}
