//! Claim: win rows by their version.

mod key_index;
mod optimistic;
mod per_key;
mod skip_locked;

use std::time::Duration;

use sea_orm::{ConnectionTrait, DbErr, QueryResult, Value};
use tokio::time::Instant;

pub(super) use key_index::KeyIndex;
pub(crate) use per_key::longest_run;

use super::{
    Claimed, Fence, Position, Store, StoreError, Transaction, claimed,
    dialect::Dialect,
    fenced::{FOR_UPDATE_OF_O, given, given_id, given_values, output_id},
    table::Table,
};
use crate::lifecycle::EXPIRED;

/// How several relays keep out of each other's way. Both compare the version; they make the same promises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClaimStrategy {
    /// Rows that another relay is claiming at this moment are passed over (`FOR UPDATE SKIP LOCKED`), and the
    /// version is compared all the same: no lost races. On SQLite, which has one writer, it is one statement.
    ///
    /// The default where the server has it.
    #[default]
    SkipLocked,
    /// No row locks: a relay reads rows with their versions, then claims those whose version is still the
    /// same. To keep relays from racing for the same rows, each takes one of 16 slices of the head of the
    /// queue, chosen at random. On SQLite it is as `SkipLocked`. Not with order per key.
    Optimistic,
}

/// Whether messages with the same ordering key are published in order.
///
/// Order means the order of the ids, and it holds for messages whose enqueues were themselves one after the other,
/// say because each transaction locks the aggregate's row. Two transactions that enqueue for one key at the same time
/// may commit in another order than that of their ids: then there is no order to keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ordering {
    /// Every message on its own, keys or not.
    #[default]
    Unordered,
    /// One message of a key is in flight at a time, and none is claimed while an earlier one of its key is
    /// unfinished: claimed, waiting out a backoff, or delayed. Other keys, and messages without a key, go on.
    PerKey {
        /// What becomes of the messages behind a failed one.
        behind_failed: BehindFailed,
    },
}

/// What becomes of the messages of a key behind one that ended `FAILED`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BehindFailed {
    /// They wait until a person has requeued or discarded it.
    Hold,
    /// They go on. The failed message, requeued later, comes after them.
    Skip,
}

/// What to claim, and for whom.
#[derive(Clone, Copy, Debug)]
pub struct ClaimRequest<'a> {
    /// How to keep out of the way of others. With order per key it is always as in
    /// [`ClaimStrategy::SkipLocked`].
    pub strategy: ClaimStrategy,
    /// The most rows to claim.
    pub limit: u64,
    /// The relay and the batch, `relay:batch`, at most 100 characters. It must be another one for each claim:
    /// on MySQL and MariaDB the rows that were won are known by it, and everywhere [`Store::claims_of`] finds them.
    pub claimed_by: &'a str,
    /// How long the claim is trusted.
    pub lease: Duration,
    /// Where to begin, from [`Claimed::next`]; `None` at the head of the queue.
    pub after: Option<&'a Position>,
    /// The most bytes of a payload that is read with the claim. Of larger ones only the size is read, to be
    /// [loaded](Store::load) when it is their turn. `None`: all are read.
    pub inline_bytes: Option<u64>,
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Whether a `PENDING` row is a suspect, in SQL; `row` is the prefix of its columns.
pub(super) fn suspect(table: &Table, row: &str) -> String {
    let Table { attempts, last_error, .. } = table;
    format!("({row}{attempts} >= 2 AND COALESCE({row}{last_error}, '') LIKE '{EXPIRED}%')")
}

impl Store {
    /// Claims rows that are due, in the order in which they became due, leaving out
    /// [suspects](super::Sweepable::suspects). The attempt is counted now.
    ///
    /// Another relay that claims at the same moment is no error: the rows it won are missing from the result.
    ///
    /// With [order per key](Ordering::PerKey) a run of messages of one key is claimed together, at most a quarter
    /// of the batch; they are to be published one after the other, and after one that was not acknowledged the rest
    /// of its run must be released.
    ///
    /// # Errors
    /// When the database does not carry it out. After [`StoreError::Timeout`] and
    /// [`StoreError::Unavailable`] rows may be claimed all the same: see [`Store::claims_of`]; otherwise the sweep
    /// returns them.
    pub async fn claim(&self, request: &ClaimRequest<'_>) -> Result<Claimed, StoreError> {
        let claimed = match (self.ordering, request.strategy) {
            (Ordering::PerKey { behind_failed }, _) => self.claim_per_key(request, behind_failed).await,
            (Ordering::Unordered, ClaimStrategy::Optimistic) if self.table.dialect != Dialect::Sqlite => {
                self.claim_optimistic(request).await
            }
            (Ordering::Unordered, _) => self.claim_skip_locked(request).await,
        };
        match claimed {
            // Whoever was in the way has them.
            Err(StoreError::Contention(error)) => {
                tracing::debug!(%error, "lost a race");
                Ok(Claimed { lost_races: 1, more: true, ..Claimed::default() })
            }
            Err(StoreError::Table(error)) => {
                self.key_index.forget();
                Err(StoreError::Table(error))
            }
            other => other,
        }
    }

    /// Claims those of the `candidates` whose version is still the one that was read.
    ///
    /// This is also how a [suspect](super::Sweepable::suspects) is claimed: alone. With order per key, candidates
    /// with an unfinished message of their key before them are not won.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn claim_candidates(
        &self,
        candidates: &[Fence],
        claimed_by: &str,
        lease: Duration,
    ) -> Result<Claimed, StoreError> {
        let request = &ClaimRequest {
            strategy: ClaimStrategy::Optimistic,
            limit: candidates.len() as u64,
            claimed_by,
            lease,
            after: None,
            inline_bytes: None,
        };
        if candidates.is_empty() {
            return Ok(Claimed::default());
        }
        // In the order of the primary key, so that two relays take row locks in the same order.
        let mut candidates = candidates.to_vec();
        candidates.sort_unstable();
        let guard = self.and_is_first().await?;
        let table = &*self.table;
        let Table { name, id, version, .. } = table;
        let rows = candidates.iter().map(|fence| (*fence, [])).collect();
        let mut values = given_values(table, rows);
        let (set, columns) =
            (claim_set(table, values.len() + 1), claimed::columns(table, request.inline_bytes));
        let given = given(table, &[]);
        let trust = Trust::begin(request.lease);
        let rows = match table.dialect {
            Dialect::MySql => {
                let work = async {
                    let txn = self.begin().await?;
                    let mut candidates = candidates.clone();
                    if !guard.is_empty() {
                        // MySQL does not read a table in the statement that changes it.
                        let sql = format!(
                            "\
                            SELECT {key}, o.{version} FROM {given} STRAIGHT_JOIN {name} o ON o.{id} = {given_id}
                            WHERE o.{version} = g.version{guard}",
                            key = output_id(table),
                            given_id = given_id(table),
                        );
                        let first = txn.query(sql, values).await?;
                        candidates =
                            first.iter().map(|row| Fence::read(row, table)).collect::<Result<_, _>>()?;
                    }
                    self.win(txn, &candidates, request).await
                };
                self.timed("claim", work).await?
            }
            Dialect::Postgres | Dialect::Sqlite => {
                values.extend([request.claimed_by.into(), milliseconds(request.lease)]);
                let matching = match table.dialect {
                    Dialect::Sqlite => {
                        format!("WHERE (o.{id}, o.{version}) IN (SELECT id, version FROM {given})")
                    }
                    _ => format!("FROM {given} WHERE o.{id} = g.id AND o.{version} = g.version"),
                };
                let sql = format!("UPDATE {name} AS o SET {set} {matching}{guard} RETURNING {columns}");
                self.run("claim", sql, values).await?
            }
        };
        let mut claimed = Claimed::read(&rows, table, trust)?;
        claimed.lost_races = (candidates.len() - claimed.len()) as u64;
        Ok(claimed)
    }

    /// Claims candidates on MySQL and MariaDB, which say how many rows a statement wrote and not which: they are known
    /// by their claimant. They are read when the transaction is over: until then whoever has read the same rows would
    /// lose a race.
    async fn win(
        &self,
        txn: Transaction,
        candidates: &[Fence],
        request: &ClaimRequest<'_>,
    ) -> Result<Vec<QueryResult>, DbErr> {
        let table = &*self.table;
        if candidates.is_empty() {
            txn.commit().await?;
            return Ok(Vec::new());
        }
        let Table { name, id, version, claimed_by: claimant, .. } = table;
        let mut candidates = candidates.to_vec();
        candidates.sort_unstable();
        let mut values = given_values(table, candidates.iter().map(|fence| (*fence, [])).collect());
        let given = format!(
            "{given} STRAIGHT_JOIN {name} o ON o.{id} = {given_id}",
            given = given(table, &[]),
            given_id = given_id(table),
        );
        values.extend([request.claimed_by.into(), milliseconds(request.lease)]);
        let sql = format!("UPDATE {given} SET {} WHERE o.{version} = g.version", claim_set(table, 2));
        let won = txn.execute(sql, values.clone()).await?;
        txn.commit().await?;
        if won == 0 {
            return Ok(Vec::new());
        }
        let columns = claimed::columns(table, request.inline_bytes);
        let sql =
            format!("SELECT {columns} FROM {given} WHERE o.{version} = g.version + 1 AND o.{claimant} = $2");
        self.db.query_all_raw(table.dialect.statement(sql, values)).await
    }

    /// The rows that a claim won whose answer never came, found by its `claimed_by`, which must be unique to it.
    ///
    /// It looks at 20,000 entries of the due index from `after` on, where the claim began; what lies further behind is
    /// left to the sweep.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn claims_of(
        &self,
        claimed_by: &str,
        after: Option<&Position>,
    ) -> Result<Vec<Fence>, StoreError> {
        let Table {
            dialect, name, id, status, version, available_at, claimed_by: claimant, processing, ..
        } = &*self.table;
        let (after, position) = Position::after(after, &self.table, 2);
        let sql = format!(
            "\
            SELECT {key}, o.{version}
            FROM (
                SELECT {id}, {version}, {status}, {claimant} FROM {name}
                WHERE {available_at} <= {now}{after}
                ORDER BY {available_at}, {id}
                LIMIT 20000
            ) AS o
            WHERE o.{status} = {processing} AND o.{claimant} = $1",
            key = output_id(&self.table),
            now = dialect.now(),
        );
        let values = std::iter::once(claimed_by.into()).chain(position).collect();
        let rows = self.run("read claims back", sql, values).await?;
        self.fences(&rows)
    }

    /// With order per key, that `o` has no unfinished message of its key before it, as a condition to append.
    pub(super) async fn and_is_first(&self) -> Result<String, StoreError> {
        match self.ordering {
            Ordering::Unordered => Ok(String::new()),
            Ordering::PerKey { behind_failed } => {
                Ok(per_key::and_is_first(&self.table, behind_failed, &self.key_index_hint().await?))
            }
        }
    }

    /// These columns of the rows that are due, from `after` on, at most `$1`; and the values of the parameters, which
    /// a limit goes before.
    fn due(&self, columns: &str, after: Option<&Position>) -> (String, Vec<Value>) {
        let Table { dialect, name, id, status, available_at, pending, .. } = &*self.table;
        let (after, values) = Position::after(after, &self.table, 2);
        let status = match dialect {
            // Not the column itself: with an index on it, somebody's own, MySQL would read and sort the whole backlog.
            Dialect::MySql => format!("CONCAT({status})"),
            Dialect::Postgres | Dialect::Sqlite => status.clone(),
        };
        let sql = format!(
            "\
            SELECT {columns} FROM {name}
            WHERE {available_at} <= {now}{after} AND {status} = {pending} AND NOT {suspect}
            ORDER BY {available_at}, {id}
            LIMIT $1",
            now = dialect.now(),
            suspect = suspect(&self.table, ""),
        );
        (sql, values)
    }
}

/// A row whose version is no number, where the database lets it be, is nobody's candidate.
fn candidates(rows: &[QueryResult], table: &Table) -> Vec<Fence> {
    rows.iter().filter_map(|row| Fence::read(row, table).ok()).collect()
}

/// Locks candidates on MySQL and MariaDB, in their order, those whose version is the same and that nobody else has
/// locked.
async fn lock(
    txn: &Transaction,
    table: &Table,
    limit: u64,
    candidates: &[Fence],
) -> Result<Vec<Fence>, DbErr> {
    if candidates.is_empty() {
        return Ok(Vec::new());
    }
    let Table { name, id, version, .. } = table;
    let mut values = given_values(table, candidates.iter().map(|fence| (*fence, [])).collect());
    values.push(integer(limit));
    let sql = format!(
        "\
        SELECT {output_id}, {version_read}
        FROM {given} STRAIGHT_JOIN {name} o ON o.{id} = {given_id}
        WHERE o.{version} = g.version
        LIMIT $2
        {FOR_UPDATE_OF_O} SKIP LOCKED",
        output_id = output_id(table),
        version_read = table.dialect.integer(&format!("o.{version}")),
        given = given(table, &[]),
        given_id = given_id(table),
    );
    txn.query(sql, values).await?.iter().map(|row| Fence::read(row, table)).collect()
}

/// What a claim writes. Parameter `next` is the claimant, the one after it the lease in milliseconds.
fn claim_set(table: &Table, next: usize) -> String {
    let Table { dialect, status, version, attempts, claimed_by, lease_until, .. } = table;
    let (prefix, cast) = match dialect {
        Dialect::Postgres => ("", "::bigint"),
        Dialect::MySql => ("o.", ""),
        Dialect::Sqlite => ("", ""),
    };
    let processing = &table.processing;
    let lease = dialect.clock_plus_ms(&format!("${}{cast}", next + 1));
    format!(
        "\
        {prefix}{status} = {processing},
        {prefix}{version} = o.{version} + 1,
        {prefix}{attempts} = o.{attempts} + 1,
        {prefix}{claimed_by} = ${next},
        {prefix}{lease_until} = {lease}"
    )
}

/// Until when a claim may be trusted: reckoned from before the statement is sent, so that it ends early rather than
/// late.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trust(pub(super) Instant);

impl Trust {
    fn begin(lease: Duration) -> Self {
        let now = Instant::now();
        // A lease beyond all time is trusted for a day.
        Self(now.checked_add(lease).unwrap_or(now + DAY))
    }
}

fn integer(value: u64) -> Value {
    i64::try_from(value).unwrap_or(i64::MAX).into()
}

/// At most a century: no database calculates with more.
pub(super) fn whole_milliseconds(duration: Duration) -> i64 {
    const CENTURY: i64 = 100 * 365 * 24 * 60 * 60 * 1000;
    i64::try_from(duration.as_millis()).unwrap_or(CENTURY).min(CENTURY)
}

pub(super) fn milliseconds(duration: Duration) -> Value {
    whole_milliseconds(duration).into()
}
