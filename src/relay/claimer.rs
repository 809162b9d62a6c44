//! Wins batches of rows, as long as there is room for them.

use std::{
    future::Future,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::{
    sync::mpsc::{Permit, Sender},
    time::{Instant, sleep},
};

use super::{Shared, gate::Passage, jittered, pace, report::add};
use crate::{
    publisher::Publisher,
    store::{Claim, ClaimStrategy, Pick, Settlement},
};

/// How long suspects, which are published one at a time, may keep the others waiting; and the others them.
const SUSPECTS_TURN: Duration = Duration::from_secs(1);

pub(super) async fn run<P: Publisher>(
    shared: Arc<Shared<P>>,
    to_dispatcher: Sender<Vec<Claim>>,
    to_settler: Sender<Settlement>,
) {
    let mut claimer = Claimer { shared, to_settler, batches: 0, failures: 0 };
    let mut suspects_after = Instant::now();
    // Ends when told to stop; a claim that is under way is always seen through.
    while let Some(room) = claimer.unless_stopped(to_dispatcher.reserve()).await {
        let Ok(room) = room else { return };
        let Some(passage) = claimer.passage().await else { return };
        if passage == Passage::Free
            && Instant::now() >= suspects_after
            && claimer.shared.suspects.load(Ordering::Relaxed)
        {
            drop(room);
            claimer.suspects(&to_dispatcher).await;
            suspects_after = Instant::now() + SUSPECTS_TURN;
            continue;
        }
        let rows = if passage == Passage::One { 1 } else { claimer.shared.settings.batch_size };
        let next = claimer.claim(Pick::Ordinary, rows, room).await;
        if passage == Passage::One {
            // Only its outcome says whether more may follow.
            claimer.alone().await;
        }
        let pause = match next {
            Next::AtOnce if passage == Passage::Free => continue,
            Next::AtOnce => Duration::ZERO,
            Next::LostRace => Duration::from_millis(fastrand::u64(1..10)),
            Next::Poll => jittered(claimer.shared.settings.poll_every),
            Next::Retry(pause) => pause,
        };
        claimer.unless_stopped(sleep(pause)).await;
    }
}

struct Claimer<P> {
    shared: Arc<Shared<P>>,
    to_settler: Sender<Settlement>,
    batches: u64,
    failures: u32,
}

/// When to claim again.
enum Next {
    AtOnce,
    LostRace,
    Poll,
    Retry(Duration),
}

impl<P: Publisher> Claimer<P> {
    /// Claims a batch and hands it to the dispatcher.
    async fn claim(&mut self, pick: Pick, rows: usize, room: Permit<'_, Vec<Claim>>) -> Next {
        let shared = self.shared.clone();
        let settings = &shared.settings;
        self.batches += 1;
        let claimed_by = format!("{}:{}", settings.name, self.batches);
        // Suspects are few and taken one by one: no need to spread relays over slices.
        let strategy = match pick {
            Pick::Ordinary => settings.strategy,
            Pick::Suspects => ClaimStrategy::SkipLocked,
        };
        let before = Instant::now();
        let claimed = shared.store.claim(strategy, pick, rows as u64, &claimed_by, settings.lease).await;
        let claimed = match claimed {
            Ok(claimed) => claimed,
            Err(error) => {
                if self.failures == 0 {
                    tracing::warn!(%error, "cannot claim; the relay waits for the database");
                }
                self.failures = self.failures.saturating_add(1);
                return Next::Retry(pace().delay(self.failures, fastrand::f64()));
            }
        };
        if self.failures > 0 {
            tracing::info!("the database answers again; the relay goes on");
            self.failures = 0;
        }
        let won = claimed.claims.len() + claimed.unreadable.len();
        add(&shared.counters.claimed, won as u64);
        add(&shared.counters.lost_races, claimed.lost_races);
        let fences = claimed.claims.iter().map(Claim::fence);
        let fences = fences.chain(claimed.unreadable.iter().map(Settlement::fence));
        shared.held.add(fences, before + settings.lease);
        for settlement in claimed.unreadable {
            tracing::warn!(
                id = settlement.fence().id,
                error = settlement.transition().error(),
                "message failed"
            );
            // The settler ends last.
            let _ = self.to_settler.send(settlement).await;
        }
        if !claimed.claims.is_empty() {
            room.send(claimed.claims);
        }
        match (claimed.more, won) {
            (true, 0) => Next::LostRace,
            (true, _) => Next::AtOnce,
            (false, _) => Next::Poll,
        }
    }

    /// Publishes suspects, each alone in this process, so that one that kills its worker dies alone.
    async fn suspects(&mut self, to_dispatcher: &Sender<Vec<Claim>>) {
        let turn_ends = Instant::now() + SUSPECTS_TURN;
        while self.alone().await && Instant::now() < turn_ends && !self.shared.gate.is_closed() {
            let Ok(room) = to_dispatcher.reserve().await else { return };
            match self.claim(Pick::Suspects, 1, room).await {
                Next::AtOnce => {}
                Next::LostRace | Next::Retry(_) => return,
                Next::Poll => {
                    // The sweeper will say when there are new ones.
                    self.shared.suspects.store(false, Ordering::Relaxed);
                    return;
                }
            }
        }
    }

    /// Waits until nothing is held; `false` when told to stop first.
    async fn alone(&self) -> bool {
        self.unless_stopped(self.shared.held.wait_until_empty()).await.is_some()
    }

    async fn passage(&self) -> Option<Passage> {
        self.unless_stopped(self.shared.gate.pass(&self.shared.publisher)).await
    }

    async fn unless_stopped<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        self.shared.stop.run_until_cancelled(future).await
    }
}
