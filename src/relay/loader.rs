//! Loads payloads that were too large to come with their claims, when it is their turn, within a budget of bytes.

use std::{collections::HashMap, sync::Arc};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use super::Shared;
use crate::{
    publisher::Publisher,
    store::{Fence, Store, StoreError},
};

/// The budget is counted in units of so many bytes.
const UNIT: u64 = 1024;

/// How many payloads one statement loads.
const MOST_AT_ONCE: usize = 256;

/// Asks for payloads. When the last one is gone, [`run`] ends.
pub(super) struct Loader {
    requests: mpsc::Sender<Request>,
    budget: Arc<Semaphore>,
    units: u32,
}

pub(super) struct Request {
    fence: Fence,
    reply: oneshot::Sender<Loaded>,
}

/// What came of it.
pub(super) enum Loaded {
    Payload(Bytes),
    /// Somebody else has the row now.
    Lost,
    /// It is not to be had now: the database is away, or the relay stops.
    NotNow,
    /// It is too much for one statement, or cannot be read.
    Never(StoreError),
}

impl Loader {
    /// A loader, and the requests that [`run`] answers.
    pub(super) fn new(budget: u64) -> (Self, mpsc::Receiver<Request>) {
        let units = u32::try_from((budget / UNIT).max(1)).unwrap_or(u32::MAX >> 3).min(u32::MAX >> 3);
        let budget = Arc::new(Semaphore::new(units as usize));
        let (requests, receiver) = mpsc::channel(MOST_AT_ONCE);
        (Self { requests, budget, units }, receiver)
    }

    /// Waits for room and loads a payload. The room is taken for as long as the permit lives. A payload that is larger
    /// than the budget is loaded alone.
    pub(super) async fn load(&self, fence: Fence, bytes: u64) -> (Loaded, Option<OwnedSemaphorePermit>) {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(self.units).clamp(1, self.units);
        let Ok(permit) = self.budget.clone().acquire_many_owned(units).await else {
            return (Loaded::NotNow, None);
        };
        let (reply, answer) = oneshot::channel();
        if self.requests.send(Request { fence, reply }).await.is_err() {
            return (Loaded::NotNow, None);
        }
        (answer.await.unwrap_or(Loaded::NotNow), Some(permit))
    }
}

/// Answers requests, all that wait with one statement.
pub(super) async fn run<P: Publisher>(shared: Arc<Shared<P>>, mut requests: mpsc::Receiver<Request>) {
    let mut batch = Vec::new();
    while requests.recv_many(&mut batch, MOST_AT_ONCE).await > 0 {
        // Nobody waits any more for those whose publish was given up.
        batch.retain(|request| !request.reply.is_closed());
        let fences: Vec<Fence> = batch.iter().map(|request| request.fence).collect();
        let mut loaded = load(&shared.store, fences).await;
        for Request { fence, reply } in batch.drain(..) {
            let _ = reply.send(loaded.remove(&fence).unwrap_or(Loaded::Lost));
        }
    }
}

/// Loads a batch. Where that cannot be done, although the database answers, it is halved until the row is found that is
/// to blame.
async fn load(store: &Store, fences: Vec<Fence>) -> HashMap<Fence, Loaded> {
    let mut loaded = HashMap::with_capacity(fences.len());
    let mut parts = vec![fences];
    while let Some(mut part) = parts.pop() {
        let error = match store.load(&part).await {
            Ok(payloads) => {
                loaded.extend(payloads.into_iter().map(|(fence, payload)| (fence, Loaded::Payload(payload))));
                continue;
            }
            Err(error) => error,
        };
        tracing::debug!(%error, rows = part.len(), "cannot load payloads");
        if !matches!(error, StoreError::Refused(_)) && store.ping().await.is_err() {
            // It is none of these rows.
            parts.push(part);
            loaded.extend(parts.into_iter().flatten().map(|fence| (fence, Loaded::NotNow)));
            break;
        }
        if part.len() > 1 {
            parts.push(part.split_off(part.len() / 2));
            parts.push(part);
        } else {
            loaded.extend(part.pop().map(|fence| (fence, Loaded::Never(error))));
        }
    }
    loaded
}
