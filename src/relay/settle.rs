//! Writes settlements so that one which the database refuses harms only itself.

use std::collections::HashSet;

use crate::store::{Fence, Settlement, Store, StoreError};

/// What became of a batch.
#[derive(Default)]
pub(super) struct Settled {
    pub(super) written: Vec<Settlement>,
    /// Somebody else has these rows now.
    pub(super) lost: Vec<Settlement>,
    /// The database answers, and does not take these values.
    pub(super) refused: Vec<(Settlement, StoreError)>,
    /// Why the rest was not written, and the rest.
    pub(super) failed: Option<(StoreError, Vec<Settlement>)>,
}

/// Writes a batch. Where it is refused, it is halved until the row is found that is to blame.
pub(super) async fn settle(store: &Store, batch: Vec<Settlement>) -> Settled {
    let mut settled = Settled::default();
    let mut parts = vec![batch];
    while let Some(mut part) = parts.pop() {
        match store.settle(&part).await {
            Ok(lost) => {
                let lost: HashSet<Fence> = lost.fences().iter().copied().collect();
                let (lost, written) = part.into_iter().partition::<Vec<_>, _>(|s| lost.contains(&s.fence()));
                settled.lost.extend(lost);
                settled.written.extend(written);
            }
            Err(StoreError::Refused(_)) if part.len() > 1 => {
                parts.push(part.split_off(part.len() / 2));
                parts.push(part);
            }
            Err(error @ StoreError::Refused(_)) => {
                settled.refused.extend(part.pop().map(|settlement| (settlement, error)));
            }
            Err(error) => {
                parts.push(part);
                settled.failed = Some((error, parts.into_iter().flatten().collect()));
                break;
            }
        }
    }
    settled
}
