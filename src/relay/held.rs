//! The claims that this process holds: from the claim until the settlement is written.

use std::{
    collections::HashMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::{sync::Notify, time::Instant};

use crate::store::Fence;

#[derive(Debug, Default)]
pub(super) struct Held {
    claims: Mutex<HashMap<Fence, Holding>>,
    /// How many have been forgotten, ever.
    through: AtomicU64,
    removed: Notify,
}

#[derive(Clone, Copy, Debug)]
struct Holding {
    /// Until when the lease certainly lasts.
    trusted_until: Instant,
    /// Of the payload that came with the claim, as long as it is in memory.
    bytes: u64,
}

impl Held {
    /// Takes claims in, each with the bytes that came with it.
    pub(super) fn add(&self, claims: impl Iterator<Item = (Fence, u64)>, trusted_until: Instant) {
        self.lock().extend(claims.map(|(fence, bytes)| (fence, Holding { trusted_until, bytes })));
    }

    /// Notes that the payload of a claim is not in memory any more.
    pub(super) fn unload(&self, fence: Fence) {
        if let Some(holding) = self.lock().get_mut(&fence) {
            holding.bytes = 0;
        }
    }

    /// The bytes of all payloads that came with their claims.
    pub(super) fn bytes(&self) -> u64 {
        self.lock().values().map(|holding| holding.bytes).sum()
    }

    /// Forgets claims: settled, or lost to somebody else.
    pub(super) fn remove<'a>(&self, fences: impl IntoIterator<Item = &'a Fence>) {
        let mut claims = self.lock();
        for fence in fences {
            if claims.remove(fence).is_some() {
                self.through.fetch_add(1, Ordering::Relaxed);
            }
        }
        drop(claims);
        self.removed.notify_waiters();
    }

    /// The leases of these claims, if they are still held, last until then.
    pub(super) fn renewed(&self, fences: &[Fence], trusted_until: Instant) {
        let mut claims = self.lock();
        for fence in fences {
            if let Some(holding) = claims.get_mut(fence) {
                holding.trusted_until = trusted_until;
            }
        }
    }

    /// Until when the claim may be trusted; `None` when it is no longer ours.
    pub(super) fn trusted_until(&self, fence: Fence) -> Option<Instant> {
        self.lock().get(&fence).map(|holding| holding.trusted_until)
    }

    /// Those whose lease ends before then.
    pub(super) fn ending_before(&self, instant: Instant) -> Vec<Fence> {
        let claims = self.lock();
        claims
            .iter()
            .filter(|(_, holding)| holding.trusted_until < instant)
            .map(|(fence, _)| *fence)
            .collect()
    }

    pub(super) fn fences(&self) -> Vec<Fence> {
        self.lock().keys().copied().collect()
    }

    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    /// How many claims have come to their end, ever.
    pub(super) fn through(&self) -> u64 {
        self.through.load(Ordering::Relaxed)
    }

    /// Waits until no more than so many are held.
    pub(super) async fn wait_until_at_most(&self, most: usize) {
        self.wait_until(|| self.len() <= most).await;
    }

    /// Waits until it is so; it is asked whenever claims have come to their end.
    pub(super) async fn wait_until(&self, is_so: impl Fn() -> bool) {
        loop {
            let removed = self.removed.notified();
            tokio::pin!(removed);
            // Listens before it looks, so that nothing is missed in between.
            removed.as_mut().enable();
            if is_so() {
                return;
            }
            removed.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Fence, Holding>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
