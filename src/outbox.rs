//! Enqueue messages in the transaction that they belong to.

use std::{
    collections::{HashMap, HashSet},
    fmt::{Debug, Display},
    sync::Arc,
};

use sea_orm::{ConnectionTrait, DatabaseConnection, DatabaseTransaction, DbErr, TransactionError};

use crate::{
    Waker,
    message::{DEFAULT_MAX_MESSAGE_BYTES, InvalidMessage, Message, MessageId, NewMessage, validate},
    store::{self, Dialect, EnqueuedRow, OutboxTable, Roles, StoreError},
};

/// Writes messages into the outbox, on whatever connection it is given.
///
/// Give it the transaction that writes the business rows: then the message exists if and only if that
/// transaction commits.
///
/// ```
/// # use sea_orm::{Database, TransactionTrait};
/// # use sea_orm_outbox::{NewMessage, Outbox, migration::{Migrator, MigratorTrait}};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let db = Database::connect("sqlite::memory:").await?;
/// # Migrator::up(&db, None).await?;
/// let outbox = Outbox::new();
/// let txn = db.begin().await?;
/// // … insert the order with `&txn` …
/// outbox.enqueue(&txn, NewMessage::json("orders.created", &4711)?.aggregate("order", 4711)).await?;
/// txn.commit().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Outbox {
    roles: Arc<Roles>,
    max_message_bytes: usize,
    waker: Option<Waker>,
}

impl Default for Outbox {
    fn default() -> Self {
        Self { roles: Arc::default(), max_message_bytes: DEFAULT_MAX_MESSAGE_BYTES, waker: None }
    }
}

/// That a message is in the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Enqueued {
    /// It was written now.
    New(MessageId),
    /// A message with this id and the same content was there already; nothing was written.
    Existing(MessageId),
}

impl Enqueued {
    /// The id of the message.
    pub fn message_id(&self) -> MessageId {
        match self {
            Self::New(id) | Self::Existing(id) => *id,
        }
    }

    /// Whether it was there already.
    pub fn is_existing(&self) -> bool {
        matches!(self, Self::Existing(_))
    }
}

/// Why nothing was enqueued.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnqueueError {
    /// The message could not be published.
    #[error(transparent)]
    Invalid(#[from] InvalidMessage),
    /// A message with this id exists, and its content is another one.
    #[error("the message id {id} exists already with another {field}")]
    IdTaken {
        /// The id.
        id: MessageId,
        /// In what the two differ.
        field: &'static str,
    },
    /// The outbox has no statements for this database, or its table is not there.
    #[error(transparent)]
    Store(StoreError),
    /// The database refused. On PostgreSQL the transaction must be rolled back.
    #[error("the message could not be written: {0}")]
    Database(#[source] DbErr),
}

impl From<DbErr> for EnqueueError {
    fn from(error: DbErr) -> Self {
        match StoreError::from(error.clone()) {
            table @ StoreError::Table(_) => Self::Store(table),
            _ => Self::Database(error),
        }
    }
}

impl Outbox {
    /// An outbox with the limits of a NATS server at its defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// An outbox in an application's own table.
    ///
    /// A message with something that the table has no column for (headers, an event type, …) is refused, except for
    /// the content type, which is not kept, and the ordering key that was made from the aggregate. A JSON column keeps
    /// the meaning of a payload, not its bytes.
    pub fn for_table<E: OutboxTable>() -> Self {
        Self { roles: Arc::new(Roles::of::<E>()), ..Self::default() }
    }

    /// The most bytes that a message may have, with its headers. Default: 1 MiB, what a NATS server at its
    /// defaults takes; set it to the server's `max_payload` if that is another. A larger message would be
    /// enqueued in vain and end `FAILED`.
    #[must_use]
    pub fn with_max_message_bytes(mut self, bytes: usize) -> Self {
        self.max_message_bytes = bytes;
        self
    }

    /// What [`transaction`](Self::transaction) wakes after its commit: the waker of relays in this process.
    #[must_use]
    pub fn with_waker(mut self, waker: Waker) -> Self {
        self.waker = Some(waker);
        self
    }

    /// Runs `work` in a transaction, commits it, and wakes a relay ([`with_waker`](Self::with_waker)), so that the
    /// messages go out at once. When `work` returns an error the transaction is rolled back and nobody is woken.
    ///
    /// It is `DatabaseConnection::transaction_async` with the wake. Transactions made in another way are as good: call
    /// [`Waker::wake`] after the commit, or leave the message to the relay's next look.
    ///
    /// ```
    /// # use sea_orm::Database;
    /// # use sea_orm_outbox::{EnqueueError, NewMessage, Outbox, Waker, migration::{Migrator, MigratorTrait}};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let db = Database::connect("sqlite::memory:").await?;
    /// # Migrator::up(&db, None).await?;
    /// let waker = Waker::new(); // and `Relay::builder(…).waker(waker.clone())`
    /// let outbox = Outbox::new().with_waker(waker);
    /// outbox
    ///     .transaction(&db, async |txn| {
    ///         // … insert the order with `txn` …
    ///         outbox.enqueue(txn, NewMessage::bytes("orders.created", "text/plain", "4711")).await
    ///     })
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`TransactionError::Transaction`] with the error of `work`, [`TransactionError::Connection`] when the
    /// transaction cannot be begun or committed. After an error of the commit the transaction may have been
    /// committed all the same.
    pub async fn transaction<T, E>(
        &self,
        db: &DatabaseConnection,
        work: impl AsyncFnOnce(&DatabaseTransaction) -> Result<T, E> + Send,
    ) -> Result<T, TransactionError<E>>
    where
        T: Send,
        E: Display + Debug + Send,
    {
        let result = db.transaction_async(work).await;
        // A commit whose answer was lost may have happened.
        if !matches!(result, Err(TransactionError::Transaction(_)))
            && let Some(waker) = &self.waker
        {
            waker.wake();
        }
        result
    }

    /// Writes one message.
    ///
    /// With an [id of its own](NewMessage::message_id) this may be repeated: as long as the row exists, the
    /// same id with the same content is one message, and the repeat is reported as
    /// [`Enqueued::Existing`]. The delay is no content.
    ///
    /// # Errors
    /// [`EnqueueError::Invalid`] and [`EnqueueError::IdTaken`] write nothing and leave the transaction usable.
    /// After [`EnqueueError::Database`] roll the transaction back. In REPEATABLE READ or SERIALIZABLE
    /// transactions of PostgreSQL an id that another transaction has enqueued meanwhile is a serialization
    /// failure: repeat the whole transaction.
    pub async fn enqueue<C: ConnectionTrait>(
        &self,
        db: &C,
        message: NewMessage,
    ) -> Result<Enqueued, EnqueueError> {
        let mut enqueued = self.enqueue_many(db, [message]).await?;
        // One message in, one answer out.
        Ok(enqueued.swap_remove(0))
    }

    /// Writes many messages, with one statement for 500 of them, and answers in their order.
    ///
    /// All are checked before the first is written. Give it a transaction: without one each statement commits
    /// for itself, and an error in the second leaves what the first has written.
    ///
    /// # Errors
    /// As for [`enqueue`](Self::enqueue), except that [`EnqueueError::IdTaken`] may come when other messages of
    /// the same call are written already: roll the transaction back.
    pub async fn enqueue_many<C: ConnectionTrait>(
        &self,
        db: &C,
        messages: impl IntoIterator<Item = NewMessage>,
    ) -> Result<Vec<Enqueued>, EnqueueError> {
        let dialect = Dialect::of(db.get_database_backend()).map_err(EnqueueError::Store)?;
        let mut rows: Vec<EnqueuedRow> = Vec::new();
        let mut places: HashMap<MessageId, usize> = HashMap::new();
        let mut answers = Vec::new();
        let mut ids_may_exist = false;
        for message in messages {
            ids_may_exist |= message.id_is_given();
            let delay = message.due_after();
            let message = message.into_message();
            validate(&message, delay, self.max_message_bytes)?;
            let id = message.id();
            if let Some(place) = places.get(&id) {
                same_content(&self.roles, &message, &rows[*place].message)?;
                answers.push(Enqueued::Existing(id));
            } else {
                places.insert(id, rows.len());
                answers.push(Enqueued::New(id));
                rows.push(EnqueuedRow { message, delay });
            }
        }
        let existing = self.insert(db, dialect, rows, ids_may_exist).await?;
        for answer in &mut answers {
            if existing.contains(&answer.message_id()) {
                *answer = Enqueued::Existing(answer.message_id());
            }
        }
        Ok(answers)
    }

    /// Inserts the rows in batches and returns the ids that were there already, with the same content.
    async fn insert<C: ConnectionTrait>(
        &self,
        db: &C,
        dialect: Dialect,
        rows: Vec<EnqueuedRow>,
        ids_may_exist: bool,
    ) -> Result<HashSet<MessageId>, EnqueueError> {
        let mut existing = HashSet::new();
        let mut rest = rows;
        // Once is the rule. A row that was there may be deleted before it can be compared; then it is our turn
        // again.
        for _ in 0..3 {
            let mut vanished = HashSet::new();
            for batch in batches(&rest) {
                let mut conflicts = store::insert(db, &self.roles, dialect, batch, ids_may_exist).await?;
                if conflicts.is_empty() {
                    continue;
                }
                let given: HashMap<MessageId, &Message> =
                    batch.iter().map(|row| (row.message.id(), &row.message)).collect();
                for stored in store::stored(db, &self.roles, dialect, &conflicts).await? {
                    if let Some(given) = given.get(&stored.id()) {
                        same_content(&self.roles, given, &stored)?;
                        conflicts.remove(&stored.id());
                        existing.insert(stored.id());
                    }
                }
                vanished.extend(conflicts);
            }
            if vanished.is_empty() {
                return Ok(existing);
            }
            rest.retain(|row| vanished.contains(&row.message.id()));
        }
        let message = "a message with the same id was enqueued and deleted again, three times over";
        Err(EnqueueError::Database(DbErr::Custom(message.to_owned())))
    }
}

/// Parts that fit into one statement: a bounded number of parameters, and of bytes in memory.
fn batches(mut rows: &[EnqueuedRow]) -> impl Iterator<Item = &[EnqueuedRow]> {
    const MAX_ROWS: usize = 500;
    const MAX_BYTES: usize = 8 * 1024 * 1024;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fitting = rows.iter().take(MAX_ROWS).take_while(|row| {
            bytes += row.message.payload().len();
            bytes <= MAX_BYTES
        });
        // A single message may be larger than a batch.
        let (batch, rest) = rows.split_at(fitting.count().max(1).min(rows.len()));
        rows = rest;
        (!batch.is_empty()).then_some(batch)
    })
}

/// That two messages with the same id are one.
fn same_content(roles: &Roles, given: &Message, stored: &Message) -> Result<(), EnqueueError> {
    if given == stored {
        return Ok(());
    }
    let (id, given, stored) = (given.id(), store::as_stored(roles, given), store::as_stored(roles, stored));
    let differs = [
        ("topic", given.topic != stored.topic),
        ("aggregate", given.aggregate != stored.aggregate),
        ("ordering key", given.ordering_key != stored.ordering_key),
        ("event type", given.event_type != stored.event_type),
        ("content type", given.content_type != stored.content_type),
        ("headers", given.headers != stored.headers),
        ("payload", given.payload != stored.payload),
    ];
    match differs.into_iter().find(|(_, differs)| *differs) {
        Some((field, _)) => Err(EnqueueError::IdTaken { id, field }),
        None => Ok(()),
    }
}
