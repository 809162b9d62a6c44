//! The stand-alone migrator, safe to run from several processes at once.

use sea_orm_migration::{
    async_trait,
    prelude::*,
    sea_orm::{
        DatabaseTransaction, DbBackend, IntoDatabaseExecutor, SqliteTransactionMode, TransactionOptions,
        TransactionTrait,
    },
};

/// Runs the migrations of the outbox with a history table of its own, `outbox_migrations`.
///
/// `up`, `down`, `reset`, `refresh` take a lock first: other processes that migrate at the same time
/// wait (at most a minute on PostgreSQL, for the pool's busy timeout on SQLite) and then find the work done. On PostgreSQL and SQLite everything one
/// call does happens in one transaction: it is done whole or not at all.
///
/// `fresh` is SeaORM's own: it drops **every** table of the database, the application's included.
#[derive(Clone, Copy, Debug)]
pub struct Migrator;

#[async_trait::async_trait]
impl MigratorTrait for Migrator {
    fn migrations() -> Vec<Box<dyn MigrationTrait>> {
        Unlocked::migrations()
    }

    fn migration_table_name() -> DynIden {
        Unlocked::migration_table_name()
    }

    async fn up<'c, C>(db: C, steps: Option<u32>) -> Result<(), DbErr>
    where
        C: IntoSchemaManagerConnection<'c>,
    {
        let txn = lock(db).await?;
        Unlocked::up(&txn, steps).await?;
        txn.commit().await
    }

    async fn down<'c, C>(db: C, steps: Option<u32>) -> Result<(), DbErr>
    where
        C: IntoSchemaManagerConnection<'c>,
    {
        let txn = lock(db).await?;
        Unlocked::down(&txn, steps).await?;
        txn.commit().await
    }

    async fn reset<'c, C>(db: C) -> Result<(), DbErr>
    where
        C: IntoSchemaManagerConnection<'c>,
    {
        let txn = lock(db).await?;
        Unlocked::reset(&txn).await?;
        txn.commit().await
    }

    async fn refresh<'c, C>(db: C) -> Result<(), DbErr>
    where
        C: IntoSchemaManagerConnection<'c>,
    {
        let txn = lock(db).await?;
        Unlocked::refresh(&txn).await?;
        txn.commit().await
    }
}

/// What SeaORM's migrator does with our list: nothing there keeps two processes apart.
struct Unlocked;

impl MigratorTrait for Unlocked {
    fn migrations() -> Vec<Box<dyn MigrationTrait>> {
        crate::migrations()
    }

    fn migration_table_name() -> DynIden {
        "outbox_migrations".into_iden()
    }
}

/// A transaction that no other migrator of the outbox can be in at the same time.
async fn lock<'c, C>(db: C) -> Result<DatabaseTransaction, DbErr>
where
    C: IntoDatabaseExecutor<'c>,
{
    let txn = db
        .into_database_executor()
        .begin_with_options(TransactionOptions {
            // SQLite: the one writer from the start, so that a second migrator waits for its turn.
            sqlite_transaction_mode: Some(SqliteTransactionMode::Immediate),
            ..Default::default()
        })
        .await?;
    if txn.get_database_backend() == DbBackend::Postgres {
        txn.execute_unprepared("SET LOCAL lock_timeout = '60s'").await?;
        // An arbitrary number, the same in every process: "outbox" in ASCII.
        txn.execute_unprepared("SELECT pg_advisory_xact_lock(x'6f7574626f78'::bigint)").await?;
    }
    Ok(txn)
}
