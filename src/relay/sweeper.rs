//! Returns or buries claims whose lease is over, whoever held them.

use std::{collections::HashSet, sync::Arc, time::Duration};

use tokio::time::sleep;

use super::{
    Shared, jittered,
    settle::{Settled, settle},
};
use crate::{
    publisher::Publisher,
    store::{Fence, Position, Settlement, Stale, StoreError},
};

/// How many entries of the due index one step reads: some 30 ms for the database.
const STEP: u64 = 10_000;

/// How many rows one statement writes.
const BATCH: usize = 1_000;

pub(super) async fn run<P: Publisher>(shared: Arc<Shared<P>>, after: Duration) {
    let mut position = None;
    let mut failed = false;
    // Somewhere within the first interval, so that relays which started together do not sweep together.
    let intervals = shared.settings.sweep_every * 3;
    let mut pause = after + shared.settings.sweep_every.mul_f64(fastrand::f64());
    shared.vitals.swept(true, after + intervals);
    while shared.stop.token.run_until_cancelled(sleep(pause)).await.is_some() {
        pause = jittered(shared.settings.sweep_every);
        match sweep(&shared, &mut position).await {
            Ok(swept) => {
                if failed {
                    tracing::info!("the sweep works again");
                }
                failed = false;
                shared.vitals.swept(true, intervals);
                if swept > 0 {
                    tracing::info!(rows = swept, "swept stale claims");
                }
            }
            // Somebody else is sweeping, or settling.
            Err(StoreError::Contention(error)) => tracing::debug!(%error, "cannot sweep now"),
            Err(error) => {
                if !failed {
                    tracing::warn!(%error, "cannot sweep; the relay waits for the database");
                }
                failed = true;
                // Owners could not renew their leases while the database was away: let them first.
                pause = pause.max(shared.settings.lease);
                shared.vitals.swept(false, pause + intervals);
            }
        }
    }
}

/// In place of [`run`], where this relay is told not to sweep: whether anybody else does.
pub(super) async fn watch<P: Publisher>(shared: Arc<Shared<P>>) {
    tracing::warn!(
        relay = shared.settings.name,
        "this relay does not sweep: the claims of workers that died come back only if another relay of the table sweeps"
    );
    let mut stale = HashSet::new();
    // Whoever sweeps at this pace has passed twice in between.
    while shared
        .stop
        .token
        .run_until_cancelled(sleep(jittered(shared.settings.sweep_every) * 3))
        .await
        .is_some()
    {
        // The other tasks say when the database is away, and owners then could not renew their leases.
        let found: HashSet<Fence> = match shared.store.stale(None, STEP).await {
            Ok(found) => found.stale.iter().map(Stale::fence).collect(),
            Err(_) => HashSet::new(),
        };
        if found.intersection(&stale).next().is_some() {
            tracing::warn!(
                rows = found.len(),
                "stale claims stay: no relay of the table sweeps, set `sweep(true)` on one at least"
            );
            return;
        }
        stale = found;
    }
}

/// One pass: the head of the due index, where almost every claim stands, and one step of the rest, going on
/// where the last pass ended.
async fn sweep<P: Publisher>(
    shared: &Shared<P>,
    position: &mut Option<Position>,
) -> Result<usize, StoreError> {
    let mut suspects = Vec::new();
    let (mut swept, end_of_head) = step(shared, None, &mut suspects).await?;
    if let Some(end_of_head) = end_of_head {
        let from = position.take().unwrap_or(end_of_head);
        let (more, next) = step(shared, Some(&from), &mut suspects).await?;
        swept += more;
        *position = next;
    }
    shared.suspects.found(suspects);
    Ok(swept)
}

async fn step<P: Publisher>(
    shared: &Shared<P>,
    after: Option<&Position>,
    suspects: &mut Vec<Fence>,
) -> Result<(usize, Option<Position>), StoreError> {
    let read = shared.store.stale(after, STEP).await?;
    suspects.extend(read.suspects);
    let mut swept = 0;
    let mut settlements: Vec<Settlement> =
        read.stale.into_iter().map(|stale| stale.settle(&shared.settings.retry)).collect();
    while !settlements.is_empty() {
        let rest = settlements.split_off(settlements.len().min(BATCH));
        let Settled { written, refused, failed, .. } = settle(&shared.store, settlements).await;
        for settlement in &written {
            shared.counters.settled(settlement.transition().arrow());
            let (id, error) = (settlement.fence().id, settlement.transition().error());
            tracing::debug!(%id, error, "swept");
        }
        for (settlement, error) in &refused {
            tracing::error!(id = %settlement.fence().id, %error, "a stale claim cannot be swept");
        }
        swept += written.len();
        if let Some((error, _)) = failed {
            return Err(error);
        }
        settlements = rest;
    }
    Ok((swept, read.next))
}
