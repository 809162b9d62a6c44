//! The servers of a benchmark: in containers, with fsync on, unless the environment names others.

use std::{env, path::PathBuf, pin::Pin, process, time::Duration};

use sea_orm::{
    ConnectOptions, ConnectionTrait, Database, DatabaseConnection, DbBackend,
    sqlx::sqlite::{SqliteJournalMode, SqliteSynchronous},
};
use sea_orm_outbox_migration::{Migrator, MigratorTrait};
use testcontainers_modules::{
    mariadb::Mariadb,
    mysql::Mysql,
    nats::{Nats, NatsServerCmd},
    postgres::Postgres,
    testcontainers::{ContainerRequest, Image, ImageExt, runners::AsyncRunner},
};

use super::Result;

// The same as in tests/images/provide.
const POSTGRES_TAG: &str = "18";
const MYSQL_TAG: &str = "9";
const MARIADB_TAG: &str = "11.8";
const NATS_TAG: &str = "2";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code)] // No benchmark needs all of them.
pub(crate) enum Kind {
    Postgres,
    MySql,
    MariaDb,
    /// A file.
    Sqlite,
    Nats,
}

/// A server, and what is to be taken away from it at the end.
pub(crate) struct Server {
    pub(crate) url: String,
    databases: Vec<String>,
    remove: Option<Remove>,
}

type Remove = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

impl Server {
    /// Finds or starts it. Not to be dropped midway, which would leave a container behind.
    pub(crate) async fn start(kind: Kind) -> Result<Self> {
        let variable = match kind {
            Kind::Postgres => "BENCH_POSTGRES_URL",
            Kind::MySql => "BENCH_MYSQL_URL",
            Kind::MariaDb => "BENCH_MARIADB_URL",
            Kind::Nats => "BENCH_NATS_URL",
            Kind::Sqlite => return Ok(Self::at(format!("sqlite://{}/", env!("CARGO_TARGET_TMPDIR")), None)),
        };
        if let Ok(url) = env::var(variable) {
            return Ok(Self::at(url, None));
        }
        match kind {
            Kind::Postgres => {
                let image = Postgres::default().with_fsync_enabled().with_tag(POSTGRES_TAG);
                let image = image.with_cmd(["-c", "shared_buffers=512MB", "-c", "max_wal_size=4GB"]);
                Self::start_container(image, 5432, "postgres://postgres:postgres@", "/postgres").await
            }
            Kind::MySql => {
                // MariaDB has no binary log unless it is asked for.
                let flags = ["--innodb-buffer-pool-size=512M", "--skip-log-bin"];
                let image = Mysql::default().with_tag(MYSQL_TAG).with_cmd(flags);
                Self::start_container(image, 3306, "mysql://root@", "/test").await
            }
            Kind::MariaDb => {
                let image = Mariadb::default().with_tag(MARIADB_TAG);
                let image = image.with_cmd(["--innodb-buffer-pool-size=512M"]);
                Self::start_container(image, 3306, "mysql://root@", "/test").await
            }
            Kind::Nats | Kind::Sqlite => {
                let command = NatsServerCmd::default().with_jetstream();
                let image = Nats::default().with_cmd(&command).with_tag(NATS_TAG);
                Self::start_container(image, 4222, "nats://", "").await
            }
        }
    }

    async fn start_container<I: Image + 'static>(
        image: ContainerRequest<I>,
        port: u16,
        scheme: &str,
        path: &str,
    ) -> Result<Self> {
        let container = image.start().await?;
        let (host, port) = (container.get_host().await?, container.get_host_port_ipv4(port).await?);
        let remove = Box::pin(async move { Ok(container.rm().await?) });
        Ok(Self::at(format!("{scheme}{host}:{port}{path}"), Some(remove)))
    }

    fn at(url: String, remove: Option<Remove>) -> Self {
        Self { url, databases: Vec::new(), remove }
    }

    /// The URL of a fresh, migrated database of its own.
    pub(crate) async fn database(&mut self) -> Result<String> {
        let name = format!("outbox_bench_{}_{}", process::id(), self.databases.len());
        let (server, base) = (self.url.clone(), self.url.rsplit_once('/').map_or("", |(base, _)| base));
        let url = format!("{base}/{name}");
        if !self.is_sqlite() {
            let admin = Database::connect(server).await?;
            admin.execute_unprepared(&format!("CREATE DATABASE {name}")).await?;
            admin.close().await?;
        }
        self.databases.push(name);
        let db = connect(&url, 1).await?;
        Migrator::up(&db, None).await?;
        db.close().await?;
        Ok(url)
    }

    /// Takes everything away.
    pub(crate) async fn stop(self) -> Result<()> {
        if let Some(remove) = self.remove {
            return remove.await;
        }
        for name in &self.databases {
            if self.is_sqlite() {
                for suffix in ["", "-wal", "-shm"] {
                    // The last connection that closes removes the others.
                    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
                    let _ = std::fs::remove_file(directory.join(format!("{name}{suffix}")));
                }
                continue;
            }
            let admin = Database::connect(&self.url).await?;
            let force = match admin.get_database_backend() {
                DbBackend::Postgres => " WITH (FORCE)",
                _ => "",
            };
            admin.execute_unprepared(&format!("DROP DATABASE IF EXISTS {name}{force}")).await?;
            admin.close().await?;
        }
        Ok(())
    }

    fn is_sqlite(&self) -> bool {
        self.url.starts_with("sqlite:")
    }
}

/// A pool of so many connections.
pub(crate) async fn connect(url: &str, connections: u32) -> Result<DatabaseConnection> {
    let mut options = ConnectOptions::new(url);
    options
        .sqlx_logging(false)
        .max_connections(connections)
        .test_before_acquire_if_idle_for(Duration::from_secs(30))
        .map_sqlx_sqlite_opts(|options| {
            options
                .create_if_missing(true)
                .journal_mode(SqliteJournalMode::Wal)
                .synchronous(SqliteSynchronous::Normal)
                .busy_timeout(Duration::from_secs(20))
        });
    Ok(Database::connect(options).await?)
}
