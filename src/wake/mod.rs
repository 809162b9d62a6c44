//! Waking relays before their next look at the queue.

#[cfg(feature = "postgres")]
mod listener;

use std::sync::Arc;
#[cfg(feature = "postgres")]
use std::sync::Weak;
#[cfg(all(feature = "postgres", feature = "testing"))]
use std::time::Duration;

#[cfg(feature = "postgres")]
use sea_orm::{DatabaseConnection, DbBackend};
use tokio::sync::Notify;
#[cfg(feature = "postgres")]
use tokio_util::sync::{CancellationToken, DropGuard};

#[cfg(feature = "postgres")]
use listener::Probing;

/// Wakes one of the relays that it was given to, of this process, so that a message need not wait for the next look at
/// the queue ([`RelayBuilder::poll_every`](crate::RelayBuilder::poll_every)).
///
/// Give clones of one waker to relays ([`RelayBuilder::waker`](crate::RelayBuilder::waker)), and to whoever commits
/// messages: [`Outbox::transaction`](crate::Outbox::transaction) wakes after its commit, others call
/// [`wake`](Self::wake) after theirs. On PostgreSQL it can also listen for the commits of other processes
/// ([`listening`](Self::listening)). One relay looks, however many wait; if it finds more than a batch it wakes the
/// next. A wake that comes while all are at work is kept, any number of them as one.
///
/// It is never the only way to be found: relays go on looking by themselves.
#[derive(Clone, Debug, Default)]
pub struct Waker(Arc<Shared>);

/// Only PostgreSQL tells of commits.
#[cfg(feature = "postgres")]
#[derive(Debug, thiserror::Error)]
#[error("only PostgreSQL tells of commits, and this database is {0:?}")]
pub struct ListenError(DbBackend);

#[derive(Debug, Default)]
struct Shared {
    notify: Notify,
    /// Ends the listener with the last clone.
    #[cfg(feature = "postgres")]
    _listener: Option<DropGuard>,
}

impl Waker {
    /// A waker that no relay waits for yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// A waker that also wakes when any process commits messages to the table `outbox_message` of this PostgreSQL
    /// database.
    ///
    /// It takes the migration `notifying` of `sea-orm-outbox-migration`, which makes a trigger that notifies once for each
    /// transaction that inserts messages, and one connection beside those of the pool, for as
    /// long as a clone of the waker lives. One is enough for all relays of a process. Notifications cost writers
    /// something: PostgreSQL orders the commits of transactions that notify.
    ///
    /// When the connection is lost it is made anew, and a relay is woken for what may have been missed. Behind a
    /// pooler of transactions, such as PgBouncer in that mode, no notification arrives: this is found out before it
    /// listens, said once in the log, and tried again every five minutes.
    ///
    /// # Errors
    /// [`ListenError`] when the database is not PostgreSQL.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    #[cfg(feature = "postgres")]
    pub fn listening(db: &DatabaseConnection) -> Result<Self, ListenError> {
        Self::listening_to(db, "outbox_message")
    }

    /// The same for a channel that is notified for an application's own table.
    ///
    /// # Errors
    /// [`ListenError`] when the database is not PostgreSQL.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    #[cfg(feature = "postgres")]
    pub fn listening_to(db: &DatabaseConnection, channel: &str) -> Result<Self, ListenError> {
        Self::probing(db, channel, Probing::default())
    }

    /// The same, and soon tries again whether notifications arrive.
    #[cfg(all(feature = "postgres", feature = "testing"))]
    #[doc(hidden)]
    pub fn listening_impatiently(
        db: &DatabaseConnection,
        channel: &str,
        patience: Duration,
    ) -> Result<Self, ListenError> {
        Self::probing(db, channel, Probing { limit: patience, every: patience, deaf_pause: patience })
    }

    #[cfg(feature = "postgres")]
    fn probing(db: &DatabaseConnection, channel: &str, probing: Probing) -> Result<Self, ListenError> {
        let backend = db.get_database_backend();
        if backend != DbBackend::Postgres {
            return Err(ListenError(backend));
        }
        let token = CancellationToken::new();
        let shared = Shared { notify: Notify::new(), _listener: Some(token.clone().drop_guard()) };
        let waker = Self(Arc::new(shared));
        let weak = WeakWaker { waker: Arc::downgrade(&waker.0), gone: token };
        tokio::spawn(listener::run(db.clone(), channel.to_owned(), weak, probing));
        Ok(waker)
    }

    /// Wakes one relay. Call it after the commit: before, there is nothing to be seen.
    pub fn wake(&self) {
        self.0.notify.notify_one();
    }

    /// Waits to be woken.
    pub(crate) async fn woken(&self) {
        self.0.notify.notified().await;
    }
}

/// What a listener has of a waker: it does not keep it alive.
#[cfg(feature = "postgres")]
struct WeakWaker {
    waker: Weak<Shared>,
    gone: CancellationToken,
}

#[cfg(feature = "postgres")]
impl WeakWaker {
    fn wake(&self) {
        if let Some(shared) = self.waker.upgrade() {
            shared.notify.notify_one();
        }
    }

    /// Waits until nobody has the waker any more.
    async fn gone(&self) {
        self.gone.cancelled().await;
    }
}
