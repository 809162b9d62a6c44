//! What every test stands on: its own database, a deadline, and servers shared by the whole run.

pub(crate) mod cost;
pub(crate) mod database;
pub(crate) mod log;
pub(crate) mod nats;
pub(crate) mod own;
pub(crate) mod process;
pub(crate) mod proxy;
pub(crate) mod rows;
pub(crate) mod servers;
pub(crate) mod stuck;

use std::{
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    time::Duration,
};

use libtest_mimic::Trial;
use tokio::time::{Instant, sleep, timeout};

pub(crate) use database::{Kind, TestDatabase};

/// No test may take longer: a hang is a failure with a name.
fn test_deadline() -> Duration {
    Duration::from_secs(if is_long() { 3_600 } else { 180 })
}

/// Whether the tests may take long (`TEST_LONG=1`): some then use more rows, and some are only run then.
pub(crate) fn is_long() -> bool {
    std::env::var_os("TEST_LONG").is_some_and(|value| value == "1")
}

/// A test on a runtime of its own.
pub(crate) fn test<F, Fut>(name: &str, body: F) -> Trial
where
    F: FnOnce() -> Fut + Send + 'static,
    Fut: Future<Output = ()>,
{
    Trial::test(name, move || {
        runtime().block_on(within(test_deadline(), "the test", body()));
        Ok(())
    })
}

/// One test for each database, each in a fresh database that is removed afterwards,
/// also when the test panics.
pub(crate) fn on_each_database<F, Fut>(name: &str, body: F) -> Vec<Trial>
where
    F: FnOnce(TestDatabase) -> Fut + Copy + Send + 'static,
    Fut: Future<Output = ()>,
{
    Kind::ALL.iter().map(|kind| on_database(*kind, name, body)).collect()
}

/// The same for what proves the promises: also on the oldest version of PostgreSQL.
pub(crate) fn on_each_contract_database<F, Fut>(name: &str, body: F) -> Vec<Trial>
where
    F: FnOnce(TestDatabase) -> Fut + Copy + Send + 'static,
    Fut: Future<Output = ()>,
{
    Kind::CONTRACT.iter().map(|kind| on_database(*kind, name, body)).collect()
}

/// A test on one database only.
pub(crate) fn on_database<F, Fut>(kind: Kind, name: &str, body: F) -> Trial
where
    F: FnOnce(TestDatabase) -> Fut + Send + 'static,
    Fut: Future<Output = ()>,
{
    Trial::test(format!("{kind}::{name}"), move || {
        let runtime = runtime();
        let database = runtime.block_on(TestDatabase::create(kind));
        let cleanup = database.cleanup();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            runtime.block_on(within(test_deadline(), "the test", body(database)));
        }));
        runtime.shutdown_timeout(Duration::from_secs(5));
        cleanup.run();
        match outcome {
            Ok(()) => Ok(()),
            Err(panic) => resume_unwind(panic),
        }
    })
}

/// Waits until `condition` yields a value, or panics with `what` after 30 seconds.
pub(crate) async fn eventually<T, F, Fut>(what: &str, condition: F) -> T
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Option<T>>,
{
    eventually_within(Duration::from_secs(30), what, condition).await
}

/// The same with another limit.
pub(crate) async fn eventually_within<T, F, Fut>(limit: Duration, what: &str, mut condition: F) -> T
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Option<T>>,
{
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = condition().await {
            return value;
        }
        assert!(Instant::now() < deadline, "still waiting for {what}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// The value of a future, or a panic that names what did not come in time.
pub(crate) async fn within<T>(limit: Duration, what: &str, future: impl Future<Output = T>) -> T {
    match timeout(limit, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what} took longer than {limit:?}"),
    }
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime starts")
}
