//! Keeps publishes in flight and decides what becomes of each claim.

use std::{any::Any, collections::VecDeque, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{FutureExt, StreamExt, stream::FuturesUnordered};
use tokio::{
    sync::mpsc::{Receiver, Sender},
    time::{Instant, timeout},
};

use super::{
    Shared,
    keys::Keys,
    loader::{Loaded, Loader},
    report::add,
    resting::Resting,
    suspects::Turn,
};
use crate::{
    lifecycle::{Arrow, Outcome},
    publisher::{Ack, PublishError, PublishErrorKind, Publisher},
    store::{BehindFailed, Claim, Fence, Ordering, Settlement, StoreError},
};

pub(super) async fn run<P: Publisher>(
    shared: Arc<Shared<P>>,
    mut claims: Receiver<Vec<Claim>>,
    to_settler: Sender<Settlement>,
    loader: Loader,
) {
    let (resting, keys, next) = (Resting::default(), Keys::default(), VecDeque::new());
    let mut dispatcher = Dispatcher { shared: &shared, to_settler, resting, keys, next, alone: None };
    let mut queue: VecDeque<Claim> = VecDeque::new();
    let mut in_flight = FuturesUnordered::new();
    let mut more = true;
    let mut stopping = false;
    loop {
        while in_flight.len() < shared.settings.max_in_flight || stopping {
            let claim = match dispatcher.next.pop_front() {
                Some(claim) => claim,
                None => match queue.pop_front() {
                    Some(claim) => claim,
                    None => break,
                },
            };
            // While the broker is away one message at a time tries, with nothing else waiting behind it.
            let others = !in_flight.is_empty() || !queue.is_empty() || !dispatcher.next.is_empty();
            if stopping || shared.gate.is_closed() && others {
                dispatcher.settle(claim, Outcome::Unused).await;
            } else if let Some(claim) = dispatcher.unless_resting(claim).await {
                dispatcher.alone = in_flight.is_empty().then(|| claim.fence());
                in_flight.push(publish(&shared, &loader, claim));
            }
        }
        if !more && queue.is_empty() && dispatcher.next.is_empty() && in_flight.is_empty() {
            return;
        }
        tokio::select! {
            biased;
            () = shared.stop.token.cancelled(), if !stopping => stopping = true,
            () = shared.grace_over(), if stopping && !in_flight.is_empty() => {
                // Their claims are still held: the settler releases whatever is left at the end.
                tracing::warn!(messages = in_flight.len(), "not waiting any longer; giving messages back");
                in_flight.clear();
            }
            Some((claim, published)) = in_flight.next(), if !in_flight.is_empty() => {
                dispatcher.published(claim, published).await;
                // Whatever else is there by now, without going round for each.
                while let Some(Some((claim, published))) = in_flight.next().now_or_never() {
                    dispatcher.published(claim, published).await;
                }
            }
            batch = claims.recv(), if more && queue.is_empty() => match batch {
                // At once and not each when it is its turn: whoever ends a run must find all of it.
                Some(batch) => queue.extend(batch.into_iter().filter_map(|claim| dispatcher.admit(claim))),
                None => more = false,
            },
        }
    }
}

/// How long a message is put off whose payload could not be loaded.
const NOT_LOADED_PAUSE: Duration = Duration::from_secs(1);

/// How a publish ended.
enum Published {
    Answered(Result<Ack, PublishError>),
    Panicked(String),
    /// It did not begin: a renewal found that the row belongs to somebody else.
    Lost,
    /// It did not begin: its lease might have ended meanwhile, since it could not be renewed for a while.
    Untrusted,
    /// It did not begin: its payload is not to be had now.
    NotLoaded,
    /// It did not begin: its payload takes too long to load, or cannot be read.
    Unloadable(StoreError),
}

/// Publishes one message when its turn comes, within its time, and without letting a panic out.
async fn publish<P: Publisher>(shared: &Shared<P>, loader: &Loader, mut claim: Claim) -> (Claim, Published) {
    let _turn = Turn::wait(claim.is_suspect()).await;
    let limit = shared.settings.publish_timeout;
    // The room that the payload takes, until it is out of memory.
    let mut _room = None;
    if let Some(bytes) = claim.missing_payload() {
        let (loaded, room) = loader.load(claim.fence(), bytes).await;
        _room = room;
        match loaded {
            Loaded::Payload(payload) => claim.set_payload(payload),
            Loaded::Lost => return (claim, Published::Lost),
            Loaded::NotNow => return (claim, Published::NotLoaded),
            Loaded::Never(error) => return (claim, Published::Unloadable(error)),
        }
    }
    match shared.held.trusted_until(claim.fence()) {
        None => return (claim, Published::Lost),
        Some(until) if until < Instant::now() + limit => return (claim, Published::Untrusted),
        Some(_) => {}
    }
    let publish = async {
        match timeout(limit, shared.publisher.publish(claim.message())).await {
            Ok(result) => result,
            Err(_) if shared.publisher.is_connected() => {
                Err(PublishError::transient(format!("not published within {limit:?}")))
            }
            Err(_) => Err(PublishError::connection_lost("the connection was lost while publishing")),
        }
    };
    let published = match AssertUnwindSafe(publish).catch_unwind().await {
        Ok(result) => Published::Answered(result),
        Err(panic) => Published::Panicked(panic_message(&*panic).to_owned()),
    };
    claim.set_payload(Bytes::new());
    shared.held.unload(claim.fence());
    (claim, published)
}

struct Dispatcher<'a, P> {
    shared: &'a Shared<P>,
    to_settler: Sender<Settlement>,
    resting: Resting,
    keys: Keys,
    /// Those whose turn has come within their key.
    next: VecDeque<Claim>,
    /// The message that has been in flight with no other beside it, if there is one.
    alone: Option<Fence>,
}

impl<P: Publisher> Dispatcher<'_, P> {
    /// The claim, unless it has to wait for another of its key.
    fn admit(&mut self, claim: Claim) -> Option<Claim> {
        match self.shared.settings.ordering {
            Ordering::Unordered => Some(claim),
            Ordering::PerKey { .. } => self.keys.admit(claim),
        }
    }

    /// The claim, unless its topic rests; then it is settled.
    async fn unless_resting(&mut self, claim: Claim) -> Option<Claim> {
        let Some((delay, reason)) = self.resting.remaining(claim.message().topic()) else {
            return Some(claim);
        };
        let outcome = postponed(&claim, reason.to_owned(), delay);
        self.settle(claim, outcome).await;
        None
    }

    /// Decides what a finished publish means for its claim and for the others.
    async fn published(&mut self, claim: Claim, published: Published) {
        let outcome = match published {
            Published::Answered(Ok(ack)) => {
                self.shared.gate.open();
                self.resting.wake(claim.message().topic());
                add(&self.shared.counters.duplicates, ack.is_duplicate().into());
                Outcome::Acknowledged
            }
            Published::Answered(Err(error)) => self.failed(&claim, &error),
            Published::Panicked(message) => Outcome::Transient(format!("the publisher panicked: {message}")),
            Published::Untrusted => Outcome::Unused,
            Published::NotLoaded => {
                postponed(&claim, "its payload could not be loaded".to_owned(), NOT_LOADED_PAUSE)
            }
            Published::Unloadable(error @ StoreError::Refused(_)) => {
                Outcome::Permanent(format!("the row cannot be read: {error}"))
            }
            // A database that is slow today may be quicker tomorrow.
            Published::Unloadable(error) => Outcome::Transient(error.to_string()),
            Published::Lost => {
                tracing::debug!(id = %claim.fence().id, "lost before it was published");
                add(&self.shared.counters.lost, 1);
                let key = self.key(&claim);
                return self.release_behind(key).await;
            }
        };
        self.settle(claim, outcome).await;
    }

    fn failed(&mut self, claim: &Claim, error: &PublishError) -> Outcome {
        let reason = error.to_string();
        let gate = &self.shared.gate;
        match error.kind() {
            PublishErrorKind::Transient => Outcome::Transient(reason),
            PublishErrorKind::Permanent => Outcome::Permanent(reason),
            PublishErrorKind::Configuration => {
                // The broker is there: it said so.
                gate.open();
                let topic = claim.message().topic();
                let delay = self.resting.rest(topic, &reason, self.shared.settings.rest);
                postponed(claim, reason, delay)
            }
            PublishErrorKind::Unavailable => {
                let alone = self.alone == Some(claim.fence());
                gate.close(&reason);
                match (alone, error.is_connection_lost()) {
                    // It may be the message that breaks the connection: then it must run out of attempts.
                    (true, true) => Outcome::Transient(reason),
                    // Another message tries next: it may be this one that is in the way.
                    (true, false) => postponed(claim, reason, gate.pause()),
                    (false, _) => Outcome::Unused,
                }
            }
        }
    }

    /// Hands the settlement over, and lets the next of its key go on or none.
    async fn settle(&mut self, claim: Claim, outcome: Outcome) {
        let failed = matches!(outcome, Outcome::Transient(_) | Outcome::Permanent(_));
        let message = failed.then(|| (claim.message().id(), claim.message().topic().to_owned()));
        let (attempts, key) = (claim.attempts(), self.key(&claim));
        let settlement = claim.settle(outcome, &self.shared.settings.retry, fastrand::f64());
        let arrow = settlement.transition().arrow();
        if let Some((message_id, topic)) = message {
            let transition = settlement.transition();
            let (id, error, delay) = (settlement.fence().id, transition.error(), transition.delay());
            if arrow == Arrow::Fail {
                tracing::warn!(%id, %message_id, topic, attempts, error, "message failed");
            } else {
                tracing::debug!(%id, %message_id, topic, attempts, error, ?delay, "message will be retried");
            }
        }
        // There is room for every claim that can be held, and the settler ends last.
        let _ = self.to_settler.send(settlement).await;
        let skip = Ordering::PerKey { behind_failed: BehindFailed::Skip };
        match (arrow, &key) {
            (_, None) => {}
            (Arrow::Acknowledge, Some(key)) => self.next.extend(self.keys.next(key)),
            (Arrow::Fail, Some(key)) if self.shared.settings.ordering == skip => {
                self.next.extend(self.keys.next(key));
            }
            _ => self.release_behind(key).await,
        }
    }

    /// Gives back what waits behind a message of this key that is unfinished.
    async fn release_behind(&mut self, key: Option<String>) {
        for claim in key.map(|key| self.keys.cut(&key)).unwrap_or_default() {
            let _ = self.to_settler.send(Settlement::release(claim.fence())).await;
        }
    }

    /// The key in which the message has its turn.
    fn key(&self, claim: &Claim) -> Option<String> {
        match self.shared.settings.ordering {
            Ordering::Unordered => None,
            Ordering::PerKey { .. } => claim.message().ordering_key().map(str::to_owned),
        }
    }
}

/// Puts a message off that was not tried. A suspect keeps the error that marks it: the next sweep finds it again.
fn postponed(claim: &Claim, reason: String, delay: Duration) -> Outcome {
    if claim.is_suspect() { Outcome::Unused } else { Outcome::Postponed { reason, delay } }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
