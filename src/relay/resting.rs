//! Topics whose destination is not set up.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

/// More topics than this are not remembered; their messages are tried one by one.
const MAX_TOPICS: usize = 10_000;

/// How long a topic rests at first. What looks like a missing destination may be an election of a stream's leader.
const FIRST_REST: Duration = Duration::from_millis(500);

/// Topics that rest.
#[derive(Debug, Default)]
pub(super) struct Resting {
    topics: HashMap<String, Rest>,
}

#[derive(Debug)]
struct Rest {
    until: Instant,
    /// Each one is twice as long as the one before.
    length: Duration,
    reason: String,
}

impl Resting {
    /// A publish found that the topic has no destination: how long it rests, `longest` at most.
    pub(super) fn rest(&mut self, topic: &str, reason: &str, longest: Duration) -> Duration {
        let now = Instant::now();
        let length = match self.topics.get(topic) {
            None => FIRST_REST.min(longest),
            // Those that were in flight together fail together, and count as one.
            Some(rest) if now < rest.until => return rest.until - now,
            Some(rest) => (rest.length * 2).min(longest),
        };
        if !self.topics.contains_key(topic) {
            tracing::warn!(topic, reason, "the topic rests");
            if self.topics.len() >= MAX_TOPICS {
                self.topics.retain(|_, rest| rest.until > now);
            }
            if self.topics.len() >= MAX_TOPICS {
                return longest;
            }
        }
        let rest = Rest { until: now + length, length, reason: reason.to_owned() };
        self.topics.insert(topic.to_owned(), rest);
        length
    }

    /// A publish was acknowledged.
    pub(super) fn wake(&mut self, topic: &str) {
        if !self.topics.is_empty() && self.topics.remove(topic).is_some() {
            tracing::info!(topic, "the topic goes on");
        }
    }

    /// For how long and why the topic still rests.
    pub(super) fn remaining(&self, topic: &str) -> Option<(Duration, &str)> {
        let rest = self.topics.get(topic)?;
        let remaining = rest.until.saturating_duration_since(Instant::now());
        (!remaining.is_zero()).then_some((remaining, rest.reason.as_str()))
    }
}
