//! A fresh, migrated database for one test.

use std::{
    fmt,
    path::PathBuf,
    process,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use sea_orm::{
    ConnectOptions, ConnectionTrait, Database, DatabaseConnection, DbBackend, Statement,
    sqlx::sqlite::{SqliteJournalMode, SqliteSynchronous},
};
use sea_orm_outbox::migration::{Migrator, MigratorTrait};

use super::servers;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Sqlite,
    Postgres,
    OldestPostgres,
    MySql,
    MariaDb,
}

impl Kind {
    /// One of each.
    pub(crate) const ALL: [Kind; 4] = [Kind::Sqlite, Kind::Postgres, Kind::MySql, Kind::MariaDb];

    /// All that the promises are proved on.
    pub(crate) const CONTRACT: [Kind; 5] =
        [Kind::Sqlite, Kind::Postgres, Kind::OldestPostgres, Kind::MySql, Kind::MariaDb];

    /// How it differs from the others in SQL.
    pub(crate) fn backend(self) -> DbBackend {
        match self {
            Kind::Sqlite => DbBackend::Sqlite,
            Kind::Postgres | Kind::OldestPostgres => DbBackend::Postgres,
            Kind::MySql | Kind::MariaDb => DbBackend::MySql,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Sqlite => "sqlite",
            Kind::Postgres => "postgres",
            Kind::OldestPostgres => "postgres15",
            Kind::MySql => "mysql",
            Kind::MariaDb => "mariadb",
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
            Kind::Postgres => on_server(servers::postgres_url(), name).await,
            Kind::OldestPostgres => on_server(servers::oldest_postgres_url(), name).await,
            Kind::MySql => on_server(servers::mysql_url(), name).await,
            Kind::MariaDb => on_server(servers::mariadb_url(), name).await,
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

async fn on_server(server: String, name: String) -> (String, Cleanup) {
    let admin = Database::connect(&server).await.expect("the server answers");
    let create = match admin.get_database_backend() {
        DbBackend::MySql => format!("CREATE DATABASE {name} CHARACTER SET utf8mb4"),
        _ => format!("CREATE DATABASE {name}"),
    };
    admin.execute_unprepared(&create).await.expect("a database is created");
    admin.close().await.expect("the connection closes");
    let base = server.rsplit_once('/').expect("the URL names a database").0;
    (format!("{base}/{name}"), Cleanup::Database { server, name })
}

/// A pool as an application would configure it.
pub(crate) async fn connect(url: &str) -> DatabaseConnection {
    connect_with(url, |_| {}).await
}

/// The same, with other settings.
pub(crate) async fn connect_with(url: &str, change: impl FnOnce(&mut ConnectOptions)) -> DatabaseConnection {
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
    change(&mut options);
    Database::connect(options).await.expect("the database answers")
}

/// How to leave nothing behind.
#[derive(Clone)]
pub(crate) enum Cleanup {
    Files(PathBuf),
    Database { server: String, name: String },
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
            Cleanup::Database { server, name } => super::runtime().block_on(async {
                let admin = Database::connect(&server).await.expect("the server answers");
                let drop = match admin.get_database_backend() {
                    DbBackend::MySql => {
                        end_connections(&admin, &name).await;
                        format!("DROP DATABASE IF EXISTS {name}")
                    }
                    _ => format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)"),
                };
                admin.execute_unprepared(&drop).await.expect("the database is dropped");
                admin.close().await.expect("the connection closes");
            }),
        }
    }
}

/// MySQL and MariaDB would have the drop wait until the last transaction is over.
async fn end_connections(admin: &DatabaseConnection, name: &str) {
    // What runs at the moment stands in the list of MySQL too, and may be no text: another table there.
    let list = format!(
        "SELECT CONCAT('KILL ', /*!80001 processlist_id */ /*M! id */)
         FROM /*!80001 performance_schema.threads */ /*M! information_schema.processlist */
         WHERE /*!80001 processlist_db */ /*M! db */ = '{name}'"
    );
    let rows = super::eventually("the connections to be listed", || async {
        admin.query_all_raw(Statement::from_string(DbBackend::MySql, &list)).await.ok()
    })
    .await;
    for row in rows {
        let kill: String = row.try_get_by_index(0).expect("a connection has a number");
        // It may have ended by itself.
        let _ = admin.execute_unprepared(&kill).await;
    }
}
