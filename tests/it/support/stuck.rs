//! A publisher that a test can hold up.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use sea_orm_outbox::{Ack, Message, PublishError, Publisher};
use tokio::sync::Notify;

use super::eventually;

/// Waits for ever with the messages of one topic.
pub(crate) struct Stuck {
    topic: &'static str,
    pub(crate) waiting: AtomicUsize,
    /// The most that were in flight at a time.
    pub(crate) most: AtomicUsize,
    /// How many messages of other topics it was given.
    pub(crate) others: AtomicUsize,
    go_on: Notify,
    gone_on: AtomicBool,
}

impl Stuck {
    pub(crate) fn on(topic: &'static str) -> Arc<Self> {
        Arc::new(Self {
            topic,
            waiting: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            others: AtomicUsize::new(0),
            go_on: Notify::new(),
            gone_on: AtomicBool::new(false),
        })
    }

    pub(crate) fn let_go(&self) {
        self.gone_on.store(true, Ordering::SeqCst);
        self.go_on.notify_waiters();
    }

    pub(crate) async fn until_waiting(&self, messages: usize) {
        eventually(&format!("{messages} publishes to be in flight"), || async {
            (self.waiting.load(Ordering::SeqCst) == messages).then_some(())
        })
        .await;
    }
}

impl Publisher for Stuck {
    async fn publish(&self, message: &Message) -> Result<Ack, PublishError> {
        if message.topic() == self.topic {
            let waiting = self.waiting.fetch_add(1, Ordering::SeqCst) + 1;
            self.most.fetch_max(waiting, Ordering::SeqCst);
            let _leaving = Leaving(self);
            let go_on = self.go_on.notified();
            tokio::pin!(go_on);
            go_on.as_mut().enable();
            if !self.gone_on.load(Ordering::SeqCst) {
                go_on.await;
            }
        } else {
            self.others.fetch_add(1, Ordering::SeqCst);
        }
        Ok(Ack::new())
    }
}

/// Counts a publish as over, also when it is given up.
struct Leaving<'a>(&'a Stuck);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}
