//! Plain compare-and-set, on one slice of the head of the queue.

use super::{ClaimRequest, integer};
use crate::store::{Claimed, Fence, Store, StoreError};

/// How many slices the head of the queue has.
const SLICES: u64 = 16;

impl Store {
    /// Reads rows that are due, at the versions they have now: one of 16 slices of the head of the queue,
    /// chosen at random, of at most `limit` rows.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn candidates(&self, limit: u64) -> Result<Vec<Fence>, StoreError> {
        let (due, _) = self.due(None);
        let rows = self.run("read candidates", due, vec![integer(limit.saturating_mul(SLICES))]).await?;
        // A row whose version is no number, where the database lets it be, is nobody's candidate.
        let mut fences: Vec<Fence> =
            rows.iter().filter_map(|row| Fence::read(row, &self.table).ok()).collect();
        let width = usize::try_from(limit).unwrap_or(usize::MAX).max(1);
        let slices = fences.len().div_ceil(width);
        let slice = if slices > 1 { fastrand::usize(..slices) * width } else { 0 };
        fences.drain(..slice);
        fences.truncate(width);
        Ok(fences)
    }

    pub(super) async fn claim_optimistic(&self, request: &ClaimRequest<'_>) -> Result<Claimed, StoreError> {
        let candidates = self.candidates(request.limit).await?;
        let mut claimed = self.claim_candidates(&candidates, request.claimed_by, request.lease).await?;
        claimed.more = candidates.len() as u64 >= request.limit;
        Ok(claimed)
    }
}
