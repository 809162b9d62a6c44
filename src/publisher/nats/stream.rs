//! Whether the streams are what the promises rest on.

use std::{collections::BTreeMap, time::Duration};

use async_nats::jetstream::{
    self,
    context::{GetStreamByNameErrorKind, GetStreamErrorKind},
    stream,
};

use crate::publisher::PublishError;

/// More topics than this are not looked at.
const MOST_TOPICS: usize = 100;

/// What is wrong with the streams that take these subjects, each with what to do.
pub(super) async fn faults(
    context: &jetstream::Context,
    topics: &[String],
    expected: Option<&str>,
    repeats_within: Duration,
) -> Result<Vec<String>, PublishError> {
    let mut faults = Vec::new();
    // Each stream, with one of the subjects for which it is needed.
    let mut streams: BTreeMap<String, Option<&str>> = BTreeMap::new();
    streams.extend(expected.map(|name| (name.to_owned(), None)));
    for topic in topics.iter().take(MOST_TOPICS) {
        match context.stream_by_subject(topic.as_str()).await {
            Ok(name) => {
                if let Some(expected) = expected.filter(|expected| *expected != name) {
                    faults.push(format!(
                        "the subject {topic:?} is taken by the stream {name}, and {expected} is expected"
                    ));
                }
                streams.entry(name).or_insert(Some(topic));
            }
            Err(error) if error.kind() == GetStreamByNameErrorKind::NotFound => {
                faults.push(super::jetstream::no_stream_takes(topic));
            }
            Err(error) => return Err(silent(&error)),
        }
    }
    for name in streams.keys() {
        match context.get_stream(name).await {
            Ok(stream) => faults.extend(faults_of(&stream.cached_info().config, repeats_within)),
            Err(error) if is_missing(&error) => {
                faults.push(format!("the stream {name} does not exist: `nats stream add {name}` makes it"));
            }
            Err(error) => return Err(silent(&error)),
        }
    }
    Ok(faults)
}

fn faults_of(config: &stream::Config, repeats_within: Duration) -> Vec<String> {
    let (name, mut faults) = (&config.name, Vec::new());
    if config.no_ack {
        faults.push(format!(
            "the stream {name} acknowledges nothing, so that no message ever counts as sent: make it without `--no-ack`"
        ));
    }
    if config.duplicate_window < repeats_within {
        faults.push(format!(
            "the stream {name} drops repeats within {:?}, and the last attempt may come {repeats_within:?} after the first: \
             `nats stream edit {name} --dupe-window {}s`, or let consumers drop them",
            config.duplicate_window,
            repeats_within.as_secs_f64().ceil(),
        ));
    }
    faults
}

/// Creates a stream, or finds that the one with its name is as good. An existing stream is never changed.
pub(super) async fn ensure(context: &jetstream::Context, wanted: stream::Config) -> Result<(), PublishError> {
    let name = wanted.name.clone();
    let existing = match context.get_stream(&name).await {
        Ok(stream) => stream.cached_info().config.clone(),
        Err(error) if is_missing(&error) => {
            return match context.create_stream(wanted).await {
                Ok(_) => Ok(()),
                Err(error) => {
                    Err(PublishError::configuration(format!("the stream {name} cannot be created: {error}"))
                        .with_source(error))
                }
            };
        }
        Err(error) => return Err(silent(&error)),
    };
    let mut differences = Vec::new();
    let missing: Vec<&String> =
        wanted.subjects.iter().filter(|subject| !existing.subjects.contains(subject)).collect();
    if !missing.is_empty() {
        differences.push(format!("it does not take {missing:?}, only {:?}", existing.subjects));
    }
    if existing.duplicate_window < wanted.duplicate_window {
        differences.push(format!(
            "it drops repeats within {:?}, not {:?}",
            existing.duplicate_window, wanted.duplicate_window
        ));
    }
    if existing.no_ack && !wanted.no_ack {
        differences.push("it acknowledges nothing".to_owned());
    }
    if differences.is_empty() {
        return Ok(());
    }
    Err(PublishError::configuration(format!(
        "the stream {name} exists, and was not changed: {}; `nats stream edit {name}` changes it",
        differences.join("; ")
    )))
}

fn is_missing(error: &jetstream::context::GetStreamError) -> bool {
    match error.kind() {
        GetStreamErrorKind::JetStream(answer) => {
            answer.error_code() == jetstream::ErrorCode::STREAM_NOT_FOUND
        }
        _ => false,
    }
}

fn silent(error: &dyn std::error::Error) -> PublishError {
    PublishError::unavailable(format!("JetStream does not say which streams there are: {error}"))
}
