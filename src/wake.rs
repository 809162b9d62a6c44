//! Waking relays before their next look at the queue.

use std::sync::Arc;

use tokio::sync::Notify;

/// Wakes one of the relays that it was given to, of this process, so that a message need not wait for the next look at
/// the queue ([`RelayBuilder::poll_every`](crate::RelayBuilder::poll_every)).
///
/// Give clones of one waker to relays ([`RelayBuilder::waker`](crate::RelayBuilder::waker)), and to whoever commits
/// messages: [`Outbox::transaction`](crate::Outbox::transaction) wakes after its commit, others call
/// [`wake`](Self::wake) after theirs. One relay looks, however many wait; if it finds more than a batch it wakes the
/// next. A wake that comes while all are at work is kept, any number of them as one.
///
/// It is never the only way to be found: relays go on looking by themselves.
#[derive(Clone, Debug, Default)]
pub struct Waker(Arc<Notify>);

impl Waker {
    /// A waker that no relay waits for yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Wakes one relay. Call it after the commit: before, there is nothing to be seen.
    pub fn wake(&self) {
        self.0.notify_one();
    }

    /// Waits to be woken.
    pub(crate) async fn woken(&self) {
        self.0.notified().await;
    }
}
