//! Topics whose destination is not set up.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

/// More topics than this are not remembered; their messages are tried one by one.
const MAX_TOPICS: usize = 10_000;

/// Topics that rest, each with the reason and until when.
#[derive(Debug, Default)]
pub(super) struct Resting {
    topics: HashMap<String, (Instant, String)>,
}

impl Resting {
    /// A publish found that the topic has no destination.
    pub(super) fn rest(&mut self, topic: &str, reason: &str, rest: Duration) {
        let now = Instant::now();
        let known = self.topics.contains_key(topic);
        if !known {
            tracing::warn!(topic, reason, ?rest, "the topic rests");
            if self.topics.len() >= MAX_TOPICS {
                self.topics.retain(|_, (until, _)| *until > now);
            }
            if self.topics.len() >= MAX_TOPICS {
                return;
            }
        }
        self.topics.insert(topic.to_owned(), (now + rest, reason.to_owned()));
    }

    /// A publish was acknowledged.
    pub(super) fn wake(&mut self, topic: &str) {
        if !self.topics.is_empty() && self.topics.remove(topic).is_some() {
            tracing::info!(topic, "the topic goes on");
        }
    }

    /// For how long and why the topic still rests.
    pub(super) fn remaining(&self, topic: &str) -> Option<(Duration, &str)> {
        let (until, reason) = self.topics.get(topic)?;
        let remaining = until.saturating_duration_since(Instant::now());
        (!remaining.is_zero()).then_some((remaining, reason))
    }
}
