//! A fresh, migrated database for one test.

use std::{
    fmt,
    path::PathBuf,
    process,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use sea_orm::{
    ConnectOptions, ConnectionTrait, Database, DatabaseConnection,
    sqlx::sqlite::{SqliteJournalMode, SqliteSynchronous},
};
use sea_orm_outbox::migration::{Migrator, MigratorTrait};

use super::servers;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Sqlite,
    Postgres,
}

impl Kind {
    pub(crate) const ALL: [Kind; 2] = [Kind::Sqlite, Kind::Postgres];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Sqlite => "sqlite",
            Kind::Postgres => "postgres",
        })
    }
}

/// A database that nobody else uses.
pub(crate) struct TestDatabase {
    pub(crate) kind: Kind,
    pub(crate) url: String,
    pub(crate) db: DatabaseConnection,
    cleanup: Cleanup,
}

impl TestDatabase {
    /// Creates and migrates it.
    pub(crate) async fn create(kind: Kind) -> Self {
        let database = Self::create_empty(kind).await;
        Migrator::up(&database.db, None).await.expect("the migrations run");
        database
    }

    /// Creates it without any table.
    pub(crate) async fn create_empty(kind: Kind) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let name = format!("outbox_test_{}_{}", process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let (url, cleanup) = match kind {
            Kind::Sqlite => {
                let path = std::env::temp_dir().join(format!("{name}.sqlite"));
                (format!("sqlite://{}?mode=rwc", path.display()), Cleanup::Files(path))
            }
            Kind::Postgres => {
                let server = servers::postgres_url();
                let admin = Database::connect(&server).await.expect("PostgreSQL answers");
                admin
                    .execute_unprepared(&format!("CREATE DATABASE {name}"))
                    .await
                    .expect("a database is created");
                admin.close().await.expect("the connection closes");
                let base = server.rsplit_once('/').expect("the URL names a database").0;
                (format!("{base}/{name}"), Cleanup::PostgresDatabase { server: server.clone(), name })
            }
        };
        let db = connect(&url).await;
        Self { kind, url, db, cleanup }
    }

    /// Another pool on the same database, as another process would have.
    pub(crate) async fn connect_again(&self) -> DatabaseConnection {
        connect(&self.url).await
    }

    pub(crate) fn cleanup(&self) -> Cleanup {
        self.cleanup.clone()
    }
}

/// A pool as an application would configure it.
pub(crate) async fn connect(url: &str) -> DatabaseConnection {
    let mut options = ConnectOptions::new(url);
    options
        .max_connections(10)
        .acquire_timeout(Duration::from_secs(20))
        .sqlx_logging(false)
        .map_sqlx_sqlite_opts(|options| {
            options
                .create_if_missing(true)
                .journal_mode(SqliteJournalMode::Wal)
                .synchronous(SqliteSynchronous::Normal)
                .busy_timeout(Duration::from_secs(20))
        });
    Database::connect(options).await.expect("the database answers")
}

/// How to leave nothing behind.
#[derive(Clone)]
pub(crate) enum Cleanup {
    Files(PathBuf),
    PostgresDatabase { server: String, name: String },
}

impl Cleanup {
    pub(crate) fn run(self) {
        match self {
            Cleanup::Files(path) => {
                for suffix in ["", "-wal", "-shm"] {
                    let mut file = path.clone().into_os_string();
                    file.push(suffix);
                    // The write-ahead files are gone already when the last connection closed.
                    let _ = std::fs::remove_file(file);
                }
            }
            Cleanup::PostgresDatabase { server, name } => super::runtime().block_on(async {
                let admin = Database::connect(&server).await.expect("PostgreSQL answers");
                admin
                    .execute_unprepared(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
                    .await
                    .expect("the database is dropped");
                admin.close().await.expect("the connection closes");
            }),
        }
    }
}
