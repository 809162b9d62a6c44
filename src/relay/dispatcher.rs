//! Keeps publishes in flight and decides what becomes of each claim.

use std::{any::Any, collections::VecDeque, panic::AssertUnwindSafe, sync::Arc};

use futures_util::{FutureExt, StreamExt, stream::FuturesUnordered};
use tokio::{
    sync::mpsc::{Receiver, Sender},
    time::{Instant, sleep_until, timeout},
};

use super::{Shared, report::add, resting::Resting};
use crate::{
    lifecycle::{Arrow, Outcome},
    publisher::{Ack, PublishError, PublishErrorKind, Publisher},
    store::{Claim, Settlement},
};

pub(super) async fn run<P: Publisher>(
    shared: Arc<Shared<P>>,
    mut claims: Receiver<Vec<Claim>>,
    to_settler: Sender<Settlement>,
) {
    let mut dispatcher = Dispatcher { shared: &shared, to_settler, resting: Resting::default() };
    let mut queue: VecDeque<Claim> = VecDeque::new();
    let mut in_flight = FuturesUnordered::new();
    let mut more = true;
    let mut grace_ends: Option<Instant> = None;
    loop {
        let stopping = grace_ends.is_some();
        while in_flight.len() < shared.settings.max_in_flight || stopping {
            let Some(claim) = queue.pop_front() else { break };
            if stopping || shared.gate.is_closed() && !in_flight.is_empty() {
                dispatcher.settle(claim, Outcome::Unused).await;
            } else if let Some(claim) = dispatcher.admit(claim).await {
                in_flight.push(publish(&shared, claim));
            }
        }
        if !more && queue.is_empty() && in_flight.is_empty() {
            return;
        }
        tokio::select! {
            biased;
            () = shared.stop.cancelled(), if !stopping => {
                grace_ends = Some(Instant::now() + shared.settings.grace);
            }
            () = sleep_until(grace_ends.unwrap_or_else(Instant::now)), if stopping && !in_flight.is_empty() => {
                // Their claims are still held: the settler releases whatever is left at the end.
                tracing::warn!(messages = in_flight.len(), "the grace period is over; giving messages back");
                in_flight.clear();
            }
            Some((claim, result)) = in_flight.next(), if !in_flight.is_empty() => {
                dispatcher.published(claim, result).await;
                // Whatever else is there by now, without going round for each.
                while let Some(Some((claim, result))) = in_flight.next().now_or_never() {
                    dispatcher.published(claim, result).await;
                }
            }
            batch = claims.recv(), if more && queue.is_empty() => match batch {
                Some(batch) => queue.extend(batch),
                None => more = false,
            },
        }
    }
}

type Published = Result<Result<Ack, PublishError>, Box<dyn Any + Send>>;

/// Publishes one message, within its time and without letting a panic out.
async fn publish<P: Publisher>(shared: &Shared<P>, claim: Claim) -> (Claim, Published) {
    let limit = shared.settings.publish_timeout;
    let publish = AssertUnwindSafe(timeout(limit, shared.publisher.publish(claim.message()))).catch_unwind();
    let result = match publish.await {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(_)) if shared.publisher.is_connected() => {
            Ok(Err(PublishError::transient(format!("not published within {limit:?}"))))
        }
        Ok(Err(_)) => Ok(Err(PublishError::unavailable("the connection was lost while publishing"))),
        Err(panic) => Err(panic),
    };
    (claim, result)
}

struct Dispatcher<'a, P> {
    shared: &'a Shared<P>,
    to_settler: Sender<Settlement>,
    resting: Resting,
}

impl<P: Publisher> Dispatcher<'_, P> {
    /// The claim, if it may be published now; otherwise it is settled.
    async fn admit(&self, claim: Claim) -> Option<Claim> {
        let needed = Instant::now() + self.shared.settings.publish_timeout;
        match self.shared.held.trusted_until(claim.fence()) {
            // A renewal found that it belongs to somebody else.
            None => {
                tracing::debug!(id = claim.fence().id, "lost before it was published");
                add(&self.shared.counters.lost, 1);
                return None;
            }
            // The lease might end while the publish is in flight: it could not be renewed for a while.
            Some(until) if until < needed => {
                self.settle(claim, Outcome::Unused).await;
                return None;
            }
            Some(_) => {}
        }
        if let Some((rest, reason)) = self.resting.remaining(claim.message().topic()) {
            let outcome = Outcome::Configuration { reason: reason.to_owned(), rest };
            self.settle(claim, outcome).await;
            return None;
        }
        Some(claim)
    }

    /// Decides what a finished publish means for its claim and for the others.
    async fn published(&mut self, claim: Claim, result: Published) {
        let topic = claim.message().topic();
        let outcome = match result {
            Ok(Ok(ack)) => {
                self.shared.gate.open();
                self.resting.wake(topic);
                add(&self.shared.counters.duplicates, ack.is_duplicate().into());
                Outcome::Acknowledged
            }
            Ok(Err(error)) => match error.kind() {
                PublishErrorKind::Transient => Outcome::Transient(error.to_string()),
                PublishErrorKind::Permanent => Outcome::Permanent(error.to_string()),
                PublishErrorKind::Configuration => {
                    let (reason, rest) = (error.to_string(), self.shared.settings.rest);
                    self.resting.rest(topic, &reason, rest);
                    Outcome::Configuration { reason, rest }
                }
                PublishErrorKind::Unavailable => {
                    self.shared.gate.close(&error.to_string());
                    Outcome::Unused
                }
            },
            Err(panic) => Outcome::Transient(format!("the publisher panicked: {}", panic_message(&*panic))),
        };
        self.settle(claim, outcome).await;
    }

    async fn settle(&self, claim: Claim, outcome: Outcome) {
        let (message_id, topic) = (claim.message().id(), claim.message().topic().to_owned());
        let attempts = claim.attempts();
        let settlement = claim.settle(outcome, &self.shared.settings.retry, fastrand::f64());
        let transition = settlement.transition();
        let (id, error) = (settlement.fence().id, transition.error());
        match transition.arrow() {
            Arrow::Fail => tracing::warn!(id, %message_id, topic, attempts, error, "message failed"),
            Arrow::Retry => {
                let delay = transition.delay();
                tracing::debug!(id, %message_id, topic, attempts, error, ?delay, "message will be retried");
            }
            _ => {}
        }
        // There is room for every claim that can be held, and the settler ends last.
        let _ = self.to_settler.send(settlement).await;
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
