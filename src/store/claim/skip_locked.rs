//! One statement per batch that passes over rows which somebody else is claiming.

use super::{ClaimRequest, Trust, candidates, claim_set, integer, lock, milliseconds};
use crate::store::{Claimed, Position, Store, StoreError, claimed, dialect::Dialect, table::Table};

impl Store {
    pub(super) async fn claim_skip_locked(&self, request: &ClaimRequest<'_>) -> Result<Claimed, StoreError> {
        let table = &*self.table;
        let Table { name, id, version, .. } = table;
        let trust = Trust::begin(request.lease);
        if table.dialect == Dialect::MySql {
            return self.claim_locked(request, trust).await;
        }
        let (due, after) = self.due(&format!("{id}, {version}"), request.after);
        let mut values = vec![integer(request.limit)];
        values.extend(after);
        let set = claim_set(table, values.len() + 1);
        let columns = claimed::columns(table, request.inline_bytes);
        values.extend([request.claimed_by.into(), milliseconds(request.lease)]);
        let sql = match table.dialect {
            // MATERIALIZED: a bare subquery may be run more than once and lock more rows than asked for.
            Dialect::Postgres => format!(
                "\
                WITH due AS MATERIALIZED ({due} FOR UPDATE SKIP LOCKED)
                UPDATE {name} o SET {set}
                FROM due
                WHERE o.{id} = due.{id} AND o.{version} = due.{version}
                RETURNING {columns}"
            ),
            _ => format!(
                "\
                UPDATE {name} AS o SET {set}
                WHERE (o.{id}, o.{version}) IN ({due})
                RETURNING {columns}"
            ),
        };
        let rows = self.run("claim", sql, values).await?;
        let mut claimed = Claimed::read(&rows, table, trust)?;
        if claimed.len() as u64 >= request.limit {
            claimed.more = true;
            claimed.next = claimed.last.take();
        }
        Ok(claimed)
    }

    /// On MySQL and MariaDB: looks at a window of rows that are due and locks them by the primary key. MariaDB, told to
    /// lock rows while it walks the due index, locks the entries of the index too, and waits for whoever is settling a
    /// row, who soon waits for its entry: a deadlock.
    async fn claim_locked(&self, request: &ClaimRequest<'_>, trust: Trust) -> Result<Claimed, StoreError> {
        let table = &*self.table;
        let Table { id, version, .. } = table;
        let time = Position::output(table, "");
        let (due, after) = self.due(&format!("{id}, {version}, {time}"), request.after);
        let size = request.limit.saturating_mul(WINDOW);
        let values = std::iter::once(integer(size)).chain(after).collect();
        let work = async {
            let txn = self.begin().await?;
            let due = txn.query(due, values).await?;
            let locked = lock(&txn, table, request.limit, &candidates(&due, table)).await?;
            let rows = self.win(txn, &locked, request).await?;
            Ok((rows, due))
        };
        let (rows, due) = self.timed("claim", work).await?;
        let mut claimed = Claimed::read(&rows, table, trust)?;
        let more = due.len() as u64 >= size;
        if claimed.len() as u64 >= request.limit {
            claimed.more = true;
            claimed.next = claimed.last.take();
        } else if more {
            // Others have the rest of the window.
            claimed.more = true;
            claimed.next = due.last().and_then(|row| Position::read(row, 2, 0, table).ok());
        }
        Ok(claimed)
    }
}

/// How many batches are looked at on MySQL and MariaDB, where other relays may have locked the first ones.
const WINDOW: u64 = 4;
