//! What has to be known before a relay can begin.

use std::sync::Arc;

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::{
    RelayError,
    health::{Duty, Vitals},
    pace,
};
use crate::store::{ClaimStrategy, Ordering, Store, StoreError, TableReport};

/// The strategy that was asked for, or the best that the server has.
pub(super) fn strategy(
    asked_for: Option<ClaimStrategy>,
    ordering: Ordering,
    table: &TableReport,
) -> Result<ClaimStrategy, RelayError> {
    match (asked_for, table.skip_locked) {
        (Some(ClaimStrategy::Optimistic), _) => Ok(ClaimStrategy::Optimistic),
        (_, true) => Ok(ClaimStrategy::SkipLocked),
        (None, false) if ordering == Ordering::Unordered => {
            tracing::info!("the server has no SKIP LOCKED: the relay claims with the strategy Optimistic");
            Ok(ClaimStrategy::Optimistic)
        }
        (_, false) => Err(RelayError::NoSkipLocked),
    }
}

/// Waits until the database answers: what it says of the table, and whether it had to wait; `None` when told to stop
/// first.
pub(super) async fn wait_for_table(
    store: &Store,
    vitals: &Vitals,
    stop: &CancellationToken,
) -> Result<Option<(TableReport, bool)>, RelayError> {
    for failures in 1.. {
        // Seen through even when told to stop: a statement that is given up costs the pool its connection, and with
        // it a database in memory.
        let error = match store.check_table().await {
            Ok(table) => {
                vitals.note(Duty::Claim, true);
                return Ok(Some((table, failures > 1)));
            }
            Err(
                error @ (StoreError::Table(_)
                | StoreError::Schema { .. }
                | StoreError::Entity { .. }
                | StoreError::Unsupported(_)),
            ) => return Err(RelayError::Table(Arc::new(error))),
            Err(error) => error,
        };
        vitals.note(Duty::Claim, false);
        if failures == 1 {
            tracing::warn!(%error, "waiting for the database");
        }
        let pause = sleep(pace().delay(failures, fastrand::f64()));
        if stop.run_until_cancelled(pause).await.is_none() {
            return Ok(None);
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::BehindFailed;

    #[test]
    fn a_server_without_skip_locked_is_claimed_from_without_it_unless_it_was_asked_for() {
        let per_key = Ordering::PerKey { behind_failed: BehindFailed::Hold };
        let chosen = |asked_for, ordering, skip_locked| {
            let table = TableReport { skip_locked, ..TableReport::default() };
            strategy(asked_for, ordering, &table).ok()
        };
        let (skip_locked, optimistic) = (Some(ClaimStrategy::SkipLocked), Some(ClaimStrategy::Optimistic));
        assert_eq!(chosen(None, Ordering::Unordered, true), skip_locked);
        assert_eq!(chosen(None, Ordering::Unordered, false), optimistic);
        assert_eq!(chosen(optimistic, Ordering::Unordered, true), optimistic);
        assert_eq!(chosen(skip_locked, Ordering::Unordered, false), None);
        assert_eq!(chosen(None, per_key, true), skip_locked);
        assert_eq!(chosen(None, per_key, false), None);
    }
}
