//! Plain compare-and-set, on one slice of the head of the queue.

use sea_orm::{DbErr, QueryResult, Value};

use super::{ClaimRequest, Trust, candidates, claim_set, integer, milliseconds};
use crate::store::{Claimed, Fence, Store, StoreError, Transaction, claimed, dialect::Dialect, table::Table};

/// How many slices the head of the queue has.
const SLICES: u64 = 16;

impl Store {
    /// Reads rows that are due, at the versions they have now: one of 16 slices of the head of the queue,
    /// chosen at random, of at most `limit` rows.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn candidates(&self, limit: u64) -> Result<Vec<Fence>, StoreError> {
        let (sql, values) = self.slice(limit);
        Ok(candidates(&self.run("read candidates", sql, values).await?, &self.table))
    }

    /// In the statement that reads the slice, or at least in its transaction: the shorter the time in between, the fewer
    /// races are lost. Not on SQLite: with one writer there is no race.
    pub(super) async fn claim_optimistic(&self, request: &ClaimRequest<'_>) -> Result<Claimed, StoreError> {
        let table = &*self.table;
        let trust = Trust::begin(request.lease);
        let (rows, tried, more) = match table.dialect {
            Dialect::MySql => {
                let work = async {
                    let txn = self.begin().await?;
                    let (slice, more) = self.read_slice(&txn, request.limit).await?;
                    let rows = self.win(txn, &slice, request).await?;
                    Ok((rows, slice.len(), more))
                };
                self.timed("claim", work).await?
            }
            Dialect::Postgres | Dialect::Sqlite => self.claim_slice(request).await?,
        };
        let mut claimed = Claimed::read(&rows, table, trust)?;
        claimed.lost_races = tried.saturating_sub(claimed.len()) as u64;
        claimed.more = more;
        Ok(claimed)
    }

    /// The rows that were won, how many were tried, and whether there are more.
    async fn claim_slice(
        &self,
        request: &ClaimRequest<'_>,
    ) -> Result<(Vec<QueryResult>, usize, bool), StoreError> {
        let table = &*self.table;
        let Table { name, id, version, .. } = table;
        let (slice, mut values) = self.slice(request.limit);
        let set = claim_set(table, values.len() + 1);
        let columns = claimed::columns(table, request.inline_bytes);
        values.extend([request.claimed_by.into(), milliseconds(request.lease)]);
        // One row at least, to say what was tried.
        let sql = format!(
            "\
            WITH slice AS MATERIALIZED ({slice}), won AS (
                UPDATE {name} o SET {set}
                FROM slice
                WHERE o.{id} = slice.{id} AND o.{version} = slice.{version}
                RETURNING {columns}
            )
            SELECT won.*, slices.tried, slices.size
            FROM (SELECT COUNT(*) AS tried, COALESCE(MAX(size), 0) AS size FROM slice) AS slices
            LEFT JOIN won ON TRUE"
        );
        let mut rows = self.run("claim", sql, values).await?;
        let number = |place| rows.first().map_or(Ok(0), |row| row.try_get_by_index::<i64>(place));
        let (tried, size) = (number(claimed::COLUMNS)?, number(claimed::COLUMNS + 1)?);
        rows.retain(|row| !matches!(row.try_get_by_index::<Option<i64>>(1), Ok(None)));
        let more = size > tried || tried.unsigned_abs() >= request.limit;
        Ok((rows, usize::try_from(tried).unwrap_or_default(), more))
    }

    /// A slice, and whether there are more. MySQL and MariaDB count an offset in a fraction of the time that they take
    /// for window functions.
    async fn read_slice(&self, txn: &Transaction, limit: u64) -> Result<(Vec<Fence>, bool), DbErr> {
        let Table { id, version, .. } = &*self.table;
        let number = fastrand::u64(..SLICES);
        let (due, _) = self.due(&format!("{id}, {version}"), None);
        let sql = format!("{due} OFFSET {}", number.saturating_mul(limit));
        let slice = candidates(&txn.query(sql, vec![integer(limit)]).await?, &self.table);
        if number == 0 || !slice.is_empty() {
            let more = number > 0 || slice.len() as u64 >= limit;
            return Ok((slice, more));
        }
        // The queue is shorter than that.
        let (sql, values) = self.slice(limit);
        let slice = candidates(&txn.query(sql, values).await?, &self.table);
        let more = !slice.is_empty();
        Ok((slice, more))
    }

    /// The query of one slice, cut out by the database: reading the whole head to the client takes longer than the
    /// claim itself.
    fn slice(&self, limit: u64) -> (String, Vec<Value>) {
        let Table { dialect, id, version, available_at, .. } = &*self.table;
        let limit = limit.max(1);
        let slice = fastrand::u64(..SLICES);
        // Of what lies behind the slice nothing need be read.
        let (due, _) = self.due(&format!("{id}, {version}, {available_at}"), None);
        let divide = if *dialect == Dialect::MySql { "DIV" } else { "/" };
        // Where the queue is shorter than that, another slice is taken, of those it has.
        let sql = format!(
            "\
            SELECT {id}, {version}, size FROM (
                SELECT {id}, {version},
                    ROW_NUMBER() OVER (ORDER BY {available_at}, {id}) AS place,
                    COUNT(*) OVER () AS size
                FROM ({due}) AS head
            ) AS placed
            WHERE (place - 1) {divide} $2 = $3 % ((size + $2 - 1) {divide} $2)
            ORDER BY place"
        );
        let end = (slice + 1).saturating_mul(limit);
        (sql, vec![integer(end), integer(limit), integer(slice)])
    }
}
