//! The claims that this process holds: from the claim until the settlement is written.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::{sync::Notify, time::Instant};

use crate::store::Fence;

/// Each claim, and until when its lease certainly lasts.
#[derive(Debug, Default)]
pub(super) struct Held {
    claims: Mutex<HashMap<Fence, Instant>>,
    removed: Notify,
}

impl Held {
    pub(super) fn add(&self, fences: impl Iterator<Item = Fence>, trusted_until: Instant) {
        self.lock().extend(fences.map(|fence| (fence, trusted_until)));
    }

    /// Forgets claims: settled, or lost to somebody else.
    pub(super) fn remove<'a>(&self, fences: impl IntoIterator<Item = &'a Fence>) {
        let mut claims = self.lock();
        for fence in fences {
            claims.remove(fence);
        }
        self.removed.notify_waiters();
    }

    /// The leases of these claims, if they are still held, last until then.
    pub(super) fn renewed(&self, fences: &[Fence], trusted_until: Instant) {
        let mut claims = self.lock();
        for fence in fences {
            if let Some(until) = claims.get_mut(fence) {
                *until = trusted_until;
            }
        }
    }

    /// Until when the claim may be trusted; `None` when it is no longer ours.
    pub(super) fn trusted_until(&self, fence: Fence) -> Option<Instant> {
        self.lock().get(&fence).copied()
    }

    /// Those whose lease ends before then.
    pub(super) fn ending_before(&self, instant: Instant) -> Vec<Fence> {
        self.lock().iter().filter(|(_, until)| **until < instant).map(|(fence, _)| *fence).collect()
    }

    pub(super) fn fences(&self) -> Vec<Fence> {
        self.lock().keys().copied().collect()
    }

    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Waits until no more than so many are held.
    pub(super) async fn wait_until_at_most(&self, most: usize) {
        loop {
            let removed = self.removed.notified();
            tokio::pin!(removed);
            // Listens before it looks, so that nothing is missed in between.
            removed.as_mut().enable();
            if self.len() <= most {
                return;
            }
            removed.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Fence, Instant>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
