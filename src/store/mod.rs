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
//! - **Times are the database's.** `statement_timestamp()` in comparisons, since `clock_timestamp()` is
//!   volatile and never an index condition; `clock_timestamp()` where a time is written.

mod claim;
mod claimed;
mod delete;
mod dialect;
mod enqueue;
mod error;
mod fence;
mod renew;
mod requeue;
mod settle;
mod stale;

use std::time::Duration;

use sea_orm::{
    ConnectionTrait, DatabaseConnection, DatabaseTransaction, DbErr, QueryResult, Statement,
    TransactionTrait, Value,
};
use tokio::time::timeout;

pub use claim::ClaimStrategy;
pub use claimed::{Claim, Claimed};
pub use error::StoreError;
pub use fence::{Fence, Lost};
pub use settle::Settlement;
pub use stale::{Position, Stale, Sweepable};

pub(crate) use dialect::Dialect;
pub(crate) use enqueue::{EnqueuedRow, insert, stored};

/// The outbox table of one database, through which rows are claimed, settled, renewed and swept.
#[derive(Clone, Debug)]
pub struct Store {
    db: DatabaseConnection,
    dialect: Dialect,
    statement_timeout: Duration,
}

impl Store {
    /// A store on the pool of an application. It uses one connection at a time for each call in progress.
    ///
    /// # Errors
    /// [`StoreError::Unsupported`] when the database is neither PostgreSQL nor SQLite.
    pub fn new(db: DatabaseConnection) -> Result<Self, StoreError> {
        let dialect = Dialect::of(db.get_database_backend())?;
        Ok(Self { db, dialect, statement_timeout: Duration::from_secs(10) })
    }

    /// How long one statement may take, waiting for a connection included. Default: 10 s.
    #[must_use]
    pub fn with_statement_timeout(mut self, limit: Duration) -> Self {
        self.statement_timeout = limit;
        self
    }

    /// Checks that the table is there with every column that the relay uses.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] or [`StoreError::Timeout`] when the database does not answer,
    /// [`StoreError::Table`] when it answers that the table cannot be read.
    pub async fn check_table(&self) -> Result<(), StoreError> {
        const SQL: &str = "\
            SELECT id, message_id, topic, aggregate_type, aggregate_id, ordering_key, event_type,
                   content_type, headers, status, version, attempts, requeues, available_at, claimed_by,
                   lease_until, sent_at, failed_at, created_at, last_error, payload
            FROM outbox_message WHERE 1 = 0";
        self.run("check the table", SQL, Vec::new()).await.map(|_| ())
    }

    /// Runs one statement, on PostgreSQL in a transaction of its own.
    async fn run(
        &self,
        what: &'static str,
        sql: impl Into<String>,
        values: Vec<Value>,
    ) -> Result<Vec<QueryResult>, StoreError> {
        let statement = Statement::from_sql_and_values(self.db.get_database_backend(), sql.into(), values);
        let work = async {
            match self.dialect {
                Dialect::Postgres => {
                    let txn = self.begin().await?;
                    txn.execute_unprepared(&dialect::postgres_settings(self.statement_timeout)).await?;
                    let rows = txn.query_all_raw(statement).await?;
                    txn.commit().await?;
                    Ok(rows)
                }
                // One statement is a transaction, and one that writes takes the lock at its start.
                Dialect::Sqlite => self.db.query_all_raw(statement).await,
            }
        };
        match timeout(self.statement_timeout, work).await {
            Ok(result) => result.map_err(|error: DbErr| error.into()),
            Err(_) => Err(StoreError::Timeout { what, limit: self.statement_timeout }),
        }
    }

    /// Begins a transaction in a task of its own, which goes on when the wait for it is given up.
    ///
    /// A `BEGIN` whose future is dropped before the answer came leaves the connection in a transaction that
    /// sqlx 0.9 does not know of, and the next user of the pool would write into it.
    /// Finished late, the transaction is dropped and rolled back as it should be.
    async fn begin(&self) -> Result<DatabaseTransaction, DbErr> {
        let db = self.db.clone();
        let begun = tokio::spawn(async move { db.begin().await }).await;
        begun.unwrap_or_else(|error| Err(DbErr::Custom(format!("no transaction was begun: {error}"))))
    }
}
