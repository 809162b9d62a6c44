//! Sweep: find claims whose lease is over.

use sea_orm::Value;

use super::{Fence, Settlement, Store, StoreError, claim::suspect, dialect::Dialect};
use crate::lifecycle::{RetryPolicy, sweep};

/// A claim whose lease was over when it was read. Its owner may still renew it, or settle it.
#[derive(Debug)]
pub struct Stale {
    fence: Fence,
    attempts: u32,
    claimed_by: String,
}

impl Stale {
    /// The row and the version it was read at.
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// Decides what becomes of the row. [`Store::settle`] writes it only if the lease is still over then.
    pub fn settle(self, policy: &RetryPolicy) -> Settlement {
        Settlement::new(self.fence, sweep(self.attempts, &self.claimed_by, policy))
    }
}

/// A place in the due index.
#[derive(Clone, Debug, PartialEq)]
pub struct Position {
    available_at: Value,
    id: i64,
}

/// What one step of a sweep read.
#[derive(Debug, Default)]
pub struct Sweepable {
    /// Claims whose lease is over.
    pub stale: Vec<Stale>,
    /// Rows that a sweep returned with two or more attempts spent, and that are due: their workers may have
    /// died of them. [`Store::claim`] leaves them out; they are to be claimed one at a time
    /// ([`Store::claim_candidates`]), with nothing else in flight in the process.
    pub suspects: Vec<Fence>,
    /// Where to read on; `None` at the end.
    pub next: Option<Position>,
}

impl Store {
    /// Reads at most `limit` entries of the due index from `after` on, or from its head, and finds among them
    /// the claims whose lease is over.
    ///
    /// A claimed row keeps its place in the due index, so nothing else needs to be read, and one step costs
    /// the same however long the queue is.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn stale(&self, after: Option<&Position>, limit: u64) -> Result<Sweepable, StoreError> {
        let now = self.dialect.now();
        let (from, values) = match after {
            None => (String::new(), vec![]),
            Some(position) => (
                "AND (available_at, id) > ($2, $3)".to_owned(),
                vec![position.available_at.clone(), position.id.into()],
            ),
        };
        let sql = format!(
            "\
            SELECT id, version, attempts, claimed_by, stale, suspect, size, available_at
            FROM (
                SELECT id, version, attempts, claimed_by, available_at,
                    CASE WHEN status = 'PROCESSING' AND lease_until < {now} THEN 1 ELSE 0 END AS stale,
                    CASE WHEN status = 'PENDING' AND {suspect} THEN 1 ELSE 0 END AS suspect,
                    COUNT(*) OVER () AS size,
                    CASE WHEN LEAD(id) OVER (ORDER BY available_at, id) IS NULL THEN 1 ELSE 0 END AS last
                FROM (
                    SELECT id, version, attempts, claimed_by, available_at, status, lease_until, last_error
                    FROM outbox_message
                    WHERE available_at <= {now} {from}
                    ORDER BY available_at, id
                    LIMIT $1
                ) AS entries
            ) AS judged
            WHERE stale = 1 OR suspect = 1 OR last = 1
            ORDER BY available_at, id",
            suspect = suspect(),
        );
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let values = std::iter::once(limit.into()).chain(values).collect();
        let rows = self.run("look for stale claims", sql, values).await?;

        let mut sweepable = Sweepable::default();
        for row in &rows {
            let fence = Fence::read(row)?;
            if row.try_get_by_index::<i32>(4)? == 1 {
                let attempts: i32 = row.try_get_by_index(2)?;
                sweepable.stale.push(Stale {
                    fence,
                    attempts: u32::try_from(attempts).unwrap_or(0),
                    claimed_by: row.try_get_by_index(3)?,
                });
            }
            if row.try_get_by_index::<i32>(5)? == 1 {
                sweepable.suspects.push(fence);
            }
            sweepable.next = None;
            if row.try_get_by_index::<i64>(6)? >= limit {
                // The last row of a full step comes last: read on after it.
                let available_at = match self.dialect {
                    Dialect::Postgres => row.try_get_by_index::<sea_orm::prelude::DateTimeUtc>(7)?.into(),
                    // As a text: a parsed time might be written with fewer digits and compare otherwise.
                    Dialect::Sqlite => row.try_get_by_index::<String>(7)?.into(),
                };
                sweepable.next = Some(Position { available_at, id: fence.id });
            }
        }
        Ok(sweepable)
    }
}
