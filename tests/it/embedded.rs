//! A relay in an axum application, beside its handlers, on the same pool.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{Request, StatusCode},
    routing::{get, post},
};
use libtest_mimic::Trial;
use sea_orm::{ConnectionTrait, DatabaseConnection, DbBackend, Statement, TransactionError};
use sea_orm_outbox::{
    EnqueueError, NewMessage, Outbox, Relay, RelayHandle, Waker, entity::Status,
    publisher::RecordingPublisher,
};
use tokio::task::JoinSet;
use tower::ServiceExt;

use crate::support::{
    Kind, TestDatabase,
    database::connect_with,
    eventually, on_database, on_each_database,
    rows::{count, enqueue},
    within,
};

pub(crate) fn tests() -> Vec<Trial> {
    let mut tests =
        on_each_database("embedded::handlers_get_their_connections_while_a_backlog_is_relayed", handlers);
    tests.push(on_database(
        Kind::Postgres,
        "embedded::a_relay_uses_few_connections_of_the_pool",
        few_connections,
    ));
    tests
}

/// What the handlers share.
#[derive(Clone)]
struct App {
    db: DatabaseConnection,
    outbox: Outbox,
    relay: Arc<RelayHandle>,
}

async fn place_order(State(app): State<App>) -> Result<StatusCode, (StatusCode, String)> {
    let placed = app.outbox.transaction(&app.db, async |txn| {
        app.outbox.enqueue(txn, NewMessage::bytes("orders", "text/plain", "order")).await
    });
    let failed =
        |error: TransactionError<EnqueueError>| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
    placed.await.map(|_| StatusCode::CREATED).map_err(failed)
}

async fn ready(State(app): State<App>) -> StatusCode {
    if app.relay.health().is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

/// A pool that a relay could use up.
async fn pool(database: &TestDatabase) -> DatabaseConnection {
    connect_with(&database.url, |options| {
        options.max_connections(5);
    })
    .await
}

async fn handlers(database: TestDatabase) {
    const BACKLOG: usize = 2_000;
    const CLIENTS: usize = 10;
    const ORDERS: usize = 10;
    enqueue(&database.db, "backlog", BACKLOG).await;
    let db = pool(&database).await;
    let waker = Waker::new();
    let relay = Relay::builder(db.clone(), Arc::new(RecordingPublisher::new()))
        .batch_size(20)
        .sweep_every(Duration::from_millis(20))
        .waker(waker.clone())
        .build()
        .unwrap();
    let relay = Arc::new(relay.spawn());
    let app = App { db, outbox: Outbox::new().with_waker(waker), relay: relay.clone() };
    let router =
        Router::new().route("/orders", post(place_order)).route("/ready", get(ready)).with_state(app);
    let status = async |router: &Router, request| router.clone().oneshot(request).await.unwrap().status();
    eventually("the application to be ready", || async {
        let request = Request::get("/ready").body(Body::empty()).unwrap();
        (status(&router, request).await == StatusCode::OK).then_some(())
    })
    .await;
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        let router = router.clone();
        clients.spawn(async move {
            for _ in 0..ORDERS {
                let request = Request::post("/orders").body(Body::empty()).unwrap();
                assert_eq!(router.clone().oneshot(request).await.unwrap().status(), StatusCode::CREATED);
            }
        });
    }
    clients.join_all().await;
    eventually("all to be sent", || async {
        (count(&database.db, Status::Sent).await == BACKLOG + CLIENTS * ORDERS).then_some(())
    })
    .await;
    relay.shutdown().await.unwrap();
}

async fn few_connections(database: TestDatabase) {
    const BACKLOG: usize = 5_000;
    enqueue(&database.db, "t", BACKLOG).await;
    let db = connect_with(&database.url, |options| {
        options.max_connections(20);
    })
    .await;
    let relay = Relay::builder(db, Arc::new(RecordingPublisher::new()))
        .batch_size(20)
        .renew_every(Duration::from_millis(20))
        .sweep_every(Duration::from_millis(20));
    let relay = relay.build().unwrap().spawn();
    let at_work = "SELECT count(*) FROM pg_stat_activity
                   WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'
                   AND backend_type = 'client backend'";
    let mut most = 0;
    within(Duration::from_secs(60), "relaying the backlog", async {
        while count(&database.db, Status::Sent).await < BACKLOG {
            let at_work = Statement::from_string(DbBackend::Postgres, at_work);
            let row = database.db.query_one_raw(at_work).await.unwrap().unwrap();
            most = row.try_get_by_index::<i64>(0).unwrap().max(most);
        }
    })
    .await;
    relay.shutdown().await.unwrap();
    assert!((1..=5).contains(&most), "{most} connections were at work at a time");
}
