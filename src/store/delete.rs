//! The three ways in which a row goes: discarded, cancelled, retired.

use super::{
    Fence, Lost, Store, StoreError,
    fenced::{Verb, Write},
    table::{Table, literal},
};
use crate::lifecycle::Arrow;

impl Store {
    /// Deletes `FAILED` rows for good. For a person who has seen the error.
    ///
    /// Rows that are not `FAILED`, or were changed meanwhile, are reported as lost.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn discard(&self, rows: &[Fence]) -> Result<Lost, StoreError> {
        self.delete(Arrow::Discard, rows).await
    }

    /// Deletes `PENDING` rows: the application takes its messages back.
    ///
    /// Rows that are not `PENDING`, or were changed meanwhile, are reported as lost: a relay has them.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn cancel(&self, rows: &[Fence]) -> Result<Lost, StoreError> {
        self.delete(Arrow::Cancel, rows).await
    }

    /// Deletes `SENT` rows that nobody needs any more.
    ///
    /// Rows that are not `SENT`, or were changed meanwhile, are reported as lost.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn retire(&self, rows: &[Fence]) -> Result<Lost, StoreError> {
        self.delete(Arrow::Retire, rows).await
    }

    async fn delete(&self, arrow: Arrow, rows: &[Fence]) -> Result<Lost, StoreError> {
        let Table { roles, status, .. } = &*self.table;
        let write = Write {
            what: "delete rows",
            verb: Verb::Delete,
            // The fences may come from anywhere: here the status is asked for as well.
            guard: Some(format!("o.{status} = {}", literal(roles.status_text(arrow.from())))),
            skip_locked: false,
            given: &[],
        };
        self.write(&write, rows.iter().map(|fence| (*fence, [])).collect()).await.map(Lost)
    }
}
