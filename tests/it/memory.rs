//! Payloads in memory stay within a budget, however many and large they are.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use libtest_mimic::Trial;
use sea_orm::DatabaseConnection;
use sea_orm_outbox::{
    Ack, BehindFailed, Message, NewMessage, Ordering as MessageOrdering, Outbox, PublishError, Publisher,
    Relay, RelayBuilder, entity::Status,
};
use tokio::time::sleep;

use crate::support::{
    TestDatabase, eventually_within, on_each_database,
    rows::{count, rows},
};

pub(crate) fn tests() -> Vec<Trial> {
    [
        on_each_database("memory::large_payloads_are_loaded_within_the_budget", within_budget),
        on_each_database("memory::one_that_is_larger_than_the_budget_is_sent_alone", larger),
        on_each_database("memory::many_payloads_are_loaded_with_few_statements", few_statements),
        on_each_database("memory::large_and_small_messages_of_a_key_keep_their_order", in_order),
    ]
    .into_iter()
    .flatten()
    .collect()
}

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// Keeps what it was given for a moment, and counts how many bytes it has at a time.
#[derive(Default)]
struct Weighing {
    now: AtomicUsize,
    most: AtomicUsize,
    /// The number of each message, by key, as they came; the payload has it repeated.
    seen: Mutex<HashMap<Option<String>, Vec<u64>>>,
}

impl Publisher for Weighing {
    async fn publish(&self, message: &Message) -> Result<Ack, PublishError> {
        let bytes = message.payload().len();
        let now = self.now.fetch_add(bytes, Ordering::SeqCst) + bytes;
        self.most.fetch_max(now, Ordering::SeqCst);
        sleep(Duration::from_millis(2)).await;
        self.now.fetch_sub(bytes, Ordering::SeqCst);
        let numbers = message.payload().chunks_exact(8);
        let mut numbers = numbers.map(|bytes| u64::from_be_bytes(bytes.try_into().expect("eight bytes")));
        let number = numbers.next().expect("a payload");
        assert!(numbers.all(|other| other == number), "the payload of another message");
        let key = message.ordering_key().map(str::to_owned);
        self.seen.lock().unwrap().entry(key).or_default().push(number);
        Ok(Ack::new())
    }
}

fn message(number: u64, bytes: usize) -> NewMessage {
    NewMessage::bytes("t", "application/octet-stream", number.to_be_bytes().repeat(bytes / 8))
}

async fn enqueue(db: &DatabaseConnection, messages: impl IntoIterator<Item = NewMessage>) {
    let outbox = Outbox::new().with_max_message_bytes(64 * MIB);
    outbox.enqueue_many(db, messages).await.expect("the messages are enqueued");
}

/// Relays everything that is there, each once.
async fn relay_all(
    database: &TestDatabase,
    expected: usize,
    settings: impl FnOnce(RelayBuilder<Arc<Weighing>>) -> RelayBuilder<Arc<Weighing>>,
) -> Arc<Weighing> {
    let publisher = Arc::new(Weighing::default());
    let relay = Relay::builder(database.db.clone(), publisher.clone()).poll_every(Duration::from_millis(20));
    let relay = settings(relay).build().unwrap().spawn();
    eventually_within(Duration::from_secs(90), "all to be sent", || async {
        (count(&database.db, Status::Sent).await == expected).then_some(())
    })
    .await;
    let report = relay.shutdown().await.unwrap();
    assert_eq!((report.sent, report.released, report.lost), (expected as u64, 0, 0), "{report}");
    assert!(rows(&database.db).await.iter().all(|row| row.attempts == 1));
    publisher
}

async fn within_budget(database: TestDatabase) {
    // Ten times the budget, with small ones in between.
    for chunk in 0..8 {
        let numbers = chunk * 20..(chunk + 1) * 20;
        enqueue(&database.db, numbers.map(|n| message(n, if n.is_multiple_of(2) { 512 * KIB } else { KIB })))
            .await;
    }
    let publisher = relay_all(&database, 160, |relay| relay.memory_budget(4 * MIB as u64)).await;
    let most = publisher.most.load(Ordering::SeqCst);
    assert!((512 * KIB..4 * MIB).contains(&most), "{most} bytes at a time");
    let mut seen = publisher.seen.lock().unwrap().remove(&None).unwrap();
    seen.sort_unstable();
    assert_eq!(seen, (0..160).collect::<Vec<_>>());
}

async fn larger(database: TestDatabase) {
    enqueue(&database.db, (0..3).map(|n| message(n, 3 * MIB))).await;
    let publisher = relay_all(&database, 3, |relay| relay.memory_budget(MIB as u64)).await;
    assert_eq!(publisher.most.load(Ordering::SeqCst), 3 * MIB, "one at a time");
}

async fn few_statements(database: TestDatabase) {
    enqueue(&database.db, (0..400).map(|n| message(n, 70 * KIB))).await;
    let mut db = database.connect_again().await;
    let loads = Arc::new(AtomicUsize::new(0));
    let counted = loads.clone();
    db.set_metric_callback(move |info| {
        let sql = &info.statement.sql;
        if sql.starts_with("SELECT") && sql.contains("payload") && !sql.contains("topic") {
            counted.fetch_add(1, Ordering::SeqCst);
        }
    });
    let publisher = Arc::new(Weighing::default());
    let relay = Relay::builder(db, publisher).build().unwrap().spawn();
    eventually_within(Duration::from_secs(90), "all to be sent", || async {
        (count(&database.db, Status::Sent).await == 400).then_some(())
    })
    .await;
    relay.shutdown().await.unwrap();
    let loads = loads.load(Ordering::SeqCst);
    assert!((1..200).contains(&loads), "{loads} statements for 400 payloads");
}

async fn in_order(database: TestDatabase) {
    let sized = |n: u64| if n.is_multiple_of(3) { 100 * KIB } else { KIB };
    enqueue(&database.db, (0..120).map(|n| message(n, sized(n)).ordering_key(format!("key-{}", n % 4))))
        .await;
    let ordering = MessageOrdering::PerKey { behind_failed: BehindFailed::Hold };
    let publisher = relay_all(&database, 120, |relay| relay.ordering(ordering)).await;
    let seen = publisher.seen.lock().unwrap();
    assert_eq!(seen.len(), 4);
    for (key, numbers) in seen.iter() {
        assert!(numbers.is_sorted(), "{key:?}: {numbers:?}");
    }
}
