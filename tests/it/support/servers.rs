//! The real servers: one of each kind for the whole run, started when first needed.
//!
//! `TEST_POSTGRES_URL` and `TEST_NATS_URL` replace the containers by servers that exist already.

use std::{
    env,
    sync::{Mutex, OnceLock, PoisonError},
};

use testcontainers_modules::{
    nats::{Nats, NatsServerCmd},
    postgres::Postgres,
    testcontainers::{ContainerAsync, Image, ImageExt, runners::AsyncRunner},
};
use tokio::runtime::Runtime;

const POSTGRES_TAG: &str = "18";
const NATS_TAG: &str = "2";

/// What has to be removed when the run is over.
static STARTED: Mutex<Vec<Box<dyn FnOnce() + Send>>> = Mutex::new(Vec::new());

/// The URL of a PostgreSQL server where databases may be created.
pub(crate) fn postgres_url() -> String {
    static URL: OnceLock<String> = OnceLock::new();
    URL.get_or_init(|| {
        env::var("TEST_POSTGRES_URL").unwrap_or_else(|_| {
            let image = Postgres::default().with_tag(POSTGRES_TAG).with_cmd([
                "-c",
                "fsync=off",
                "-c",
                "max_connections=300",
            ]);
            let (host, port) = start(image, 5432);
            format!("postgres://postgres:postgres@{host}:{port}/postgres")
        })
    })
    .clone()
}

/// The URL of a NATS server with JetStream.
pub(crate) fn nats_url() -> String {
    static URL: OnceLock<String> = OnceLock::new();
    URL.get_or_init(|| {
        env::var("TEST_NATS_URL").unwrap_or_else(|_| {
            let command = NatsServerCmd::default().with_jetstream();
            let image = Nats::default().with_cmd(&command).with_tag(NATS_TAG);
            let (host, port) = start(image, 4222);
            format!("nats://{host}:{port}")
        })
    })
    .clone()
}

/// Removes the containers. To be called once, after the last test.
pub(crate) fn stop() {
    let started = std::mem::take(&mut *STARTED.lock().unwrap_or_else(PoisonError::into_inner));
    for remove in started {
        remove();
    }
}

fn start<I: Image + 'static>(
    image: impl Into<testcontainers_modules::testcontainers::ContainerRequest<I>> + Send + 'static,
    port: u16,
) -> (String, u16) {
    let request = image.into();
    // A test may already be inside a runtime: start from a thread that is not.
    std::thread::spawn(move || {
        runtime().block_on(async {
            let container: ContainerAsync<I> = request.start().await.expect(
                "no container could be started: `make images` provides the images, \
                 TEST_POSTGRES_URL and TEST_NATS_URL replace the containers",
            );
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
