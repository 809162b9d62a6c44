//! What the benchmarks have in common.

pub(crate) mod servers;

use std::{error::Error, time::Duration};

use serde::Serialize;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The size of every message.
pub(crate) const PAYLOAD: usize = 512;

pub(crate) fn rate(messages: u64, elapsed: Duration) -> f64 {
    messages as f64 / elapsed.as_secs_f64()
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// To three places.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// One object on a line of its own.
pub(crate) fn print_json(figure: &impl Serialize) -> Result<()> {
    println!("{}", serde_json::to_string(figure)?);
    Ok(())
}
