//! Runs of messages of one key, in order, and none of them while an earlier one is unfinished.
//!
//! Two statements. The first reads a window of the due index and finds in it, for each key, the messages before which
//! no other of the key is unfinished: the *run*. The second locks runs, passing over rows that somebody else is
//! claiming, and wins of each run only what has no gap before it. So whatever happens between and beside the two, a
//! message is won only together with all unfinished ones before it.

use std::collections::HashMap;

use sea_orm::{DbErr, QueryResult, Value};

use super::{BehindFailed, ClaimRequest, Trust, claim_set, integer, milliseconds, suspect, win};
use crate::store::{
    Claimed, Fence, Position, Store, StoreError, Transaction, claimed,
    dialect::Dialect,
    fenced::{Column, FOR_UPDATE_OF_O, Given, given, given_id, given_values, output_id},
    table::Table,
};

/// How many entries of the due index are looked at, in batches: what stands behind a failed message must cost
/// nothing, however much it is.
const WINDOW: u64 = 4;

/// And no fewer than so many, when a single row is to be claimed.
const SMALLEST_WINDOW: u64 = 1_000;

/// Which part of a batch one key may have, so that a hot key leaves room for the others.
const LONGEST_RUN: u64 = 4;

/// A message that may be claimed together with those of its run that have a lower place.
struct Candidate {
    fence: Fence,
    /// Numbers the runs by what is due first.
    run: i64,
    /// From 1.
    place: i64,
}

/// What the first statement found.
#[derive(Default)]
struct Window {
    candidates: Vec<Candidate>,
    /// Its last entry, if there may be more behind it.
    end: Option<Position>,
}

impl Store {
    pub(super) async fn claim_per_key(
        &self,
        request: &ClaimRequest<'_>,
        behind_failed: BehindFailed,
    ) -> Result<Claimed, StoreError> {
        let hint = self.key_index_hint().await?;
        let trust = Trust::begin(request.lease);
        let work = async {
            let txn = self.begin().await?;
            let window = read_window(&txn, &self.table, request, behind_failed, &hint).await?;
            let rows = if window.candidates.is_empty() {
                Vec::new()
            } else {
                claim_runs(&txn, &self.table, request, &window.candidates).await?
            };
            txn.commit().await?;
            Ok((rows, window))
        };
        let (rows, window) = self.timed("claim", work).await?;
        let mut claimed = Claimed::read(&rows, &self.table, trust)?;
        let full = claimed.len() as u64 >= request.limit;
        claimed.more = full || window.end.is_some();
        claimed.next = if full { claimed.last.take() } else { window.end };
        Ok(claimed)
    }
}

/// Whether `o` has no unfinished message of its key before it, as a condition to append.
pub(super) fn and_is_first(table: &Table, behind_failed: BehindFailed, hint: &str) -> String {
    let Some(Keyed { key, unfinished }) = Keyed::of(table, behind_failed) else { return String::new() };
    let Table { name, id, .. } = table;
    format!(
        " AND NOT EXISTS (
            SELECT 1 FROM {name} p{hint} WHERE p.{key} = o.{key} AND p.{id} < o.{id} AND {unfinished}
        )"
    )
}

/// What order per key asks of the table.
struct Keyed {
    key: String,
    /// Whether a row `p` stands in the way of later ones.
    unfinished: String,
}

impl Keyed {
    /// `None` when the table has no keys, which is refused before it comes to this.
    fn of(table: &Table, behind_failed: BehindFailed) -> Option<Self> {
        let key = table.optional(&table.roles.ordering_key)?;
        let sent_at = table.optional(&table.roles.sent_at)?;
        let unfinished = match behind_failed {
            BehindFailed::Hold => format!("p.{sent_at} IS NULL"),
            BehindFailed::Skip => {
                format!("p.{sent_at} IS NULL AND p.{} <> {}", table.status, table.failed)
            }
        };
        Some(Self { key, unfinished })
    }
}

async fn read_window(
    txn: &Transaction,
    table: &Table,
    request: &ClaimRequest<'_>,
    behind_failed: BehindFailed,
    hint: &str,
) -> Result<Window, DbErr> {
    let Some(Keyed { key, unfinished }) = Keyed::of(table, behind_failed) else {
        return Ok(Window::default());
    };
    let Table { dialect, name, id, status, version, available_at, pending, .. } = table;
    let size = request.limit.saturating_mul(WINDOW).max(SMALLEST_WINDOW);
    let mut values = vec![integer(size), integer((request.limit / LONGEST_RUN).max(1))];
    let (after, position) = Position::after(request.after, table, 3);
    let before = match request.after {
        None => String::new(),
        // The same parameters.
        Some(_) => format!(
            " OR p.{available_at} < {at} OR p.{available_at} = {at} AND p.{id} <= {after_id}",
            at = Position::parameter(table, 3),
            after_id = Position::id_parameter(table, 4),
        ),
    };
    values.extend(position);
    let materialized = if *dialect == Dialect::MySql { "" } else { "MATERIALIZED " };
    let longest = if *dialect == Dialect::Postgres { "$2::bigint" } else { "$2" };
    let sql = format!(
        "\
        WITH entries AS {materialized}(
            SELECT {id} AS id, {version} AS version, {key} AS ordering_key, {available_at} AS available_at,
                CASE WHEN {status} = {pending} AND NOT {suspect} THEN 1 ELSE 0 END AS ready
            FROM {name}
            WHERE {available_at} <= {now}{after}
            ORDER BY {available_at}, {id}
            LIMIT $1
        ), end_of_window AS {materialized}(
            SELECT available_at, id, (SELECT COUNT(*) FROM entries) AS size
            FROM entries ORDER BY available_at DESC, id DESC LIMIT 1
        ), placed AS {materialized}(
            SELECT id, version, ordering_key, available_at,
                ROW_NUMBER() OVER (PARTITION BY ordering_key ORDER BY id) AS place,
                MAX(id) OVER (PARTITION BY ordering_key) AS last_id
            FROM entries WHERE ready = 1
        ), held AS {materialized}(
            SELECT id, version, ordering_key, available_at, place,
                CASE WHEN place = 1 AND ordering_key IS NOT NULL THEN (
                    SELECT p.{id} FROM {name} p{hint}
                    WHERE p.{key} = placed.ordering_key AND p.{id} < placed.last_id AND {unfinished}
                        AND (p.{status} <> {pending} OR {suspect_before}
                            OR p.{available_at} > (SELECT available_at FROM end_of_window)
                            OR p.{available_at} = (SELECT available_at FROM end_of_window)
                                AND p.{id} > (SELECT id FROM end_of_window){before})
                    ORDER BY p.{id} LIMIT 1
                ) END AS held_from
            FROM placed
        ), keyed AS (
            SELECT id, version, ordering_key, available_at,
                CASE WHEN ordering_key IS NULL THEN 1 ELSE place END AS place,
                CASE WHEN ordering_key IS NULL THEN available_at
                    ELSE MIN(available_at) OVER (PARTITION BY ordering_key) END AS first_at,
                CASE WHEN ordering_key IS NULL THEN id
                    ELSE MIN(id) OVER (PARTITION BY ordering_key) END AS first_id,
                CASE WHEN ordering_key IS NOT NULL
                    THEN MAX(held_from) OVER (PARTITION BY ordering_key) END AS held_from
            FROM held
        ), runs AS (
            SELECT id, version, place, DENSE_RANK() OVER (ORDER BY first_at, first_id) AS run
            FROM keyed WHERE (held_from IS NULL OR id < held_from) AND place <= {longest}
        )
        SELECT {output_id}, {version_read}, {run}, {place}, {window_size}, e.available_at, {end_id}
        FROM end_of_window e LEFT JOIN runs o ON 1 = 1
        ORDER BY o.run, o.place",
        now = dialect.now(),
        suspect = suspect(table, ""),
        suspect_before = suspect(table, "p."),
        output_id = dialect.integer("o.id"),
        version_read = dialect.integer("o.version"),
        run = dialect.integer("o.run"),
        place = dialect.integer("o.place"),
        window_size = dialect.integer("e.size"),
        end_id = dialect.integer("e.id"),
    );
    let rows = txn.query(sql, values).await?;
    let mut window = Window::default();
    for row in &rows {
        if window.end.is_none() && row.try_get_by_index::<i64>(4)? >= i64::try_from(size).unwrap_or(i64::MAX)
        {
            window.end = Some(Position::read(row, 5, 6, table)?);
        }
        // Without runs there is one row, of the window alone.
        if let Some(id) = row.try_get_by_index::<Option<i64>>(0)? {
            window.candidates.push(Candidate {
                fence: Fence::new(id, row.try_get_by_index(1)?),
                run: row.try_get_by_index(2)?,
                place: row.try_get_by_index(3)?,
            });
        }
    }
    Ok(window)
}

async fn claim_runs(
    txn: &Transaction,
    table: &Table,
    request: &ClaimRequest<'_>,
    candidates: &[Candidate],
) -> Result<Vec<QueryResult>, DbErr> {
    match table.dialect {
        Dialect::Postgres => {
            let (sql, values) = postgres_statement(table, request, candidates);
            txn.query(sql, values).await
        }
        Dialect::MySql => {
            let locked = lock(txn, table, request.limit, candidates).await?;
            win(txn, table, &without_gaps(candidates, &locked), request).await
        }
        Dialect::Sqlite => {
            // Nobody else has written since the window was read.
            let limit = usize::try_from(request.limit).unwrap_or(usize::MAX);
            let rows = candidates.iter().take(limit).map(|candidate| (candidate.fence, [])).collect();
            let mut values = given_values(table, rows);
            values.extend([request.claimed_by.into(), milliseconds(request.lease)]);
            let Table { name, id, version, .. } = table;
            let sql = format!(
                "\
                UPDATE {name} AS o SET {set}
                WHERE (o.{id}, o.{version}) IN (SELECT id, version FROM {given})
                RETURNING {columns}",
                set = claim_set(table, 2),
                given = given(table, &[]),
                columns = claimed::columns(table, request.inline_bytes),
            );
            txn.query(sql, values).await
        }
    }
}

fn postgres_statement(
    table: &Table,
    request: &ClaimRequest<'_>,
    candidates: &[Candidate],
) -> (String, Vec<Value>) {
    let Table { name, id, version, .. } = table;
    let rows = candidates
        .iter()
        .map(|candidate| (candidate.fence, [Given::Integer(candidate.run), Given::Integer(candidate.place)]))
        .collect();
    let mut values = given_values(table, rows);
    values.extend([integer(request.limit), request.claimed_by.into(), milliseconds(request.lease)]);
    let sql = format!(
        "\
        WITH locked AS MATERIALIZED (
            SELECT o.{id} AS id, o.{version} AS version, g.run, g.place
            FROM {given} JOIN {name} o ON o.{id} = g.id AND o.{version} = g.version
            ORDER BY g.run, g.place
            LIMIT $5
            FOR UPDATE OF o SKIP LOCKED
        ), numbered AS (
            SELECT id, version, place, ROW_NUMBER() OVER (PARTITION BY run ORDER BY place) AS number FROM locked
        ), won AS MATERIALIZED (
            SELECT id, version FROM numbered WHERE place = number
        )
        UPDATE {name} o SET {set}
        FROM won
        WHERE o.{id} = won.id AND o.{version} = won.version
        RETURNING {columns}",
        given = given(table, &[("run", Column::Integer), ("place", Column::Integer)]),
        set = claim_set(table, 6),
        columns = claimed::columns(table, request.inline_bytes),
    );
    (sql, values)
}

/// Locks candidates on MySQL and MariaDB, in their order, those whose version is the same and that nobody else has
/// locked.
async fn lock(
    txn: &Transaction,
    table: &Table,
    limit: u64,
    candidates: &[Candidate],
) -> Result<Vec<Fence>, DbErr> {
    let Table { name, id, version, .. } = table;
    let mut values = given_values(table, candidates.iter().map(|c| (c.fence, [])).collect());
    values.push(integer(limit));
    let sql = format!(
        "\
        SELECT {output_id}, o.{version}
        FROM {given} STRAIGHT_JOIN {name} o ON o.{id} = {given_id}
        WHERE o.{version} = g.version
        LIMIT $2
        {FOR_UPDATE_OF_O} SKIP LOCKED",
        output_id = output_id(table),
        given = given(table, &[]),
        given_id = given_id(table),
    );
    txn.query(sql, values).await?.iter().map(|row| Fence::read(row, table)).collect()
}

/// Those of the locked rows before which all of their run are locked.
fn without_gaps(candidates: &[Candidate], locked: &[Fence]) -> Vec<Fence> {
    let locked: std::collections::HashSet<Fence> = locked.iter().copied().collect();
    let mut next: HashMap<i64, i64> = HashMap::new();
    let mut won = Vec::new();
    for Candidate { fence, run, place } in candidates {
        let next = next.entry(*run).or_insert(1);
        if place == next && locked.contains(fence) {
            *next += 1;
            won.push(*fence);
        }
    }
    won
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_won_up_to_its_first_gap() {
        let candidate = |id: i64, run, place| Candidate { fence: Fence::new(id, 0), run, place };
        let candidates = [
            candidate(1, 1, 1),
            candidate(2, 1, 2),
            candidate(3, 1, 3),
            candidate(9, 2, 1),
            candidate(4, 3, 1),
        ];
        let locked = [1, 3, 4].map(|id| Fence::new(id, 0));
        assert_eq!(without_gaps(&candidates, &locked), [1, 4].map(|id| Fence::new(id, 0)));
    }
}
