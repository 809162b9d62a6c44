//! The real servers: one of each kind for the whole run, started when first needed.
//!
//! `TEST_POSTGRES_URL`, `TEST_OLDEST_POSTGRES_URL`, `TEST_MYSQL_URL`, `TEST_MARIADB_URL` and
//! `TEST_NATS_URL` replace the containers by servers that exist already.

use std::{
    env,
    sync::{Mutex, OnceLock, PoisonError},
};

use futures_util::future::join_all;
use testcontainers_modules::{
    mariadb::Mariadb,
    mysql::Mysql,
    nats::{Nats, NatsServerCmd},
    postgres::Postgres,
    testcontainers::{
        ContainerAsync, ContainerRequest, GenericImage, Image, ImageExt,
        core::{Host, IntoContainerPort, Mount, WaitFor},
        runners::AsyncRunner,
    },
};
use tokio::runtime::Runtime;

use super::nats::unique;

// The same as in tests/images/provide.
const POSTGRES_TAG: &str = "18";
/// The oldest version that is supported.
const OLDEST_POSTGRES_TAG: &str = "15";
const MYSQL_TAG: &str = "9";
const MARIADB_TAG: &str = "11.8";
const NATS_TAG: &str = "2";
const PGBOUNCER: [&str; 2] = ["edoburu/pgbouncer", "v1.25.2-p0"];

/// How many connections to a database a pooler has: fewer than its clients.
pub(crate) const POOLED: usize = 5;

/// What has to be removed when the run is over.
static STARTED: Mutex<Vec<Box<dyn FnOnce() + Send>>> = Mutex::new(Vec::new());

/// The URL of a PostgreSQL server where databases may be created.
pub(crate) fn postgres_url() -> String {
    static URL: OnceLock<String> = OnceLock::new();
    URL.get_or_init(|| env::var("TEST_POSTGRES_URL").unwrap_or_else(|_| start_postgres(POSTGRES_TAG))).clone()
}

/// The same of the oldest version that is supported.
pub(crate) fn oldest_postgres_url() -> String {
    static URL: OnceLock<String> = OnceLock::new();
    URL.get_or_init(|| {
        env::var("TEST_OLDEST_POSTGRES_URL").unwrap_or_else(|_| start_postgres(OLDEST_POSTGRES_TAG))
    })
    .clone()
}

/// The URL of a MySQL server where databases may be created.
pub(crate) fn mysql_url() -> String {
    static URL: OnceLock<String> = OnceLock::new();
    URL.get_or_init(|| {
        env::var("TEST_MYSQL_URL").unwrap_or_else(|_| {
            let flags = ["--max-connections=400", "--skip-log-bin"];
            start_mysql(Mysql::default().with_tag(MYSQL_TAG), &flags)
        })
    })
    .clone()
}

/// The URL of a MariaDB server where databases may be created.
pub(crate) fn mariadb_url() -> String {
    static URL: OnceLock<String> = OnceLock::new();
    URL.get_or_init(|| {
        env::var("TEST_MARIADB_URL").unwrap_or_else(|_| {
            start_mysql(Mariadb::default().with_tag(MARIADB_TAG), &["--max-connections=400"])
        })
    })
    .clone()
}

fn start_postgres(tag: &str) -> String {
    let image = Postgres::default().with_tag(tag).with_cmd(["-c", "fsync=off", "-c", "max_connections=300"]);
    let (host, port) = start(image, 5432);
    format!("postgres://postgres:postgres@{host}:{port}/postgres")
}

/// No data of tests need survive the server: it is kept in memory and not synchronised.
fn start_mysql<I: Image + 'static>(image: ContainerRequest<I>, flags: &[&str]) -> String {
    let flags = flags.iter().chain(&["--innodb-flush-log-at-trx-commit=0", "--innodb-doublewrite=0"]);
    let image = image.with_cmd(flags.copied()).with_mount(Mount::tmpfs_mount("/var/lib/mysql"));
    let (host, port) = start(image, 3306);
    format!("mysql://root@{host}:{port}/test")
}

/// The URL of a PgBouncer in transaction mode before the PostgreSQL server.
pub(crate) fn pooler_url() -> String {
    static URL: OnceLock<String> = OnceLock::new();
    URL.get_or_init(start_pooler).clone()
}

fn start_pooler() -> String {
    let url = postgres_url();
    let (user, rest) = url.rsplit_once('@').expect("the URL names a user");
    let (name, password) =
        user.trim_start_matches("postgres://").split_once(':').expect("the URL has a password");
    let (server, database) = rest.split_once('/').expect("the URL names a database");
    let (host, port) = server.rsplit_once(':').unwrap_or((server, "5432"));
    // What is this machine to us is the gateway to a container.
    let host = if ["127.0.0.1", "localhost", "[::1]"].contains(&host) { "gateway" } else { host };
    let [image, tag] = PGBOUNCER;
    let request = GenericImage::new(image, tag)
        .with_exposed_port(5432.tcp())
        .with_wait_for(WaitFor::message_on_stderr("process up"))
        .with_host("gateway", Host::HostGateway)
        .with_env_var("DB_HOST", host)
        .with_env_var("DB_PORT", port)
        .with_env_var("DB_USER", name)
        .with_env_var("DB_PASSWORD", password)
        .with_env_var("AUTH_TYPE", "scram-sha-256")
        .with_env_var("POOL_MODE", "transaction")
        .with_env_var("DEFAULT_POOL_SIZE", POOLED.to_string())
        .with_env_var("MAX_CLIENT_CONN", "400")
        // Without these, the statements that sqlx prepares are looked for on connections that do not have them.
        .with_env_var("MAX_PREPARED_STATEMENTS", "200");
    let (host, port) = start(request, 5432);
    format!("{user}@{host}:{port}/{database}")
}

/// The URL of a NATS server with JetStream.
pub(crate) fn nats_url() -> String {
    static URL: OnceLock<String> = OnceLock::new();
    URL.get_or_init(|| {
        env::var("TEST_NATS_URL").unwrap_or_else(|_| {
            let (host, port) = start(nats_image(), 4222);
            format!("nats://{host}:{port}")
        })
    })
    .clone()
}

/// A NATS server with JetStream for one test, which may stop and freeze it.
pub(crate) struct OwnNats {
    pub(crate) url: String,
    container: ContainerAsync<Nats>,
}

impl OwnNats {
    pub(crate) async fn start() -> Self {
        // A fixed port: a mapped one would change when the container is started again.
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let port = free.local_addr().expect("it has an address").port();
        drop(free);
        let container = nats_image().with_mapped_port(port, 4222.tcp()).start().await.expect(NO_CONTAINER);
        Self { url: format!("nats://127.0.0.1:{port}"), container }
    }

    /// Kills it; its streams stay.
    pub(crate) async fn stop(&self) {
        self.container.stop_with_timeout(Some(0)).await.expect("the container stops");
    }

    pub(crate) async fn start_again(&self) {
        self.container.start().await.expect("the container starts again");
    }

    pub(crate) async fn pause(&self) {
        self.container.pause().await.expect("the container freezes");
    }

    pub(crate) async fn unpause(&self) {
        self.container.unpause().await.expect("the container goes on");
    }

    /// To be called at the end; after a panic the value does it when it is dropped.
    pub(crate) async fn remove(self) {
        self.container.rm().await.expect("the container is removed");
    }
}

/// Three NATS servers that keep streams together, for one test, which may kill each of them.
pub(crate) struct NatsCluster {
    pub(crate) urls: Vec<String>,
    containers: Vec<(String, ContainerAsync<Nats>)>,
}

impl NatsCluster {
    pub(crate) async fn start() -> Self {
        let network = unique("cluster");
        let names: Vec<String> = (1..=3).map(|number| format!("{network}-{number}")).collect();
        let routes: Vec<String> = names.iter().map(|name| format!("nats://{name}:6222")).collect();
        // Held until all are known, so that they differ.
        let free = [(); 3].map(|()| std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free"));
        let ports = free.each_ref().map(|free| free.local_addr().expect("it has an address").port());
        drop(free);
        let starting = names.into_iter().zip(ports).map(|(name, port)| {
            let command = [
                "--jetstream",
                "--name",
                &name,
                "--cluster_name",
                &network,
                "--cluster",
                "nats://0.0.0.0:6222",
                "--routes",
                &routes.join(","),
                // Clients reach no other address than that of the mapped port.
                "--no_advertise",
            ];
            let request = Nats::default()
                .with_cmd(command.map(str::to_owned))
                .with_tag(NATS_TAG)
                .with_network(&network)
                .with_container_name(&name)
                .with_mapped_port(port, 4222.tcp());
            async move { (name, request.start().await.expect(NO_CONTAINER)) }
        });
        let containers = join_all(starting).await;
        Self { urls: ports.map(|port| format!("nats://127.0.0.1:{port}")).to_vec(), containers }
    }

    /// Kills the server of this name; its streams stay.
    pub(crate) async fn stop(&self, name: &str) {
        self.container(name).stop_with_timeout(Some(0)).await.expect("the container stops");
    }

    pub(crate) async fn start_again(&self, name: &str) {
        self.container(name).start().await.expect("the container starts again");
    }

    fn container(&self, name: &str) -> &ContainerAsync<Nats> {
        let found = self.containers.iter().find(|(its, _)| its == name);
        &found.expect("there is a server of this name").1
    }

    /// To be called at the end, with the network; after a panic the value does it when it is dropped.
    pub(crate) async fn remove(self) {
        for (_, container) in self.containers {
            container.rm().await.expect("the container is removed");
        }
    }
}

fn nats_image() -> ContainerRequest<Nats> {
    let command = NatsServerCmd::default().with_jetstream();
    Nats::default().with_cmd(&command).with_tag(NATS_TAG)
}

/// Removes the containers. To be called once, after the last test.
pub(crate) fn stop() {
    let started = std::mem::take(&mut *STARTED.lock().unwrap_or_else(PoisonError::into_inner));
    for remove in started {
        remove();
    }
}

const NO_CONTAINER: &str = "no container could be started: `make images` provides the images, \
     TEST_POSTGRES_URL, TEST_OLDEST_POSTGRES_URL, TEST_MYSQL_URL, TEST_MARIADB_URL and TEST_NATS_URL \
     replace the containers";

fn start<I: Image + 'static>(request: ContainerRequest<I>, port: u16) -> (String, u16) {
    // A test may already be inside a runtime: start from a thread that is not.
    std::thread::spawn(move || {
        runtime().block_on(async {
            let container: ContainerAsync<I> = request.start().await.expect(NO_CONTAINER);
            let host = container.get_host().await.expect("the container has a host");
            let mapped = container.get_host_port_ipv4(port).await.expect("the port is mapped");
            STARTED.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(move || {
                runtime().block_on(async move {
                    let id = container.id().to_owned();
                    if let Err(error) = container.rm().await {
                        eprintln!("the container {id} could not be removed: {error}");
                    }
                });
            }));
            (host.to_string(), mapped)
        })
    })
    .join()
    .expect("the server starts")
}

/// The containers outlive the runtime of the test that needed them first.
fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(super::runtime)
}
