//! Wins batches of rows, as long as there is room for them.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::{
    sync::mpsc::{Permit, Sender},
    time::{Instant, sleep},
};

use super::{Shared, gate::Passage, health::Duty, jittered, pace, report::add, walk::Walk};
use crate::{
    publisher::Publisher,
    store::{
        BehindFailed, Claim, ClaimRequest, Claimed, Fence, Ordering, Position, Settlement, StoreError,
        longest_run,
    },
};

/// How long suspects, which are published one at a time, may keep the others waiting; and the others them.
const SUSPECTS_TURN: Duration = Duration::from_secs(1);

pub(super) async fn run<P: Publisher>(
    shared: Arc<Shared<P>>,
    to_dispatcher: Sender<Vec<Claim>>,
    to_settler: Sender<Settlement>,
) {
    let rows = shared.settings.batch_size;
    let run = fastrand::u32(..);
    let unanswered = Vec::new();
    let walk = Walk::new();
    let mut claimer = Claimer { shared, to_settler, rows, run, walk, batches: 0, failures: 0, unanswered };
    let mut suspects_after = Instant::now();
    // A claim that is under way when it is told to stop is always seen through.
    while let Some(passage) = claimer.passage().await {
        let Some(Ok(room)) = claimer.unless_stopped(to_dispatcher.reserve()).await else { break };
        let next = match passage {
            // It took a while to get here.
            _ if claimer.shared.vitals.is_paused() => Next::AtOnce,
            Passage::One => claimer.probe(room).await,
            Passage::Free if Instant::now() >= suspects_after && claimer.shared.suspects.any() => {
                drop(room);
                claimer.suspects(&to_dispatcher).await;
                suspects_after = Instant::now() + SUSPECTS_TURN;
                Next::AtOnce
            }
            Passage::Free => claimer.claim(claimer.rows, room).await,
        };
        claimer.give_back_unanswered().await;
        let pause = match &next {
            Next::AtOnce => continue,
            Next::LostRace => Duration::from_millis(fastrand::u64(1..10)),
            Next::Poll => jittered(claimer.shared.settings.poll_every),
            Next::WalkOn(pause) | Next::Retry(pause) => *pause,
        };
        claimer.pause(pause, &next).await;
    }
    // The dispatcher need not wait for that.
    drop(to_dispatcher);
    claimer.give_back_at_last().await;
}

/// No payload that is larger comes with its claim, however much room there is.
const LARGEST_INLINE: u64 = 64 * 1024;

/// The most bytes of a payload that comes with its claim, so that all of a batch have room.
fn inline_bytes<P>(shared: &Shared<P>, rows: usize) -> u64 {
    let room = shared.settings.inline_budget().saturating_sub(shared.held.bytes());
    (room / rows as u64).min(LARGEST_INLINE)
}

struct Claimer<P> {
    shared: Arc<Shared<P>>,
    to_settler: Sender<Settlement>,
    /// How many rows to claim: fewer after a claim that took too long.
    rows: usize,
    /// Tells the claims of this relay from those of another with the same name.
    run: u32,
    walk: Walk,
    batches: u64,
    /// Of the database, one after the other.
    failures: u32,
    /// Claims whose answer never came, and where they began: they may have happened.
    unanswered: Vec<(String, Option<Position>)>,
}

/// More claims without an answer than this are left to the sweep.
const MOST_UNANSWERED: usize = 100;

/// When to claim again.
enum Next {
    AtOnce,
    LostRace,
    Poll,
    /// With what this relay holds there is no hurry: what is further on may well be waiting for that.
    WalkOn(Duration),
    Retry(Duration),
}

impl<P: Publisher> Claimer<P> {
    /// Claims a batch and hands it to the dispatcher.
    async fn claim(&mut self, rows: usize, room: Permit<'_, Vec<Claim>>) -> Next {
        let claimed_by = self.claimed_by();
        let head_may_have_moved = self.head_may_have_moved();
        let Shared { store, settings, held, .. } = &*self.shared;
        let before = Instant::now();
        let after = self.walk.next(held.through(), head_may_have_moved).cloned();
        let request = ClaimRequest {
            strategy: settings.strategy.unwrap_or_default(),
            limit: rows as u64,
            claimed_by: &claimed_by,
            lease: settings.lease,
            after: after.as_ref(),
            inline_bytes: Some(inline_bytes(&self.shared, rows)),
        };
        let mut claimed = store.claim(&request).await;
        let mut moved = false;
        if let Ok(claimed) = &mut claimed {
            moved = self.walk.claimed(claimed, claimed.claims.len() + claimed.unreadable.len() >= rows);
        }
        match self.claimed(claimed, (claimed_by, after), before, room).await {
            // Nothing that can be claimed was here; it may be further on.
            Next::LostRace | Next::Poll if moved && self.shared.held.len() == 0 => Next::AtOnce,
            Next::LostRace | Next::Poll if moved => Next::WalkOn(before.elapsed() * 2),
            next => next,
        }
    }

    /// Claims one row, to see whether the broker is back, and waits for what becomes of it.
    async fn probe(&mut self, room: Permit<'_, Vec<Claim>>) -> Next {
        if !self.alone().await {
            return Next::AtOnce;
        }
        // Suspects too: nothing else may be left, and nothing else is in flight.
        let next = match self.shared.suspects.take() {
            Some(suspect) => self.claim_suspect(suspect, room).await,
            None => self.claim(1, room).await,
        };
        self.alone().await;
        next
    }

    /// Publishes suspects, each with nothing else in flight, so that one that kills its worker dies alone.
    async fn suspects(&mut self, to_dispatcher: &Sender<Vec<Claim>>) {
        // The turn begins when what is in flight is through, however long that takes.
        if !self.alone().await {
            return;
        }
        let turn_ends = Instant::now() + SUSPECTS_TURN;
        let Shared { gate, vitals, .. } = &*self.shared.clone();
        while self.alone().await && Instant::now() < turn_ends && !gate.is_closed() && !vitals.is_paused() {
            let Some(suspect) = self.shared.suspects.take() else { return };
            let Ok(room) = to_dispatcher.reserve().await else { return };
            if let Next::Retry(_) = self.claim_suspect(suspect, room).await {
                return;
            }
        }
    }

    async fn claim_suspect(&mut self, suspect: Fence, room: Permit<'_, Vec<Claim>>) -> Next {
        let claimed_by = self.claimed_by();
        let Shared { store, settings, .. } = &*self.shared;
        let before = Instant::now();
        let claimed = match store.claim_candidates(&[suspect], &claimed_by, settings.lease).await {
            Err(StoreError::Contention(_)) => Ok(Claimed::default()),
            other => other,
        };
        match self.claimed(claimed, (claimed_by, None), before, room).await {
            // There may be others.
            Next::Poll => Next::AtOnce,
            next => next,
        }
    }

    async fn claimed(
        &mut self,
        claimed: Result<Claimed, StoreError>,
        claim: (String, Option<Position>),
        before: Instant,
        room: Permit<'_, Vec<Claim>>,
    ) -> Next {
        let claimed = match claimed {
            Ok(claimed) => claimed,
            Err(error) => {
                if let StoreError::Timeout { .. } = error {
                    // Large messages may be more than the time allows.
                    self.rows = (self.rows / 2).max(1);
                }
                if self.failures == 0 {
                    tracing::warn!(%error, "cannot claim; the relay waits for the database");
                }
                self.failures = self.failures.saturating_add(1);
                self.shared.vitals.note(Duty::Claim, false);
                if self.unanswered.len() < MOST_UNANSWERED {
                    self.unanswered.push(claim);
                }
                return Next::Retry(pace().delay(self.failures, fastrand::f64()));
            }
        };
        let Shared { settings, counters, held, .. } = &*self.shared;
        self.rows = self.rows.saturating_mul(2).min(settings.batch_size);
        if self.failures > 0 {
            tracing::info!("the database answers again; the relay goes on");
            self.shared.vitals.note(Duty::Claim, true);
            self.failures = 0;
        }
        let won = claimed.claims.len() + claimed.unreadable.len();
        add(&counters.claimed, won as u64);
        add(&counters.lost_races, claimed.lost_races);
        let claims =
            claimed.claims.iter().map(|claim| (claim.fence(), claim.message().payload().len() as u64));
        let unreadable = claimed.unreadable.iter().map(|unreadable| (unreadable.fence(), 0));
        held.add(claims.chain(unreadable), before + settings.lease);
        let mut claims = claimed.claims;
        for unreadable in claimed.unreadable {
            if settings.ordering == (Ordering::PerKey { behind_failed: BehindFailed::Hold }) {
                let (behind, others) = claims.into_iter().partition::<Vec<_>, _>(|claim| {
                    let key = claim.message().ordering_key();
                    key.is_some() && key == unreadable.ordering_key() && claim.fence() > unreadable.fence()
                });
                claims = others;
                for claim in behind {
                    let _ = self.to_settler.send(Settlement::release(claim.fence())).await;
                }
            }
            let settlement = unreadable.settle();
            let (id, error) = (settlement.fence().id, settlement.transition().error());
            tracing::warn!(%id, error, "message failed");
            // The settler ends last.
            let _ = self.to_settler.send(settlement).await;
        }
        if !claims.is_empty() {
            room.send(claims);
        }
        if claimed.more && won > 0 {
            // There is enough for another relay as well.
            self.shared.waker.wake();
        }
        if before.elapsed() + settings.publish_timeout >= settings.lease {
            // Too late to publish them: they go back, and next time it had better be fewer.
            self.rows = (self.rows / 4).max(1);
            return Next::Retry(pace().delay(1, fastrand::f64()));
        }
        match (claimed.more, won) {
            (true, 0) => Next::LostRace,
            (true, _) => Next::AtOnce,
            (false, _) => Next::Poll,
        }
    }

    /// Gives back what was claimed by statements whose answer never came, once the database answers again.
    async fn give_back_unanswered(&mut self) {
        while self.failures == 0 && !self.unanswered.is_empty() {
            if !self.room().await || !self.give_back_last_unanswered().await {
                return;
            }
        }
    }

    /// The same for a relay that stops: it does not wait for the database.
    async fn give_back_at_last(&mut self) {
        while !self.unanswered.is_empty() && Instant::now() < self.shared.grace_ends() {
            if !self.give_back_last_unanswered().await {
                return;
            }
        }
    }

    /// Nobody has seen those rows, so no attempt is spent. `false` when the database does not answer.
    async fn give_back_last_unanswered(&mut self) -> bool {
        let Some((claimed_by, after)) = self.unanswered.last() else { return true };
        let before = Instant::now();
        let Ok(fences) = self.shared.store.claims_of(claimed_by, after.as_ref()).await else { return false };
        self.unanswered.pop();
        if fences.is_empty() {
            return true;
        }
        tracing::info!(rows = fences.len(), "giving back claims whose answer never came");
        let held = fences.iter().map(|fence| (*fence, 0));
        self.shared.held.add(held, before + self.shared.settings.lease);
        for fence in fences {
            let _ = self.to_settler.send(Settlement::release(fence)).await;
        }
        true
    }

    /// Names this relay, its run and the batch.
    fn claimed_by(&mut self) -> String {
        self.batches += 1;
        format!("{}:{:08x}-{}", self.shared.settings.name, self.run, self.batches)
    }

    /// Waits until the broker is there and a batch can be held; `None` when told to stop first.
    async fn passage(&self) -> Option<Passage> {
        self.unless_stopped(self.shared.vitals.resumed()).await?;
        if !self.room().await {
            return None;
        }
        self.unless_stopped(self.shared.gate.pass(&self.shared.publisher)).await
    }

    /// Waits until another batch can be held; `false` when told to stop first.
    async fn room(&self) -> bool {
        let Shared { settings, held, .. } = &*self.shared;
        let most = settings.most_held() - settings.batch_size;
        self.unless_stopped(held.wait_until_at_most(most)).await.is_some()
    }

    /// Whether with order per key the next messages of what this relay held may now be claimed: all of it is through
    /// since the head of the queue was looked at, or as much as the run of one key.
    fn head_may_have_moved(&self) -> bool {
        let Shared { settings, held, .. } = &*self.shared;
        let through = self.walk.through_since(held.through());
        settings.ordering != Ordering::Unordered
            && through > 0
            && (held.len() == 0 || through >= longest_run(settings.batch_size as u64))
    }

    /// Waits before the next claim: in the absence of failures only until there is something new.
    async fn pause(&self, pause: Duration, next: &Next) {
        let Shared { settings, held, waker, .. } = &*self.shared;
        let in_order = settings.ordering != Ordering::Unordered;
        let head_moves = in_order && matches!(next, Next::Poll | Next::WalkOn(_));
        let look_again = async {
            tokio::select! {
                () = sleep(pause) => {}
                () = waker.woken(), if matches!(next, Next::Poll) => {}
                () = held.wait_until(|| self.head_may_have_moved()), if head_moves => {}
            }
        };
        self.unless_stopped(look_again).await;
    }

    /// Waits until nothing is held; `false` when told to stop first.
    async fn alone(&self) -> bool {
        self.unless_stopped(self.shared.held.wait_until_at_most(0)).await.is_some()
    }

    async fn unless_stopped<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        self.shared.stop.token.run_until_cancelled(future).await
    }
}
