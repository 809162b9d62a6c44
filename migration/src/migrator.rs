//! The stand-alone migrator, safe to run from several processes at once.

use std::marker::PhantomData;

use sea_orm_migration::{
    async_trait,
    prelude::*,
    sea_orm::{
        DatabaseConnection, DatabaseExecutor, DatabaseTransaction, DbBackend, IntoDatabaseExecutor,
        SqliteTransactionMode, Statement, TransactionOptions, TransactionTrait,
    },
};

#[cfg(feature = "mysql")]
use sea_orm_migration::sea_orm::{DatabaseConnectionType, SqlxMySqlConnector};

/// A migrator that takes the lock of the outbox around whatever changes the database.
macro_rules! migrator {
    ($(#[$documentation:meta])* $name:ident, $history:literal, $migrations:path) => {
        $(#[$documentation])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name;

        #[async_trait::async_trait]
        impl MigratorTrait for $name {
            fn migrations() -> Vec<Box<dyn MigrationTrait>> {
                $migrations()
            }

            fn migration_table_name() -> DynIden {
                $history.into_iden()
            }

            async fn up<'c, C>(db: C, steps: Option<u32>) -> Result<(), DbErr>
            where
                C: IntoSchemaManagerConnection<'c>,
            {
                let session = Session::lock(db).await?;
                let outcome = Unlocked::<Self>::up(session.transaction(), steps).await;
                session.end(outcome).await
            }

            async fn down<'c, C>(db: C, steps: Option<u32>) -> Result<(), DbErr>
            where
                C: IntoSchemaManagerConnection<'c>,
            {
                let session = Session::lock(db).await?;
                let outcome = Unlocked::<Self>::down(session.transaction(), steps).await;
                session.end(outcome).await
            }

            async fn reset<'c, C>(db: C) -> Result<(), DbErr>
            where
                C: IntoSchemaManagerConnection<'c>,
            {
                let session = Session::lock(db).await?;
                let outcome = Unlocked::<Self>::reset(session.transaction()).await;
                session.end(outcome).await
            }

            async fn refresh<'c, C>(db: C) -> Result<(), DbErr>
            where
                C: IntoSchemaManagerConnection<'c>,
            {
                let session = Session::lock(db).await?;
                let outcome = Unlocked::<Self>::refresh(session.transaction()).await;
                session.end(outcome).await
            }
        }
    };
}

migrator! {
    /// Runs the migrations of the outbox with a history table of its own, `outbox_migrations`.
    ///
    /// `up`, `down`, `reset`, `refresh` take a lock first: other processes that migrate at the same time
    /// wait (at most a minute on PostgreSQL, MySQL and MariaDB, for the pool's busy timeout on SQLite) and
    /// then find the work done. On MySQL and MariaDB a call opens one connection besides those of the pool.
    ///
    /// On PostgreSQL and SQLite everything one call does happens in one transaction: it is done whole or
    /// not at all. MySQL and MariaDB commit each change of a table by itself, and with it whatever the
    /// transaction of the caller has done until then; a call that was cut off is made good by the next one.
    ///
    /// `fresh` is SeaORM's own: it drops **every** table of the database, the application's included.
    Migrator, "outbox_migrations", crate::migrations
}

migrator! {
    /// Runs the [`notifying`](crate::notifying) migrations, after those of [`Migrator`] and in the same way, with a
    /// history table of its own, `outbox_notifying_migrations`.
    NotifyingMigrator, "outbox_notifying_migrations", crate::notifying
}

/// What SeaORM's migrator does with a list: nothing there keeps two processes apart.
struct Unlocked<M>(PhantomData<M>);

impl<M: MigratorTrait> MigratorTrait for Unlocked<M> {
    fn migrations() -> Vec<Box<dyn MigrationTrait>> {
        M::migrations()
    }

    fn migration_table_name() -> DynIden {
        M::migration_table_name()
    }
}

/// A transaction that no other migrator of the outbox can be in at the same time.
enum Session<'c> {
    Own(DatabaseTransaction),
    /// On a connection of its own, too.
    Apart(DatabaseTransaction, DatabaseConnection),
    Callers(&'c DatabaseTransaction),
}

impl<'c> Session<'c> {
    async fn lock<C>(db: C) -> Result<Self, DbErr>
    where
        C: IntoDatabaseExecutor<'c>,
    {
        let executor = db.into_database_executor();
        let backend = executor.get_database_backend();
        // On MySQL and MariaDB the lock belongs to the connection. The transaction only keeps hold of
        // that: it ends with the first table.
        let session = match executor {
            DatabaseExecutor::Connection(db) if backend == DbBackend::MySql => {
                let apart = apart(db);
                Self::Apart(apart.begin().await?, apart)
            }
            // A savepoint in it would not outlive the first table.
            DatabaseExecutor::Transaction(txn) if backend == DbBackend::MySql => Self::Callers(txn),
            DatabaseExecutor::OwnedTransaction(txn) if backend == DbBackend::MySql => Self::Own(txn),
            executor => {
                let options = TransactionOptions {
                    // SQLite: the one writer from the start, so that a second migrator waits for its turn.
                    sqlite_transaction_mode: Some(SqliteTransactionMode::Immediate),
                    ..Default::default()
                };
                Self::Own(executor.begin_with_options(options).await?)
            }
        };
        let txn = session.transaction();
        match backend {
            DbBackend::Postgres => {
                txn.execute_unprepared("SET LOCAL lock_timeout = '60s'").await?;
                // An arbitrary number, the same in every process: "outbox" in ASCII.
                txn.execute_unprepared("SELECT pg_advisory_xact_lock(x'6f7574626f78'::bigint)").await?;
            }
            DbBackend::MySql if named_lock(txn, "GET_LOCK", ", 60").await? != Some(1) => {
                return Err(DbErr::Custom(
                    "another process has been migrating the outbox for 60 seconds: waited no longer"
                        .to_owned(),
                ));
            }
            _ => {}
        }
        Ok(session)
    }

    fn transaction(&self) -> &DatabaseTransaction {
        match self {
            Self::Own(txn) | Self::Apart(txn, _) => txn,
            Self::Callers(txn) => txn,
        }
    }

    /// Lets the next one in, also after a failure, which then is the outcome.
    async fn end(self, outcome: Result<(), DbErr>) -> Result<(), DbErr> {
        let txn = self.transaction();
        let released = match txn.get_database_backend() {
            DbBackend::MySql => named_lock(txn, "RELEASE_LOCK", "").await.map(|_| ()),
            _ => Ok(()),
        };
        let outcome = outcome.and(released);
        match self {
            Self::Own(txn) => {
                outcome?;
                txn.commit().await
            }
            Self::Apart(txn, db) => {
                let outcome = match outcome {
                    Ok(()) => txn.commit().await,
                    Err(error) => {
                        drop(txn);
                        Err(error)
                    }
                };
                // It was for this call alone: whether it takes leave of the server changes nothing.
                let _ = db.close().await;
                outcome
            }
            Self::Callers(_) => outcome,
        }
    }
}

/// A connection like those of the pool, but outside it: when a call is dropped midway, the lock goes
/// with the connection. One of the pool would keep it.
fn apart(db: &DatabaseConnection) -> DatabaseConnection {
    #[cfg(feature = "mysql")]
    if let DatabaseConnectionType::SqlxMySqlPoolConnection(_) = &db.inner {
        let pool = db.get_mysql_connection_pool();
        let options = pool.options().clone().min_connections(0).max_connections(1);
        let pool = options.connect_lazy_with((*pool.connect_options()).clone());
        return SqlxMySqlConnector::from_sqlx_mysql_pool(pool);
    }
    db.clone() // a mock
}

/// Calls a function of MySQL and MariaDB on the lock of this database: names are the server's, and at
/// most 64 characters long.
async fn named_lock(txn: &DatabaseTransaction, function: &str, more: &str) -> Result<Option<i64>, DbErr> {
    let name = "CONCAT('outbox_migrations.', LEFT(SHA2(DATABASE(), 256), 32))";
    let sql = format!("SELECT {function}({name}{more})");
    match txn.query_one_raw(Statement::from_string(DbBackend::MySql, sql)).await? {
        Some(row) => row.try_get_by_index(0),
        None => Ok(None),
    }
}
