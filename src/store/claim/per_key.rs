//! Runs of messages of one key, in order, and none of them while an earlier one is unfinished.
//!
//! First a window of the due index is read; then, for those in it that might be claimed, the first unfinished message
//! of the key and the next one behind each. Together they show, for each key, the messages before which no other of
//! the key is unfinished: the *run*. Then runs are locked, passing over rows that somebody else is claiming, and of each
//! only what has no gap before it is won. So whatever happens between and beside these statements, a message is won only together with all
//! unfinished ones before it.
//!
//! They are plain statements on purpose: one that found the runs by itself, with window functions, took MySQL and
//! MariaDB a second for 4,000 entries.

use std::collections::{HashMap, HashSet};

use sea_orm::{DbErr, QueryResult, Value};

use super::{BehindFailed, ClaimRequest, Trust, claim_set, integer, lock, milliseconds, suspect};
use crate::store::{
    Claimed, Fence, Position, RowId, Store, StoreError, Transaction, claimed,
    dialect::Dialect,
    fenced::{Column, Given, given, given_id, given_values, output_id},
    table::Table,
};

/// How many entries of the due index are looked at, in batches: what stands behind a failed message must cost
/// nothing, however much it is.
const WINDOW: u64 = 4;

/// And no fewer than so many, when a single row is to be claimed.
const SMALLEST_WINDOW: u64 = 1_000;

/// Which part of a batch one key may have, so that a hot key leaves room for the others.
const PART_OF_BATCH: u64 = 4;

/// And no more than so many, however large the batch: they are published one after the other.
const LONGEST_RUN: u64 = 250;

/// The most messages of one key in a claim of so many rows.
pub(crate) fn longest_run(limit: u64) -> u64 {
    (limit / PART_OF_BATCH).clamp(1, LONGEST_RUN)
}

/// A message that may be claimed together with those of its run that have a lower place.
struct Candidate {
    fence: Fence,
    /// Numbers the runs by what is due first.
    run: i64,
    /// From 1.
    place: i64,
}

/// An entry of the due index.
struct Entry {
    fence: Fence,
    position: Position,
    key: Option<String>,
    /// Whether it is there to be claimed.
    ready: bool,
}

/// What the first statement read.
struct Window {
    /// In the order of the index.
    entries: Vec<Entry>,
    /// Whether there may be more behind the last of them.
    more: bool,
}

/// Entries of one key that are ready, by id, as indices among the entries. One without a key is a run of its own.
struct Run {
    entries: Vec<usize>,
    /// Which of them is due first.
    first: usize,
}

impl Store {
    pub(super) async fn claim_per_key(
        &self,
        request: &ClaimRequest<'_>,
        behind_failed: BehindFailed,
    ) -> Result<Claimed, StoreError> {
        let trust = Trust::begin(request.lease);
        let hint = self.key_index_hint().await?;
        let work = async {
            let txn = self.begin().await?;
            let window = read_window(&txn, &self.table, request).await?;
            let mut runs = runs(&window.entries, longest_run(request.limit));
            let keyed = Keyed::of(&self.table, behind_failed, &hint);
            cut(&txn, &self.table, keyed.as_ref(), &window.entries, &mut runs, request.limit).await?;
            let candidates = candidates(&window.entries, &runs);
            let rows = self.claim_runs(txn, request, &candidates).await?;
            Ok((rows, window, runs))
        };
        let (rows, Window { entries, more }, runs) = self.timed("claim", work).await?;
        let mut claimed = Claimed::read(&rows, &self.table, trust)?;
        let full = claimed.len() as u64 >= request.limit;
        claimed.more = full || more;
        claimed.next = if full {
            // The runs before the last one that was won were all tried. Those behind it begin further on.
            let won: HashSet<RowId> = claimed.fences().map(|fence| fence.id).collect();
            let is_won = |run: &&Run| run.entries.iter().any(|entry| won.contains(&entries[*entry].fence.id));
            runs.iter().rfind(is_won).map(|run| entries[run.first].position.clone())
        } else {
            entries.into_iter().next_back().filter(|_| more).map(|entry| entry.position)
        };
        Ok(claimed)
    }

    async fn claim_runs(
        &self,
        txn: Transaction,
        request: &ClaimRequest<'_>,
        candidates: &[Candidate],
    ) -> Result<Vec<QueryResult>, DbErr> {
        let table = &*self.table;
        if candidates.is_empty() {
            txn.commit().await?;
            return Ok(Vec::new());
        }
        let (sql, values) = match table.dialect {
            Dialect::Postgres => postgres_statement(table, request, candidates),
            Dialect::Sqlite => sqlite_statement(table, request, candidates),
            Dialect::MySql => {
                let fences: Vec<_> = candidates.iter().map(|candidate| candidate.fence).collect();
                let locked = lock(&txn, table, request.limit, &fences).await?;
                return self.win(txn, &without_gaps(candidates, &locked), request).await;
            }
        };
        let rows = txn.query(sql, values).await?;
        txn.commit().await?;
        Ok(rows)
    }
}

/// Whether `o` has no unfinished message of its key before it, as a condition to append.
pub(super) fn and_is_first(table: &Table, behind_failed: BehindFailed, hint: &str) -> String {
    let Some(keyed) = Keyed::of(table, behind_failed, hint) else { return String::new() };
    let id = &table.id;
    format!(" AND COALESCE({}, o.{id}) >= o.{id}", keyed.first(table, false))
}

/// What order per key asks of the table.
struct Keyed {
    key: String,
    /// Whether a row `p` stands in the way of later ones.
    unfinished: String,
    /// Which index finds it.
    hint: String,
}

impl Keyed {
    /// `None` when the table has no keys, which is refused before it comes to this.
    fn of(table: &Table, behind_failed: BehindFailed, hint: &str) -> Option<Self> {
        let key = table.optional(&table.roles.ordering_key)?;
        let sent_at = table.optional(&table.roles.sent_at)?;
        let unfinished = match behind_failed {
            BehindFailed::Hold => format!("p.{sent_at} IS NULL"),
            BehindFailed::Skip => {
                format!("p.{sent_at} IS NULL AND p.{} <> {}", table.status, table.failed)
            }
        };
        Some(Self { key, unfinished, hint: hint.to_owned() })
    }

    /// The id of the first unfinished message of the key of `o`, or of the first behind it, as a query.
    ///
    /// Always in ascending order: MySQL and MariaDB look for it from that end of the key at which the order begins,
    /// which for the last one before a row was the far end.
    fn first(&self, table: &Table, behind: bool) -> String {
        let Self { key, unfinished, hint } = self;
        let Table { dialect, name, id, .. } = table;
        if *dialect == Dialect::Postgres {
            // Not `p.key = o.key`: then the primary key has the order too, and where statistics promise that a match
            // comes soon, every message ever sent is read. The order of the pair only the index of the key has.
            let from =
                if behind { format!("> (o.{key}, o.{id})") } else { format!(">= (o.{key}, {})", i64::MIN) };
            return format!(
                "(
                    SELECT CASE WHEN p.{key} = o.{key} THEN p.{id} END FROM {name} p
                    WHERE (p.{key}, p.{id}) {from} AND p.{key} <= o.{key} AND {unfinished}
                    ORDER BY p.{key}, p.{id} LIMIT 1
                )"
            );
        }
        // Of one key and of rows that are not sent it is the order of the id. Said in full, or MySQL walks the primary
        // key.
        let order = match (dialect, table.optional(&table.roles.sent_at)) {
            (Dialect::MySql, Some(sent_at)) => format!("p.{key}, p.{sent_at}, p.{id}"),
            _ => format!("p.{id}"),
        };
        let behind = if behind { format!(" AND p.{id} > o.{id}") } else { String::new() };
        format!(
            "(
                SELECT p.{id} FROM {name} p{hint}
                WHERE p.{key} = o.{key} AND {unfinished}{behind}
                ORDER BY {order} LIMIT 1
            )"
        )
    }
}

async fn read_window(txn: &Transaction, table: &Table, request: &ClaimRequest<'_>) -> Result<Window, DbErr> {
    let Table { dialect, name, version, available_at, status, pending, .. } = table;
    let size = request.limit.saturating_mul(WINDOW).max(SMALLEST_WINDOW);
    let (after, position) = Position::after(request.after, table, 2);
    let key = match &table.roles.ordering_key {
        Some(role) => table.text(role, ""),
        None => dialect.text("NULL"),
    };
    let sql = format!(
        "\
        SELECT {id}, {version_read}, {key}, {time}, {ready}
        FROM {name} o
        WHERE {available_at} <= {now}{after}
        ORDER BY {available_at}, {by_id}
        LIMIT $1",
        id = output_id(table),
        version_read = dialect.integer(version),
        by_id = table.id,
        time = Position::output(table, ""),
        now = dialect.now(),
        ready = dialect.integer(&format!(
            "CASE WHEN {status} = {pending} AND NOT {} THEN 1 ELSE 0 END",
            suspect(table, "")
        )),
    );
    let values = std::iter::once(integer(size)).chain(position).collect();
    let rows = txn.query(sql, values).await?;
    let entry = |row: &QueryResult| -> Result<Entry, DbErr> {
        Ok(Entry {
            fence: Fence::read(row, table)?,
            key: row.try_get_by_index(2)?,
            position: Position::read(row, 3, 0, table)?,
            ready: row.try_get_by_index::<i64>(4)? == 1,
        })
    };
    let mut entries = Vec::with_capacity(rows.len());
    for row in &rows {
        match entry(row) {
            Ok(entry) => entries.push(entry),
            // Where the database lets it be: it has no place among the others, and is left alone.
            Err(error) => tracing::debug!(%error, "an entry of {table:?} cannot be read"),
        }
    }
    Ok(Window { more: rows.len() as u64 >= size, entries })
}

/// The runs as far as the window shows them, by what is due first.
fn runs(entries: &[Entry], longest: u64) -> Vec<Run> {
    let longest = usize::try_from(longest).unwrap_or(usize::MAX);
    let mut keyed: HashMap<&str, Vec<usize>> = HashMap::new();
    let mut runs = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        match entry.key.as_deref() {
            Some(key) => keyed.entry(key).or_default().push(index),
            None if entry.ready => runs.push(Run { entries: vec![index], first: index }),
            None => {}
        }
    }
    for (_, mut of_key) in keyed {
        of_key.sort_unstable_by_key(|index| entries[*index].fence);
        let ready = of_key.iter().take(longest).take_while(|index| entries[**index].ready).count();
        of_key.truncate(ready);
        if let Some(first) = of_key.iter().copied().min() {
            runs.push(Run { entries: of_key, first });
        }
    }
    runs.sort_unstable_by_key(|run| run.first);
    runs
}

/// Cuts each run where an unfinished message comes before the next of it that is not of the run, wherever it stands,
/// and leaves no more runs than a batch has use for.
async fn cut(
    txn: &Transaction,
    table: &Table,
    keyed: Option<&Keyed>,
    entries: &[Entry],
    runs: &mut Vec<Run>,
    limit: u64,
) -> Result<(), DbErr> {
    let Some(by_key) = keyed else { return Ok(()) };
    let is_keyed = |run: &Run| entries[run.first].key.is_some();
    let fence = |entry: &usize| entries[*entry].fence;
    let keyed = runs.iter().filter(|run| is_keyed(run));
    let first_of_runs = keyed.filter_map(|run| run.entries.first()).map(fence).collect();
    let heads = unfinished(txn, table, by_key, first_of_runs, false).await?;
    runs.retain(|run| {
        let first = run.entries.first().map(fence);
        !is_keyed(run) || first.is_some_and(|first| heads.get(&first) == Some(&first.id))
    });
    // Twice the batch, since others may be claiming the same ones at this moment.
    let mut room = limit.saturating_mul(2);
    runs.retain(|run| {
        let tried = room > 0;
        room = room.saturating_sub(run.entries.len() as u64);
        tried
    });
    let all_but_last = runs.iter().flat_map(|run| run.entries.split_last().map_or(&[][..], |(_, rest)| rest));
    let next = unfinished(txn, table, by_key, all_but_last.map(fence).collect(), true).await?;
    for run in runs {
        let follows = |pair: &&[usize]| next.get(&fence(&pair[0])) == Some(&fence(&pair[1]).id);
        let whole = run.entries.windows(2).take_while(follows).count() + 1;
        run.entries.truncate(whole);
    }
    Ok(())
}

/// For each row the first unfinished one of its key, or the first behind it.
async fn unfinished(
    txn: &Transaction,
    table: &Table,
    keyed: &Keyed,
    rows: Vec<Fence>,
    behind: bool,
) -> Result<HashMap<Fence, RowId>, DbErr> {
    let mut found = HashMap::with_capacity(rows.len());
    if rows.is_empty() {
        return Ok(found);
    }
    let Table { dialect, name, id, version, .. } = table;
    let values = given_values(table, rows.into_iter().map(|fence| (fence, [])).collect());
    let sql = format!(
        "\
        SELECT {output_id}, {version_read}, {first}
        FROM {given} {join} {name} o
        WHERE o.{id} = {given_id} AND o.{version} = g.version",
        output_id = output_id(table),
        version_read = dialect.integer(&format!("o.{version}")),
        first = dialect.integer(&keyed.first(table, behind)),
        given = given(table, &[]),
        // The batch first.
        join = if *dialect == Dialect::MySql { "STRAIGHT_JOIN" } else { "CROSS JOIN" },
        given_id = given_id(table),
    );
    for row in &txn.query(sql, values).await? {
        if let Some(first) = row.try_get_by_index::<Option<i64>>(2)? {
            found.insert(Fence::read(row, table)?, RowId::Integer(first));
        }
    }
    Ok(found)
}

fn candidates(entries: &[Entry], runs: &[Run]) -> Vec<Candidate> {
    let numbered = (1..).zip(runs);
    let placed = numbered.flat_map(|(run, entries)| (1..).zip(&entries.entries).map(move |at| (run, at)));
    placed.map(|(run, (place, entry))| Candidate { fence: entries[*entry].fence, run, place }).collect()
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

fn sqlite_statement(
    table: &Table,
    request: &ClaimRequest<'_>,
    candidates: &[Candidate],
) -> (String, Vec<Value>) {
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
    (sql, values)
}

/// Those of the locked rows before which all of their run are locked.
fn without_gaps(candidates: &[Candidate], locked: &[Fence]) -> Vec<Fence> {
    let locked: HashSet<Fence> = locked.iter().copied().collect();
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
