//! What a piece of work costs the database, counted by the database.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use sea_orm::{ConnectionTrait, DatabaseConnection, DbBackend, Statement};

use super::{Kind, TestDatabase, database::connect_with};

/// How many instructions of SQLite's virtual machine one tick is. A row that a scan looks at takes about ten.
const TICK: i32 = 10;

/// A single connection whose work is counted.
pub(crate) struct Meter {
    kind: Kind,
    pub(crate) db: DatabaseConnection,
    sqlite_ticks: Arc<AtomicU64>,
    overhead: u64,
}

impl Meter {
    pub(crate) async fn new(database: &TestDatabase) -> Self {
        let db = connect_with(&database.url, |options| {
            options.max_connections(1);
        })
        .await;
        let ticks = Arc::new(AtomicU64::new(0));
        if database.kind == Kind::Sqlite {
            let counted = ticks.clone();
            let mut connection = db.get_sqlite_connection_pool().acquire().await.expect("a connection");
            connection.lock_handle().await.expect("it answers").set_progress_handler(TICK, move || {
                counted.fetch_add(1, Ordering::Relaxed);
                true
            });
        }
        let mut meter = Self { kind: database.kind, db, sqlite_ticks: ticks, overhead: 0 };
        meter.overhead = meter.cost(async {}).await.1;
        meter
    }

    /// The result, and how much was touched: pages on PostgreSQL, and rows of sequential scans; rows and index
    /// entries on MySQL and MariaDB; on SQLite about as many rows as a scan reads in that time.
    pub(crate) async fn cost<T>(&self, work: impl Future<Output = T>) -> (T, u64) {
        let before = self.read().await;
        let result = work.await;
        let after = self.read().await;
        (result, (after - before).saturating_sub(self.overhead))
    }

    async fn read(&self) -> u64 {
        match self.kind {
            Kind::Sqlite => self.sqlite_ticks.load(Ordering::Relaxed),
            Kind::MySql | Kind::MariaDb => {
                let sql = "SHOW SESSION STATUS LIKE 'Handler_read%'";
                let rows = self.db.query_all_raw(Statement::from_string(DbBackend::MySql, sql)).await;
                let number = |row: &sea_orm::QueryResult| -> u64 {
                    let text: String = row.try_get_by_index(1).expect("a counter has a value");
                    text.parse().expect("it is a number")
                };
                rows.expect("the counters can be read").iter().map(number).sum()
            }
            Kind::Postgres | Kind::OldestPostgres => {
                // A connection keeps its counts to itself until it is told to publish them.
                let flush =
                    Statement::from_string(DbBackend::Postgres, "SELECT pg_stat_force_next_flush()::text");
                self.db.query_one_raw(flush).await.expect("the counters are published");
                let sql = "\
                    SELECT (heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit + seq_tup_read)::bigint
                    FROM pg_statio_user_tables JOIN pg_stat_user_tables USING (relid)
                    WHERE relid = 'outbox_message'::regclass";
                let row = self.db.query_one_raw(Statement::from_string(DbBackend::Postgres, sql)).await;
                let row = row.expect("the counters can be read").expect("the table is counted");
                row.try_get_by_index::<i64>(0).expect("it is a number").unsigned_abs()
            }
        }
    }
}
