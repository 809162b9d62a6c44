//! What a claim wins, and how it is read.

use std::collections::BTreeMap;

use sea_orm::{DbErr, QueryResult};
use tokio::time::Instant;
use uuid::Uuid;

use super::{Fence, Settlement, StoreError, dialect::Dialect};
use crate::{
    lifecycle::{EXPIRED, Outcome, RetryPolicy, settle},
    message::Message,
};

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

    /// Decides what becomes of the row. Nothing is written until
    /// [`Store::settle`](super::Store::settle) has it.
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

impl Claimed {
    /// Reads each row by itself: one that cannot be read harms no other.
    pub(super) fn read(rows: &[QueryResult], trusted_until: Instant) -> Result<Self, StoreError> {
        let mut claimed = Claimed { claims: Vec::with_capacity(rows.len()), ..Claimed::default() };
        for row in rows {
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

/// What a claim returns, in the order in which it is read here.
pub(super) fn columns(dialect: Dialect) -> String {
    // SQLite knows the columns of RETURNING only by their bare names.
    let (o, headers) = match dialect {
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
