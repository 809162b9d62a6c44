//! Rows whose workers may have died of them, as the last sweep saw them.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
};

use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::store::Fence;

/// More than this are left to the next sweep.
const MOST: usize = 1_000;

#[derive(Debug, Default)]
pub(super) struct Suspects(Mutex<VecDeque<Fence>>);

impl Suspects {
    /// Those that a sweep found, in place of those that an earlier one had found.
    pub(super) fn found(&self, mut suspects: Vec<Fence>) {
        suspects.truncate(MOST);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = suspects.into();
    }

    pub(super) fn any(&self) -> bool {
        !self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    pub(super) fn take(&self) -> Option<Fence> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }
}

/// Held for reading by every publish in this process, for writing by that of a suspect: relays that share a
/// process would die with it.
static IN_FLIGHT: RwLock<()> = RwLock::const_new(());

/// The right to publish.
pub(super) enum Turn {
    Shared { _guard: RwLockReadGuard<'static, ()> },
    Alone { _guard: RwLockWriteGuard<'static, ()> },
}

impl Turn {
    /// Waits for it: a suspect until nothing else is in flight in this process, the others until no suspect is.
    pub(super) async fn wait(suspect: bool) -> Self {
        if suspect {
            Self::Alone { _guard: IN_FLIGHT.write().await }
        } else {
            Self::Shared { _guard: IN_FLIGHT.read().await }
        }
    }
}
