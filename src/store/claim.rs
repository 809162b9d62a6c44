//! Claim: win rows by their version.

use std::time::Duration;

use sea_orm::Value;
use tokio::time::Instant;

use super::{Claimed, Fence, Store, StoreError, claimed, dialect::Dialect};
use crate::lifecycle::EXPIRED;

/// How several relays keep out of each other's way. Both compare the version; they make the same promises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClaimStrategy {
    /// Rows that another relay is claiming at this moment are passed over (`FOR UPDATE SKIP LOCKED`), and the
    /// version is compared all the same: no lost races. On SQLite, which has one writer, it is one statement.
    ///
    /// The default.
    #[default]
    SkipLocked,
    /// No row locks: a relay reads rows with their versions, then claims those whose version is still the
    /// same. To keep relays from racing for the same rows, each takes one of 16 slices of the head of the
    /// queue, chosen at random.
    Optimistic,
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// How many slices the head of the queue has for [`ClaimStrategy::Optimistic`].
const SLICES: u64 = 16;

/// Whether a `PENDING` row is a suspect, in SQL.
pub(super) fn suspect() -> String {
    format!("(attempts >= 2 AND COALESCE(last_error, '') LIKE '{EXPIRED}%')")
}

impl Store {
    /// Claims at most `limit` rows that are due, in the order in which they became due, leaving out
    /// [suspects](super::Sweepable::suspects).
    ///
    /// `claimed_by` names the relay and the batch, `relay:batch`, at most 100 characters; `lease` is how long
    /// the claim is trusted. The attempt is counted now.
    ///
    /// Another relay that claims at the same moment is no error: the rows it won are missing from the result.
    ///
    /// # Errors
    /// When the database does not carry it out. After [`StoreError::Timeout`] and
    /// [`StoreError::Unavailable`] rows may be claimed all the same: see [`Store::claims_of`]; otherwise the sweep
    /// returns them.
    pub async fn claim(
        &self,
        strategy: ClaimStrategy,
        limit: u64,
        claimed_by: &str,
        lease: Duration,
    ) -> Result<Claimed, StoreError> {
        let claimed = match strategy {
            ClaimStrategy::SkipLocked => self.claim_skip_locked(limit, claimed_by, lease).await,
            ClaimStrategy::Optimistic => self.claim_optimistic(limit, claimed_by, lease).await,
        };
        match claimed {
            // Whoever was in the way has them.
            Err(StoreError::Contention(error)) => {
                tracing::debug!(%error, "lost a race");
                Ok(Claimed { lost_races: 1, more: true, ..Claimed::default() })
            }
            other => other,
        }
    }

    /// Reads rows that are due, at the versions they have now: one of 16 slices of the head of the queue,
    /// chosen at random, of at most `limit` rows.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn candidates(&self, limit: u64) -> Result<Vec<Fence>, StoreError> {
        let sql = self.due();
        let head = integer(limit.saturating_mul(SLICES));
        let rows = self.run("read candidates", sql, vec![head]).await?;
        let mut fences: Vec<Fence> = rows.iter().map(Fence::read).collect::<Result<_, _>>()?;
        let width = usize::try_from(limit).unwrap_or(usize::MAX).max(1);
        let slices = fences.len().div_ceil(width);
        let slice = if slices > 1 { fastrand::usize(..slices) * width } else { 0 };
        fences.drain(..slice);
        fences.truncate(width);
        Ok(fences)
    }

    /// Claims those of the `candidates` whose version is still the one that was read.
    ///
    /// This is also how a [suspect](super::Sweepable::suspects) is claimed: alone.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn claim_candidates(
        &self,
        candidates: &[Fence],
        claimed_by: &str,
        lease: Duration,
    ) -> Result<Claimed, StoreError> {
        if candidates.is_empty() {
            return Ok(Claimed::default());
        }
        // In the order of the primary key, so that two relays take row locks in the same order.
        let mut candidates = candidates.to_vec();
        candidates.sort_unstable_by_key(|fence| fence.id);
        let mut values = self.dialect.given_values(candidates.iter().map(|fence| (*fence, [])));
        let next = values.len() + 1;
        values.extend([claimed_by.into(), milliseconds(lease)]);
        let set = self.claim_set(next);
        let sql = match self.dialect {
            Dialect::Postgres => format!(
                "\
                UPDATE outbox_message o SET {set}
                FROM unnest($1::bigint[], $2::bigint[]) AS g(id, version)
                WHERE o.id = g.id AND o.version = g.version
                RETURNING {columns}",
                columns = claimed::columns(self.dialect),
            ),
            Dialect::Sqlite => format!(
                "\
                UPDATE outbox_message AS o SET {set}
                WHERE (o.id, o.version) IN (SELECT value ->> 0, value ->> 1 FROM json_each($1))
                RETURNING {columns}",
                columns = claimed::columns(self.dialect),
            ),
        };
        let mut claimed = self.run_claim(sql, values, lease).await?;
        let won = claimed.claims.len() + claimed.unreadable.len();
        claimed.lost_races = (candidates.len() - won) as u64;
        Ok(claimed)
    }

    /// The rows that a claim won whose answer never came, found by its `claimed_by`, which must be unique to it.
    ///
    /// It looks at the first 20,000 entries of the due index, where claimed rows stand; what lies further behind
    /// is left to the sweep.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn claims_of(&self, claimed_by: &str) -> Result<Vec<Fence>, StoreError> {
        let sql = format!(
            "\
            SELECT id, version
            FROM (
                SELECT id, version, status, claimed_by FROM outbox_message
                WHERE available_at <= {now}
                ORDER BY available_at, id
                LIMIT 20000
            ) AS entries
            WHERE status = 'PROCESSING' AND claimed_by = $1",
            now = self.dialect.now(),
        );
        let rows = self.run("read claims back", sql, vec![claimed_by.into()]).await?;
        Ok(rows.iter().map(Fence::read).collect::<Result<_, _>>()?)
    }

    async fn claim_optimistic(
        &self,
        limit: u64,
        claimed_by: &str,
        lease: Duration,
    ) -> Result<Claimed, StoreError> {
        let candidates = self.candidates(limit).await?;
        let mut claimed = self.claim_candidates(&candidates, claimed_by, lease).await?;
        claimed.more = candidates.len() as u64 >= limit;
        Ok(claimed)
    }

    async fn claim_skip_locked(
        &self,
        limit: u64,
        claimed_by: &str,
        lease: Duration,
    ) -> Result<Claimed, StoreError> {
        let due = self.due();
        let set = self.claim_set(2);
        let columns = claimed::columns(self.dialect);
        let sql = match self.dialect {
            // MATERIALIZED: a bare subquery may be run more than once and lock more rows than asked for.
            Dialect::Postgres => format!(
                "\
                WITH due AS MATERIALIZED ({due} FOR UPDATE SKIP LOCKED)
                UPDATE outbox_message o SET {set}
                FROM due
                WHERE o.id = due.id AND o.version = due.version
                RETURNING {columns}"
            ),
            Dialect::Sqlite => format!(
                "\
                UPDATE outbox_message AS o SET {set}
                WHERE (o.id, o.version) IN ({due})
                RETURNING {columns}"
            ),
        };
        let values = vec![integer(limit), claimed_by.into(), milliseconds(lease)];
        let mut claimed = self.run_claim(sql, values, lease).await?;
        claimed.more = (claimed.claims.len() + claimed.unreadable.len()) as u64 >= limit;
        Ok(claimed)
    }

    /// Rows that are due, at most `$1`.
    fn due(&self) -> String {
        format!(
            "\
            SELECT id, version FROM outbox_message
            WHERE available_at <= {now} AND status = 'PENDING' AND NOT {suspect}
            ORDER BY available_at, id
            LIMIT $1",
            now = self.dialect.now(),
            suspect = suspect(),
        )
    }

    /// What a claim writes. Parameter `next` is the claimant, the one after it the lease in milliseconds.
    fn claim_set(&self, next: usize) -> String {
        let cast = match self.dialect {
            Dialect::Postgres => "::bigint",
            Dialect::Sqlite => "",
        };
        format!(
            "\
            status = 'PROCESSING',
            version = o.version + 1,
            attempts = o.attempts + 1,
            claimed_by = ${next},
            lease_until = {lease}",
            lease = self.dialect.clock_plus_ms(&format!("${}{cast}", next + 1)),
        )
    }

    async fn run_claim(
        &self,
        sql: String,
        values: Vec<Value>,
        lease: Duration,
    ) -> Result<Claimed, StoreError> {
        let before = Instant::now();
        // A lease beyond all time is trusted for a day.
        let trusted_until = before.checked_add(lease).unwrap_or(before + DAY);
        let rows = self.run("claim", sql, values).await?;
        Claimed::read(&rows, trusted_until)
    }
}

fn integer(value: u64) -> Value {
    i64::try_from(value).unwrap_or(i64::MAX).into()
}

fn milliseconds(duration: Duration) -> Value {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX).into()
}
