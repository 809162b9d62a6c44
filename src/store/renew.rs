//! Renew: extend leases while publishes are in flight.

use std::time::Duration;

use super::{
    Fence, Lost, Store, StoreError,
    claim::milliseconds,
    fenced::{Verb, Write},
};

impl Store {
    /// Makes the leases of claims end `lease` from now, by the database's clock. The versions stay.
    ///
    /// A lost claim belongs to somebody else: whoever held it must not publish it any more.
    ///
    /// # Errors
    /// When the database does not carry it out.
    pub async fn renew(&self, claims: &[Fence], lease: Duration) -> Result<Lost, StoreError> {
        let table = &self.table;
        let until = table.dialect.clock_plus_ms(&milliseconds(lease).to_string());
        let write = Write {
            what: "renew leases",
            verb: Verb::Update { set: vec![(table.lease_until.clone(), until)], raises_version: false },
            guard: None,
            skip_locked: false,
            given: &[],
        };
        self.write(&write, claims.iter().map(|fence| (*fence, [])).collect()).await.map(Lost)
    }
}
