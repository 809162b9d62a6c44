//! All SQL of the outbox: one file per verb, each verb one fenced statement for a whole batch.
//!
//! Most users need none of this: [`Outbox`](crate::Outbox) enqueues and [`Relay`](crate::Relay) does the
//! rest. It is public for those who build a loop of their own.
//!
//! # Rules that every statement keeps
//!
//! - **Every write to a live row names its id and its version** (a [`Fence`]). A row that has another version
//!   by then is *lost*: it is reported, never an error, and nothing of it is changed.
//! - **The status stands in no comparison of an `UPDATE` on the hot path.** A healthy queue is drained, so the
//!   planner's statistics say that hardly any row has the status asked for; it would join through whatever
//!   index seems to prove that, and read the whole backlog for each row. The version is fence enough, because
//!   every change of status raises it.
//! - **On PostgreSQL each statement runs in a short transaction** that asks for fresh plans
//!   (`plan_cache_mode = force_custom_plan`): a plan that was made while the table was empty would scan it
//!   sequentially until the next `ANALYZE`. The same transaction sets the isolation to READ COMMITTED and a
//!   statement timeout, whatever the connection's defaults are.
//! - **On MySQL and MariaDB writes run at READ COMMITTED**, where InnoDB locks no gaps between rows, and touch
//!   their rows in the order of the primary key. A deadlock that happens all the same is a lost race.
//! - **Times are the database's.** On PostgreSQL `statement_timestamp()` in comparisons, since
//!   `clock_timestamp()` is volatile and never an index condition; `clock_timestamp()` where a time is written.

mod check;
mod claim;
mod claimed;
mod delete;
mod dialect;
mod enqueue;
mod error;
mod fence;
mod fenced;
mod load;
mod outbox_table;
mod position;
mod renew;
mod requeue;
mod settle;
mod stale;
mod table;
mod topics;

use std::{future::Future, sync::Arc, time::Duration};

use sea_orm::{
    ConnectionTrait, DatabaseConnection, DatabaseTransaction, DbErr, IsolationLevel, QueryResult,
    SqliteTransactionMode, TransactionOptions, TransactionTrait, Value,
};
use tokio::time::timeout;

pub use check::TableReport;
pub use claim::{BehindFailed, ClaimRequest, ClaimStrategy, Ordering};
pub use claimed::{Claim, Claimed, Unreadable};
pub use error::StoreError;
pub use fence::{Fence, Lost, RowId};
pub use outbox_table::OutboxTable;
pub use position::Position;
pub use settle::Settlement;
pub use stale::{Stale, Sweepable};

pub(crate) use claim::longest_run;
pub(crate) use claimed::as_stored;
pub(crate) use dialect::Dialect;
pub(crate) use enqueue::{EnqueuedRow, insert, stored};
pub(crate) use table::Roles;

use claim::KeyIndex;
use table::Table;

/// The outbox table of one database, through which rows are claimed, settled, renewed and swept.
#[derive(Clone, Debug)]
pub struct Store {
    db: DatabaseConnection,
    table: Arc<Table>,
    key_index: KeyIndex,
    ordering: Ordering,
    statement_timeout: Duration,
}

impl Store {
    /// A store of the table `outbox_message`, on the pool of an application. It uses one connection at a time for
    /// each call in progress.
    ///
    /// # Errors
    /// [`StoreError::Unsupported`] when there are no statements for this kind of database.
    pub fn new(db: DatabaseConnection) -> Result<Self, StoreError> {
        Self::with_roles(db, Roles::default())
    }

    /// A store of an application's own table.
    ///
    /// # Errors
    /// [`StoreError::Unsupported`] when there are no statements for this kind of database, [`StoreError::Entity`]
    /// when a column of the entity cannot play its role.
    pub fn for_table<E: OutboxTable>(db: DatabaseConnection) -> Result<Self, StoreError> {
        Self::with_roles(db, Roles::of::<E>())
    }

    pub(crate) fn with_roles(db: DatabaseConnection, roles: Roles) -> Result<Self, StoreError> {
        let dialect = Dialect::of(db.get_database_backend())?;
        roles.check()?;
        let table = Arc::new(Table::new(roles, dialect));
        Ok(Self {
            db,
            table,
            key_index: KeyIndex::default(),
            ordering: Ordering::Unordered,
            statement_timeout: Duration::from_secs(10),
        })
    }

    /// Whether messages of one key are claimed in order. Default: [`Ordering::Unordered`].
    ///
    /// # Errors
    /// [`StoreError::Entity`] when the table has no columns for it.
    pub fn with_ordering(mut self, ordering: Ordering) -> Result<Self, StoreError> {
        if ordering != Ordering::Unordered {
            self.table.roles.check_ordering()?;
        }
        self.ordering = ordering;
        Ok(self)
    }

    /// How long one call may take, waiting for a connection included. Default: 10 s.
    #[must_use]
    pub fn with_statement_timeout(mut self, limit: Duration) -> Self {
        self.statement_timeout = limit;
        self
    }

    /// Runs one statement, on PostgreSQL in a transaction of its own.
    async fn run(
        &self,
        what: &'static str,
        sql: String,
        values: Vec<Value>,
    ) -> Result<Vec<QueryResult>, StoreError> {
        let work = async {
            if self.table.dialect == Dialect::Postgres {
                let txn = self.begin().await?;
                let rows = txn.query(sql, values).await?;
                txn.commit().await?;
                Ok(rows)
            } else {
                // One statement is a transaction, and on SQLite one that writes takes the lock at its start.
                self.db.query_all_raw(self.table.dialect.statement(sql, values)).await
            }
        };
        self.timed(what, work).await
    }

    async fn timed<T>(
        &self,
        what: &'static str,
        work: impl Future<Output = Result<T, DbErr>>,
    ) -> Result<T, StoreError> {
        match timeout(self.statement_timeout, work).await {
            Ok(result) => result.map_err(StoreError::from),
            Err(_) => Err(StoreError::Timeout { what, limit: self.statement_timeout }),
        }
    }

    /// Begins a transaction, at READ COMMITTED or, on SQLite, with the write lock.
    ///
    /// In a task of its own, which goes on when the wait for it is given up: a `BEGIN` whose future is dropped
    /// before the answer came leaves the connection in a transaction that sqlx 0.9 does not know of, and the next
    /// user of the pool would write into it. Finished late, the transaction is dropped and rolled back as it should
    /// be.
    async fn begin(&self) -> Result<Transaction, DbErr> {
        let (db, dialect) = (self.db.clone(), self.table.dialect);
        let options = match dialect {
            // With the other settings, in one round trip.
            Dialect::Postgres => TransactionOptions::default(),
            Dialect::MySql => TransactionOptions {
                isolation_level: Some(IsolationLevel::ReadCommitted),
                ..TransactionOptions::default()
            },
            Dialect::Sqlite => TransactionOptions {
                sqlite_transaction_mode: Some(SqliteTransactionMode::Immediate),
                ..TransactionOptions::default()
            },
        };
        let begun = tokio::spawn(async move { db.begin_with_options(options).await }).await;
        let begun =
            begun.unwrap_or_else(|error| Err(DbErr::Custom(format!("no transaction was begun: {error}"))));
        let txn = Transaction { txn: begun?, dialect };
        if dialect == Dialect::Postgres {
            txn.txn.execute_unprepared(&dialect::postgres_settings(self.statement_timeout)).await?;
        }
        Ok(txn)
    }
}

/// A short transaction of ours. Dropped, it is rolled back.
struct Transaction {
    txn: DatabaseTransaction,
    dialect: Dialect,
}

impl Transaction {
    async fn query(&self, sql: String, values: Vec<Value>) -> Result<Vec<QueryResult>, DbErr> {
        self.txn.query_all_raw(self.dialect.statement(sql, values)).await
    }

    /// How many rows it wrote.
    async fn execute(&self, sql: String, values: Vec<Value>) -> Result<u64, DbErr> {
        Ok(self.txn.execute_raw(self.dialect.statement(sql, values)).await?.rows_affected())
    }

    async fn commit(self) -> Result<(), DbErr> {
        self.txn.commit().await
    }

    async fn rollback(self) -> Result<(), DbErr> {
        self.txn.rollback().await
    }
}
