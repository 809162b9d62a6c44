//! Requeue: give dead letters another life.

use super::{
    Fence, Lost, Store, StoreError,
    fenced::{Verb, Write},
    table::Table,
};

impl Store {
    /// Returns `FAILED` rows to `PENDING`, due at once, with all their attempts; the last error stays
    /// readable and `requeues` rises.
    ///
    /// Rows that are not `FAILED`, or were changed meanwhile, are reported as lost.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn requeue(&self, rows: &[Fence]) -> Result<Lost, StoreError> {
        let Table { dialect, roles, status, version, attempts, available_at, pending, failed, .. } =
            &*self.table;
        let mut set = vec![
            (version.clone(), format!("o.{version} + 1")),
            (status.clone(), pending.clone()),
            (attempts.clone(), "0".to_owned()),
            (available_at.clone(), dialect.clock()),
        ];
        if let Some(requeues) = self.table.optional(&roles.requeues) {
            set.push((requeues.clone(), format!("o.{requeues} + 1")));
        }
        if let Some(failed_at) = self.table.optional(&roles.failed_at) {
            set.push((failed_at, "NULL".to_owned()));
        }
        let write = Write {
            what: "requeue",
            verb: Verb::Update { set, raises_version: true },
            // The fences may come from anywhere: here the status is asked for as well.
            guard: Some(format!("o.{status} = {failed}")),
            skip_locked: false,
            given: &[],
        };
        self.write(&write, rows.iter().map(|fence| (*fence, [])).collect()).await.map(Lost)
    }
}
