//! Renew: extend leases while publishes are in flight.

use std::time::Duration;

use super::{Fence, Lost, Store, StoreError, dialect::Verb};

impl Store {
    /// Makes the leases of claims end `lease` from now, by the database's clock. The versions stay.
    ///
    /// A lost claim belongs to somebody else: whoever held it must not publish it any more.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn renew(&self, claims: &[Fence], lease: Duration) -> Result<Lost, StoreError> {
        if claims.is_empty() {
            return Ok(Lost::default());
        }
        let set = format!("lease_until = {}", self.dialect.clock_plus_ms(&lease.as_millis().to_string()));
        let verb = Verb::Update { set: &set, guard: None, raises_version: false, skip_locked: false };
        let sql = self.dialect.fenced(verb, &[]);
        let values = self.dialect.given_values(claims.iter().map(|fence| (*fence, [])));
        self.write("renew leases", sql, values, claims).await.map(Lost)
    }
}
