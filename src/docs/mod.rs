//! The guides.

#[doc = include_str!("guarantees.md")]
pub mod guarantees {}

#[doc = include_str!("lifecycle.md")]
pub mod lifecycle {}

#[doc = include_str!("operations.md")]
pub mod operations {}

#[doc = include_str!("testing.md")]
pub mod testing {}

/// The examples of the README compile.
#[cfg(all(doctest, feature = "nats"))]
#[doc = include_str!("../../README.md")]
mod readme {}
