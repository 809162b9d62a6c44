//! Settle: write what became of claims.

use super::{
    Fence, Lost, Store, StoreError,
    claim::whole_milliseconds,
    dialect::Dialect,
    fenced::{Column, Given, Verb, Write},
    table::Table,
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
            let part: Vec<_> = batch
                .iter()
                .filter(|settlement| settlement.transition.arrow().guard() == guard)
                .map(|settlement| (settlement.fence, self.given_of(settlement)))
                .collect();
            lost.extend(self.write(&settling(&self.table, guard), part).await?);
        }
        Ok(Lost(lost))
    }

    fn given_of(&self, settlement: &Settlement) -> [Given; 4] {
        let transition = &settlement.transition;
        let status = transition.arrow().to().map_or("", |status| self.table.roles.status_text(status));
        let delay = transition.delay().map_or(-1, whole_milliseconds);
        [
            Given::Text(status.to_owned()),
            Given::Integer(transition.refunds_attempt().into()),
            Given::Integer(delay),
            Given::Text(transition.error().unwrap_or_default().to_owned()),
        ]
    }
}

const GIVEN: [(&str, Column); 4] = [
    ("status", Column::Text),
    ("refund", Column::Integer),
    ("delay_ms", Column::Integer),
    ("error", Column::Text),
];

/// The status that a row is given. PostgreSQL takes no text for an enum, but literals: as the column's type, whatever
/// its name and schema are.
fn written_status(table: &Table) -> String {
    let Table { dialect, status, pending, sent, failed, .. } = table;
    match dialect {
        Dialect::Postgres => {
            let each = [pending, sent, failed].map(|text| format!("WHEN {text} THEN {text}")).join(" ");
            format!("CASE g.status {each} ELSE o.{status} END")
        }
        Dialect::MySql | Dialect::Sqlite => "g.status".to_owned(),
    }
}

fn settling(table: &Table, guard: Guard) -> Write<'static> {
    let Table {
        dialect, status, version, attempts, available_at, claimed_by, lease_until, last_error, ..
    } = table;
    let Table { sent, failed, .. } = table;
    let clock = dialect.clock();
    // A text is of no collation of its own on MySQL.
    let error = match dialect {
        Dialect::MySql => "g.error COLLATE utf8mb4_bin",
        _ => "g.error",
    };
    let mut set = vec![
        (version.clone(), format!("o.{version} + 1")),
        (status.clone(), written_status(table)),
        (
            attempts.clone(),
            format!("CASE WHEN o.{attempts} > g.refund THEN o.{attempts} - g.refund ELSE 0 END"),
        ),
        (
            available_at.clone(),
            format!(
                "CASE
                    WHEN g.status IN ({sent}, {failed}) THEN NULL
                    WHEN g.delay_ms >= 0 THEN {later}
                    ELSE o.{available_at} END",
                later = dialect.clock_plus_ms("g.delay_ms"),
            ),
        ),
        (claimed_by.clone(), "NULL".to_owned()),
        (lease_until.clone(), "NULL".to_owned()),
        (last_error.clone(), format!("CASE WHEN g.error = '' THEN o.{last_error} ELSE {error} END")),
    ];
    for (role, finished) in [(&table.roles.sent_at, sent), (&table.roles.failed_at, failed)] {
        if let Some(column) = table.optional(role) {
            set.push((column, format!("CASE WHEN g.status = {finished} THEN {clock} END")));
        }
    }
    // A sweep must not wait for the owner.
    let by_somebody_else = guard == Guard::VersionAndLeaseOver;
    Write {
        what: "settle",
        verb: Verb::Update { set, raises_version: true },
        guard: by_somebody_else.then(|| format!("o.{lease_until} < {}", dialect.now())),
        skip_locked: by_somebody_else,
        given: &GIVEN,
    }
}
