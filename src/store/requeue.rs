//! Requeue: give dead letters another life.

use super::{Fence, Lost, Store, StoreError, dialect::Verb};
use crate::lifecycle::{Arrow, Status};

impl Store {
    /// Returns `FAILED` rows to `PENDING`, due at once, with all their attempts; the last error stays
    /// readable and `requeues` rises.
    ///
    /// Rows that are not `FAILED`, or were changed meanwhile, are reported as lost.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn requeue(&self, rows: &[Fence]) -> Result<Lost, StoreError> {
        if rows.is_empty() {
            return Ok(Lost::default());
        }
        let set = format!(
            "\
            version = o.version + 1,
            status = '{}',
            attempts = 0,
            requeues = o.requeues + 1,
            available_at = {},
            failed_at = NULL",
            Status::Pending.as_str(),
            self.dialect.clock(),
        );
        // The fences may come from anywhere: here the status is asked for as well.
        let guard = format!("o.status = '{}'", Arrow::Requeue.from().as_str());
        let verb = Verb::Update { set: &set, guard: Some(&guard), raises_version: true, skip_locked: false };
        let sql = self.dialect.fenced(verb, &[]);
        let values = self.dialect.given_values(rows.iter().map(|fence| (*fence, [])));
        self.write("requeue", sql, values, rows).await.map(Lost)
    }
}
