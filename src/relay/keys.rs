//! Keeps one message of each ordering key in flight.

use std::collections::{HashMap, VecDeque};

use crate::store::Claim;

/// The keys that have a message in flight, each with the messages that wait behind it.
#[derive(Debug, Default)]
pub(super) struct Keys(HashMap<String, VecDeque<Claim>>);

impl Keys {
    /// The claim, if none of its key is in flight; it is from now on. Otherwise it waits behind the others.
    pub(super) fn admit(&mut self, claim: Claim) -> Option<Claim> {
        let Some(key) = claim.message().ordering_key() else { return Some(claim) };
        if let Some(waiting) = self.0.get_mut(key) {
            waiting.push_back(claim);
            return None;
        }
        self.0.insert(key.to_owned(), VecDeque::new());
        Some(claim)
    }

    /// The one in flight is through: the next of its key, which is in flight from now on.
    pub(super) fn next(&mut self, key: &str) -> Option<Claim> {
        let next = self.0.get_mut(key)?.pop_front();
        if next.is_none() {
            self.0.remove(key);
        }
        next
    }

    /// The one in flight is unfinished, and none may follow it: those that wait.
    pub(super) fn cut(&mut self, key: &str) -> VecDeque<Claim> {
        self.0.remove(key).unwrap_or_default()
    }
}
