//! Claim: win rows by their version.

use std::{collections::BTreeMap, time::Duration};

use sea_orm::{DbErr, QueryResult, Value};
use tokio::time::Instant;
use uuid::Uuid;

use super::{Fence, Settlement, Store, StoreError, dialect::Dialect};
use crate::{
    lifecycle::{EXPIRED, Outcome, RetryPolicy, settle},
    message::Message,
};

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

/// A row that is ours until its lease is over. It cannot be cloned, and settling consumes it: a claim is
/// settled once.
#[derive(Debug)]
#[must_use = "a claim that is not settled waits for the sweep"]
pub struct Claim {
    fence: Fence,
    attempts: u32,
    suspect: bool,
    trusted_until: Instant,
    message: Message,
}

impl Claim {
    /// The row and the version that the claim gave it.
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// Which attempt this is, counted from 1.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Whether workers may have died of it: a sweep returned it with two or more attempts spent. It is to be
    /// published with nothing else in flight in the process.
    pub fn is_suspect(&self) -> bool {
        self.suspect
    }

    /// Until when the lease certainly lasts: reckoned from before the statement was sent, so that it ends
    /// early rather than late. A renewal is for the caller to remember.
    pub fn trusted_until(&self) -> Instant {
        self.trusted_until
    }

    /// What to publish.
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// Decides what becomes of the row. Nothing is written until [`Store::settle`] has it.
    pub fn settle(self, outcome: Outcome, policy: &RetryPolicy, random: f64) -> Settlement {
        Settlement::new(self.fence, settle(self.attempts, outcome, policy, random))
    }
}

/// What came of claiming a batch.
#[derive(Debug, Default)]
pub struct Claimed {
    /// The rows won, by id.
    pub claims: Vec<Claim>,
    /// Rows won that cannot be read: each fails with the reason, its neighbours go on.
    pub unreadable: Vec<Settlement>,
    /// How many rows were read at the version that somebody else changed first.
    pub lost_races: u64,
    /// Whether there were at least as many rows as asked for: there may be more.
    pub more: bool,
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
        let sql = format!(
            "\
            SELECT id, version FROM outbox_message
            WHERE available_at <= {now} AND status = 'PENDING' AND NOT {suspect}
            ORDER BY available_at, id
            LIMIT $1",
            now = self.dialect.now(),
            suspect = suspect(),
        );
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
                columns = self.claim_columns(),
            ),
            Dialect::Sqlite => format!(
                "\
                UPDATE outbox_message AS o SET {set}
                WHERE (o.id, o.version) IN (SELECT value ->> 0, value ->> 1 FROM json_each($1))
                RETURNING {columns}",
                columns = self.claim_columns(),
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
        let due = format!(
            "\
            SELECT id, version FROM outbox_message
            WHERE available_at <= {now} AND status = 'PENDING' AND NOT {suspect}
            ORDER BY available_at, id
            LIMIT $1",
            now = self.dialect.now(),
            suspect = suspect(),
        );
        let set = self.claim_set(2);
        let columns = self.claim_columns();
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

    fn claim_columns(&self) -> String {
        // SQLite knows the columns of RETURNING only by their bare names.
        let (o, headers) = match self.dialect {
            Dialect::Postgres => ("o.", "o.headers::text"),
            Dialect::Sqlite => ("", "headers"),
        };
        format!(
            "\
            {o}id, {o}version, {o}attempts, {o}message_id, {o}topic, {o}aggregate_type, {o}aggregate_id, \
            {o}ordering_key, {o}event_type, {o}content_type, {headers}, {o}payload, \
            CASE WHEN {o}attempts > 2 AND {o}last_error LIKE '{EXPIRED}%' THEN 1 ELSE 0 END"
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
        let mut claimed = Claimed { claims: Vec::with_capacity(rows.len()), ..Claimed::default() };
        for row in &rows {
            let fence = Fence::read(row)?;
            let attempts: i32 = row.try_get_by_index(2)?;
            let attempts = u32::try_from(attempts).unwrap_or(0);
            let suspect = row.try_get_by_index::<i32>(12)? == 1;
            match message(row) {
                Ok(message) => {
                    claimed.claims.push(Claim { fence, attempts, suspect, trusted_until, message });
                }
                Err(error) => {
                    let outcome = Outcome::Permanent(format!("the row cannot be read: {error}"));
                    let transition = settle(attempts, outcome, &RetryPolicy::default(), 0.0);
                    claimed.unreadable.push(Settlement::new(fence, transition));
                }
            }
        }
        // RETURNING has no order.
        claimed.claims.sort_unstable_by_key(|claim| claim.fence.id);
        Ok(claimed)
    }
}

fn message(row: &QueryResult) -> Result<Message, DbErr> {
    let id: Uuid = row.try_get_by_index(3)?;
    let kind: Option<String> = row.try_get_by_index(5)?;
    let aggregate_id: Option<String> = row.try_get_by_index(6)?;
    let payload: Vec<u8> = row.try_get_by_index(11)?;
    Ok(Message {
        id: id.into(),
        topic: row.try_get_by_index(4)?,
        aggregate: kind.zip(aggregate_id),
        ordering_key: row.try_get_by_index(7)?,
        event_type: row.try_get_by_index(8)?,
        content_type: row.try_get_by_index(9)?,
        headers: headers(row.try_get_by_index(10)?)?,
        payload: payload.into(),
    })
}

fn headers(json: String) -> Result<BTreeMap<String, String>, DbErr> {
    if json == "{}" {
        return Ok(BTreeMap::new());
    }
    serde_json::from_str(&json)
        .map_err(|error| DbErr::Json(format!("headers are not an object of texts: {error}")))
}

fn integer(value: u64) -> Value {
    i64::try_from(value).unwrap_or(i64::MAX).into()
}

fn milliseconds(duration: Duration) -> Value {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX).into()
}
