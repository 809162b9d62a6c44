//! Whether the destination is what the promises rest on, looked at when a relay starts.

use std::{sync::Arc, time::Duration};

use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{
    RelayError, Shared,
    builder::Settings,
    health::{Duty, Vitals},
    pace,
};
use crate::{
    publisher::{PublishError, Publisher},
    store::Store,
};

/// What a relay does when it finds at its start that the destination is not set up as the promises ask for: no stream
/// takes a subject in use, or repeats would not be dropped for as long as they can come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DestinationCheck {
    /// It warns, with what to do, and goes on. The default.
    #[default]
    Warn,
    /// It does not start, and [`RelayError::Destination`](crate::RelayError::Destination) says why.
    Refuse,
    /// It does not look.
    Skip,
}

/// How many topics of waiting messages are looked at.
const TOPICS: u64 = 100;

/// How long the broker may take to say what it has.
const LIMIT: Duration = Duration::from_secs(30);

/// What is wrong, or that it cannot be found out now.
pub(super) async fn faults<P: Publisher>(
    store: &Store,
    publisher: &P,
    settings: &Settings,
    stop: &CancellationToken,
) -> Result<Vec<String>, String> {
    let topics = store.topics(TOPICS).await.map_err(|error| error.to_string())?;
    let attempt = settings.lease + settings.sweep_every + settings.publish_timeout;
    let asked = timeout(LIMIT, publisher.check(&topics, settings.retry.longest(attempt)));
    let Some(asked) = stop.run_until_cancelled(asked).await else {
        return Err("told to stop".to_owned());
    };
    let answer =
        asked.unwrap_or_else(|_| Err(PublishError::unavailable(format!("no answer within {LIMIT:?}"))));
    answer.map_err(|error| error.to_string())
}

/// How often a connection that is down is looked at again.
const LOOK: Duration = Duration::from_millis(200);

/// How often the broker is asked that is there and does not say.
const TRIES: u32 = 5;

/// Looks when the broker is there, and warns.
pub(super) async fn warn<P: Publisher>(shared: Arc<Shared<P>>) {
    let mut failures = 0;
    while failures < TRIES {
        failures += 1;
        while !shared.publisher.is_connected() {
            if shared.stop.token.run_until_cancelled(sleep(LOOK)).await.is_none() {
                return;
            }
        }
        match faults(&shared.store, &shared.publisher, &shared.settings, &shared.stop.token).await {
            Ok(faults) => {
                for fault in faults {
                    tracing::warn!(fault, "the destination is not set up as the promises ask for");
                }
                return;
            }
            Err(error) if failures == TRIES => tracing::warn!(error, "the destination cannot be looked at"),
            Err(error) => tracing::debug!(error, "the destination cannot be looked at now"),
        }
        if shared
            .stop
            .token
            .run_until_cancelled(sleep(pace().delay(failures, fastrand::f64())))
            .await
            .is_none()
        {
            return;
        }
    }
}

/// Waits until the broker has said what is wrong with the destination, which is an error; `false` when told to stop
/// first.
pub(super) async fn refuse<P: Publisher>(
    store: &Store,
    publisher: &P,
    settings: &Settings,
    vitals: &Vitals,
    stop: &CancellationToken,
) -> Result<bool, RelayError> {
    for failures in 1.. {
        match faults(store, publisher, settings, stop).await {
            Ok(faults) if faults.is_empty() => break,
            Ok(faults) => return Err(RelayError::Destination(faults.into())),
            Err(error) => {
                if failures == 1 {
                    tracing::warn!(error, "waiting until the destination can be looked at");
                }
                vitals.note(Duty::Publish, false);
            }
        }
        let pause = sleep(pace().delay(failures, fastrand::f64()));
        if stop.run_until_cancelled(pause).await.is_none() {
            return Ok(false);
        }
    }
    vitals.note(Duty::Publish, true);
    Ok(true)
}
