//! Whether a stream has had the same leader all the while.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use async_nats::jetstream::{self, stream::ClusterInfo};
use tokio::time::Instant;

/// The leaders of replicated streams, as they were seen.
#[derive(Debug, Default)]
pub(super) struct Elections {
    seen: Mutex<HashMap<String, Seen>>,
}

#[derive(Debug)]
struct Seen {
    /// Who leads, and since when by its own clock: another election is another pair. Servers before 2.12 tell only
    /// who.
    leader: (Option<String>, Option<String>),
    /// When it was seen first.
    at: Instant,
}

impl Elections {
    /// Asks who leads the stream. Whether that is known to be who led it at that time; if not, what had been sent to
    /// the one before may be lost.
    pub(super) async fn none_since(
        &self,
        context: &jetstream::Context,
        stream: &str,
        time: Instant,
    ) -> Result<bool, jetstream::context::GetStreamError> {
        let found = context.get_stream(stream).await?;
        Ok(match &found.cached_info().cluster {
            Some(cluster) if !cluster.replicas.is_empty() => self.saw(stream, cluster, time),
            // It has one server only. If that dies its connections do.
            _ => true,
        })
    }

    fn saw(&self, stream: &str, cluster: &ClusterInfo, time: Instant) -> bool {
        let since = cluster.leader_since.as_ref().map(|since| format!("{since:?}"));
        let leader = (cluster.leader.clone(), since);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        match seen.get(stream) {
            Some(seen) if seen.leader == leader => seen.at <= time,
            _ => {
                seen.insert(stream.to_owned(), Seen { leader, at: Instant::now() });
                false
            }
        }
    }
}
