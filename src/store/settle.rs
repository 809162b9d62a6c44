//! Settle: write what became of claims.

use sea_orm::Value;

use super::{
    Fence, Lost, Store, StoreError,
    dialect::{Column, Given, Verb},
};
use crate::lifecycle::{Guard, Outcome, RetryPolicy, Transition, settle};

/// What becomes of one claim: made by [`Claim::settle`](super::Claim::settle), which consumes the claim,
/// by [`Stale::settle`](super::Stale::settle), or by [`Settlement::release`].
#[derive(Debug)]
#[must_use = "a claim is not settled until the settlement is written"]
pub struct Settlement {
    pub(super) fence: Fence,
    pub(super) transition: Transition,
}

impl Settlement {
    /// The row and the version that the claim gave it.
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// What it becomes.
    pub fn transition(&self) -> &Transition {
        &self.transition
    }

    /// Gives a claim back unused, whichever attempt it was.
    pub fn release(fence: Fence) -> Self {
        Self::new(fence, settle(1, Outcome::Unused, &RetryPolicy::default(), 0.0))
    }

    pub(super) fn new(fence: Fence, transition: Transition) -> Self {
        Self { fence, transition }
    }
}

impl Store {
    /// Writes what became of claims: sent, to be retried, failed, released, returned or buried.
    ///
    /// One statement for the whole batch (two if claims of one's own and stale claims of others are mixed).
    /// Rows whose fence no longer matches are left alone and reported as lost. After an error nothing was
    /// written, or everything; in both cases the same batch may be given again.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn settle(&self, batch: &[Settlement]) -> Result<Lost, StoreError> {
        let mut lost = Vec::new();
        for guard in [Guard::Version, Guard::VersionAndLeaseOver] {
            let part: Vec<&Settlement> =
                batch.iter().filter(|s| s.transition.arrow().guard() == guard).collect();
            if !part.is_empty() {
                let fences: Vec<Fence> = part.iter().map(|settlement| settlement.fence).collect();
                let (sql, values) = self.settle_statement(guard, &part);
                lost.extend(self.write("settle", sql, values, &fences).await?);
            }
        }
        Ok(Lost(lost))
    }

    fn settle_statement(&self, guard: Guard, part: &[&Settlement]) -> (String, Vec<Value>) {
        let clock = self.dialect.clock();
        let set = format!(
            "\
            version = o.version + 1,
            status = g.status,
            attempts = CASE WHEN o.attempts > g.refund THEN o.attempts - g.refund ELSE 0 END,
            available_at = CASE
                WHEN g.status IN ('SENT', 'FAILED') THEN NULL
                WHEN g.delay_ms >= 0 THEN {later}
                ELSE o.available_at END,
            claimed_by = NULL,
            lease_until = NULL,
            sent_at = CASE WHEN g.status = 'SENT' THEN {clock} END,
            failed_at = CASE WHEN g.status = 'FAILED' THEN {clock} END,
            last_error = COALESCE(NULLIF(g.error, ''), o.last_error)",
            later = self.dialect.clock_plus_ms("g.delay_ms"),
        );
        let lease_over = format!("o.lease_until < {}", self.dialect.now());
        let by_somebody_else = guard == Guard::VersionAndLeaseOver;
        let sql = self.dialect.fenced(
            Verb::Update {
                set: &set,
                guard: by_somebody_else.then_some(lease_over.as_str()),
                raises_version: true,
                skip_locked: by_somebody_else,
            },
            &[
                ("status", Column::Text),
                ("refund", Column::Integer),
                ("delay_ms", Column::Integer),
                ("error", Column::Text),
            ],
        );
        let values = self.dialect.given_values(part.iter().map(|settlement| {
            let transition = &settlement.transition;
            let status = transition.arrow().to().map_or("", |status| status.as_str());
            let delay =
                transition.delay().map_or(-1, |delay| i64::try_from(delay.as_millis()).unwrap_or(i64::MAX));
            let given = [
                Given::Text(status.to_owned()),
                Given::Integer(transition.refunds_attempt().into()),
                Given::Integer(delay),
                Given::Text(transition.error().unwrap_or_default().to_owned()),
            ];
            (settlement.fence, given)
        }));
        (sql, values)
    }

    /// Runs a fenced statement and says which fences it missed.
    pub(super) async fn write(
        &self,
        what: &'static str,
        sql: String,
        values: Vec<Value>,
        given: &[Fence],
    ) -> Result<Vec<Fence>, StoreError> {
        let returned = self.run(what, sql, values).await?;
        let returned: Vec<Fence> = returned.iter().map(Fence::read).collect::<Result<_, _>>()?;
        Ok(self.dialect.lost(given, returned))
    }
}
