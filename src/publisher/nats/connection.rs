//! What is known of the connection while a publish waits.

use std::sync::atomic::{AtomicU64, Ordering};

use async_nats::{Client, connection::State};
use tokio::time::Instant;

use crate::publisher::PublishError;

/// A client, and how many answers came through it.
pub(super) struct Connection {
    pub(super) client: Client,
    answers: AtomicU64,
}

/// What the connection was like when a publish began.
pub(super) struct Before {
    pub(super) began: Instant,
    connects: u64,
    answers: u64,
}

impl Connection {
    pub(super) fn new(client: Client) -> Self {
        Self { client, answers: AtomicU64::new(0) }
    }

    pub(super) fn is_up(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Refuses to begin while the connection is down: the client would keep the message and send it after
    /// reconnecting, when nobody waits for it any more.
    pub(super) fn begin(&self) -> Result<Before, PublishError> {
        if !self.is_up() {
            return Err(PublishError::unavailable("not connected to NATS"));
        }
        Ok(Before {
            began: Instant::now(),
            connects: self.connects(),
            answers: self.answers.load(Ordering::Relaxed),
        })
    }

    /// That the server has answered a publish, whatever it said.
    pub(super) fn answered(&self) {
        self.answers.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether the connection held all the while. If not, messages under way may be lost, and acknowledgements
    /// certainly are.
    pub(super) fn held(&self, before: &Before) -> bool {
        self.is_up() && self.connects() == before.connects
    }

    /// Whether any publish was answered since.
    pub(super) fn answered_since(&self, before: &Before) -> bool {
        self.answers.load(Ordering::Relaxed) != before.answers
    }

    pub(super) fn lost(what: &str) -> PublishError {
        PublishError::connection_lost(format!("the connection to NATS was lost before {what}"))
    }

    fn connects(&self) -> u64 {
        self.client.statistics().connects.load(Ordering::Relaxed)
    }
}
