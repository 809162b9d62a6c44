//! Sweep: find claims whose lease is over.

use super::{
    Fence, Position, Settlement, Store, StoreError, claim::suspect, fenced::output_id, table::Table,
};
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

/// What one step of a sweep read.
#[derive(Debug, Default)]
pub struct Sweepable {
    /// Claims whose lease is over.
    pub stale: Vec<Stale>,
    /// Rows that a sweep returned with two or more attempts spent, and that are due: their workers may have
    /// died of them. [`Store::claim`] leaves them out; they are to be claimed one at a time
    /// ([`Store::claim_candidates`]), with nothing else in flight in the process. With order per key, only those before
    /// which no other of their key is unfinished.
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
        let table = &*self.table;
        let Table { dialect, name, id, status, version, attempts, available_at, claimed_by, .. } = table;
        let Table { lease_until, last_error, pending, processing, .. } = table;
        let (from, position) = Position::after(after, table, 2);
        let key = table.optional(&table.roles.ordering_key).map(|key| format!(", {key}")).unwrap_or_default();
        let sql = format!(
            "\
            SELECT {output_id}, {version_read}, {attempts_read}, {claimed_by}, {stale}, {suspect}, {size}, {time}
            FROM (
                SELECT {id}, {version}, {attempts}, {claimed_by}, {available_at},
                    CASE WHEN {status} = {processing} AND {lease_until} < {now} THEN 1 ELSE 0 END AS stale,
                    CASE WHEN {status} = {pending} AND {is_suspect}{and_is_first} THEN 1 ELSE 0 END AS suspect,
                    COUNT(*) OVER () AS size,
                    CASE WHEN LEAD({id}) OVER (ORDER BY {available_at}, {id}) IS NULL THEN 1 ELSE 0 END AS last
                FROM (
                    SELECT {id}, {version}, {attempts}, {claimed_by}, {available_at}, {status}, {lease_until},
                        {last_error}{key}
                    FROM {name}
                    WHERE {available_at} <= {now}{from}
                    ORDER BY {available_at}, {id}
                    LIMIT $1
                ) AS o
            ) AS o
            WHERE stale = 1 OR suspect = 1 OR last = 1
            ORDER BY {available_at}, {id}",
            time = Position::output(table, "o."),
            now = dialect.now(),
            is_suspect = suspect(table, ""),
            and_is_first = self.and_is_first().await?,
            output_id = output_id(table),
            version_read = dialect.integer(version),
            attempts_read = dialect.integer(attempts),
            stale = dialect.integer("stale"),
            suspect = dialect.integer("suspect"),
            size = dialect.integer("size"),
        );
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let values = std::iter::once(limit.into()).chain(position).collect();
        let rows = self.run("look for stale claims", sql, values).await?;

        let mut sweepable = Sweepable::default();
        for row in &rows {
            let fence = match Fence::read(row, table) {
                Ok(fence) => fence,
                // It must not keep the others from being swept.
                Err(error) => {
                    tracing::warn!(%error, "a row of {table:?} has no readable id and version");
                    continue;
                }
            };
            if row.try_get_by_index::<i64>(4)? == 1 {
                let attempts: Option<i64> = row.try_get_by_index(2)?;
                sweepable.stale.push(Stale {
                    fence,
                    // What is no number of attempts has spent them.
                    attempts: attempts.and_then(|attempts| u32::try_from(attempts).ok()).unwrap_or(u32::MAX),
                    claimed_by: row.try_get_by_index::<Option<String>>(3).ok().flatten().unwrap_or_default(),
                });
            }
            if row.try_get_by_index::<i64>(5)? == 1 {
                sweepable.suspects.push(fence);
            }
            // The last row of a full step comes last: read on after it.
            let full = row.try_get_by_index::<i64>(6)? >= limit;
            // A time that cannot be read is no place to go on from.
            sweepable.next = if full { Position::read(row, 7, 0, table).ok() } else { None };
        }
        Ok(sweepable)
    }
}
