//! Plain compare-and-set, on one slice of the head of the queue.

use sea_orm::Value;

use super::{ClaimRequest, integer};
use crate::store::{Claimed, Fence, Store, StoreError, dialect::Dialect, table::Table};

/// How many slices the head of the queue has.
const SLICES: u64 = 16;

impl Store {
    /// Reads rows that are due, at the versions they have now: one of 16 slices of the head of the queue,
    /// chosen at random, of at most `limit` rows.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn candidates(&self, limit: u64) -> Result<Vec<Fence>, StoreError> {
        let (sql, values) = self.slice(limit);
        let rows = self.run("read candidates", sql, values).await?;
        // A row whose version is no number, where the database lets it be, is nobody's candidate.
        Ok(rows.iter().filter_map(|row| Fence::read(row, &self.table).ok()).collect())
    }

    pub(super) async fn claim_optimistic(&self, request: &ClaimRequest<'_>) -> Result<Claimed, StoreError> {
        let candidates = self.candidates(request.limit).await?;
        let mut claimed = self.claim_fences(&candidates, request).await?;
        claimed.more = candidates.len() as u64 >= request.limit;
        Ok(claimed)
    }

    /// The query of one slice, cut out by the database: reading the whole head to the client takes longer than the
    /// claim itself.
    fn slice(&self, limit: u64) -> (String, Vec<Value>) {
        let Table { dialect, id, version, available_at, .. } = &*self.table;
        let limit = limit.max(1);
        let slice = fastrand::u64(..SLICES);
        // Of what lies behind the slice nothing need be read.
        let (due, _) = self.due(&format!("{id}, {version}, {available_at}"), None);
        let divide = if *dialect == Dialect::MySql { "DIV" } else { "/" };
        // Where the queue is shorter than that, another slice is taken, of those it has.
        let sql = format!(
            "\
            SELECT {id}, {version} FROM (
                SELECT {id}, {version},
                    ROW_NUMBER() OVER (ORDER BY {available_at}, {id}) AS place,
                    COUNT(*) OVER () AS size
                FROM ({due}) AS head
            ) AS placed
            WHERE (place - 1) {divide} $2 = $3 % ((size + $2 - 1) {divide} $2)
            ORDER BY place"
        );
        let end = (slice + 1).saturating_mul(limit);
        (sql, vec![integer(end), integer(limit), integer(slice)])
    }
}
