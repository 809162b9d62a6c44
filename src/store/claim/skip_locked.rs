//! One statement per batch that passes over rows which somebody else is claiming.

use super::{ClaimRequest, Trust, claim_set, integer, milliseconds, win};
use crate::store::{Claimed, Fence, Store, StoreError, claimed, dialect::Dialect, table::Table};

impl Store {
    pub(super) async fn claim_skip_locked(&self, request: &ClaimRequest<'_>) -> Result<Claimed, StoreError> {
        let table = &*self.table;
        let Table { name, id, version, .. } = table;
        let (due, after) = self.due(&format!("{id}, {version}"), request.after);
        let mut values = vec![integer(request.limit)];
        values.extend(after);
        let set = claim_set(table, values.len() + 1);
        let columns = claimed::columns(table, request.inline_bytes);
        let trust = Trust::begin(request.lease);
        let rows = match table.dialect {
            Dialect::MySql => {
                let work = async {
                    let txn = self.begin().await?;
                    let due = txn.query(format!("{due} FOR UPDATE SKIP LOCKED"), values).await?;
                    let due = due.iter().map(|row| Fence::read(row, table)).collect::<Result<Vec<_>, _>>()?;
                    let rows = win(&txn, table, &due, request).await?;
                    txn.commit().await?;
                    Ok(rows)
                };
                self.timed("claim", work).await?
            }
            Dialect::Postgres | Dialect::Sqlite => {
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
                self.run("claim", sql, values).await?
            }
        };
        let mut claimed = Claimed::read(&rows, table, trust)?;
        if claimed.len() as u64 >= request.limit {
            claimed.more = true;
            claimed.next = claimed.last.take();
        }
        Ok(claimed)
    }
}
