//! A relay in the background.

use std::sync::Arc;

use tokio::sync::watch;

use super::{Health, Relay, RelayError, Report, Stop, health::Vitals};
use crate::{Waker, publisher::Publisher};

/// A relay that runs in the background. Dropping the handle tells it to stop, without waiting for it.
#[derive(Debug)]
#[must_use = "dropping the handle stops the relay"]
pub struct RelayHandle {
    stop: Stop,
    waker: Waker,
    vitals: Arc<Vitals>,
    ended: watch::Receiver<Option<Result<Report, RelayError>>>,
}

impl RelayHandle {
    pub(super) fn spawn<P: Publisher>(relay: Relay<P>) -> Self {
        let (stop, waker, vitals) = (Stop::default(), relay.waker.clone(), relay.vitals.clone());
        let (sender, ended) = watch::channel(None);
        let until = stop.clone();
        tokio::spawn(async move {
            let result = relay.run_until(until).await;
            // Nobody may be waiting any more.
            let _ = sender.send(Some(result));
        });
        Self { stop, waker, vitals, ended }
    }

    /// Has the relay, or another with the same [`Waker`], look for messages now. To be called after a commit.
    pub fn wake(&self) {
        self.waker.wake();
    }

    /// Lets the relay claim nothing more until it is [resumed](Self::resume). What it holds is published and settled,
    /// leases are renewed, and stale claims swept.
    pub fn pause(&self) {
        self.vitals.pause(true);
    }

    /// Lets a paused relay go on.
    pub fn resume(&self) {
        self.vitals.pause(false);
        self.waker.wake();
    }

    /// How the relay is doing.
    pub fn health(&self) -> Health {
        self.vitals.health()
    }

    /// Tells the relay to stop, waits until it has, and says what it did. May be called more than once, and
    /// dropped while it waits: the relay stops all the same.
    ///
    /// # Errors
    /// When the relay had ended on its own, see [`RelayError`].
    pub async fn shutdown(&self) -> Result<Report, RelayError> {
        self.stop.token.cancel();
        self.wait().await
    }

    /// The same without a grace period: what is in flight is given back, without spending attempts, and comes again
    /// although the broker may take it. What was acknowledged is settled. For those who are asked a second time, while
    /// [`shutdown`](Self::shutdown) waits.
    ///
    /// # Errors
    /// When the relay had ended on its own, see [`RelayError`].
    pub async fn shutdown_now(&self) -> Result<Report, RelayError> {
        self.stop.token.cancel();
        self.stop.now.cancel();
        self.wait().await
    }

    /// Waits until the relay ends, by [`shutdown`](Self::shutdown) or on its own.
    ///
    /// # Errors
    /// When the relay ended on its own, see [`RelayError`].
    pub async fn wait(&self) -> Result<Report, RelayError> {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(result) => result.clone().unwrap_or(Err(RelayError::Gone)),
            Err(_) => Err(RelayError::Gone),
        }
    }
}

impl Drop for RelayHandle {
    fn drop(&mut self) {
        self.stop.token.cancel();
    }
}
