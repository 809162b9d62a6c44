//! How often, and after what delay, a message is tried again.

use std::time::Duration;

/// How often a message is tried and how long it waits in between.
///
/// The delay after attempt `n` is `initial_delay × 2^(n−1)`, at most `max_delay`, shortened by a random
/// part of at most `jitter`: messages that failed together do not come back together, and no delay
/// exceeds the maximum.
///
/// ```
/// # use std::time::Duration;
/// # use sea_orm_outbox::lifecycle::RetryPolicy;
/// let policy = RetryPolicy::default().with_jitter(0.0);
/// assert_eq!(policy.delay(1, 0.0), Duration::from_secs(1));
/// assert_eq!(policy.delay(4, 0.0), Duration::from_secs(8));
/// assert_eq!(policy.delay(u32::MAX, 0.0), Duration::from_secs(300));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetryPolicy {
    max_attempts: u32,
    initial_delay: Duration,
    max_delay: Duration,
    jitter: f64,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            max_attempts: 5,
            initial_delay: Duration::from_secs(1),
            max_delay: Duration::from_secs(300),
            jitter: 0.2,
        }
    }
}

impl RetryPolicy {
    /// How often a message is tried before it ends `FAILED`, the first time included; 1 to 1,000.
    ///
    /// An attempt is counted when the row is claimed, so that a message that kills its worker runs
    /// out of attempts as well. Default: 5.
    #[must_use]
    pub fn with_max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = attempts;
        self
    }

    /// The delay after the first failure; it doubles with each further one. Default: 1 s.
    #[must_use]
    pub fn with_initial_delay(mut self, delay: Duration) -> Self {
        self.initial_delay = delay;
        self
    }

    /// The longest delay, at most a year. Default: 5 min, so that a backlog drains within minutes
    /// after the fault is gone.
    #[must_use]
    pub fn with_max_delay(mut self, delay: Duration) -> Self {
        self.max_delay = delay;
        self
    }

    /// The part of each delay, 0 to 1, that chance may take away. Default: 0.2.
    #[must_use]
    pub fn with_jitter(mut self, part: f64) -> Self {
        self.jitter = part;
        self
    }

    /// How often a message is tried.
    pub fn max_attempts(&self) -> u32 {
        self.max_attempts
    }

    /// The longest delay.
    pub fn max_delay(&self) -> Duration {
        self.max_delay
    }

    /// Whether `attempts` leaves room for another one.
    pub fn allows_another(&self, attempts: u32) -> bool {
        attempts < self.max_attempts
    }

    /// The delay after attempt number `attempts`, for a `random` number from 0 up to 1.
    ///
    /// Never more than the maximum and never an overflow, whatever the numbers.
    pub fn delay(&self, attempts: u32, random: f64) -> Duration {
        let doubled = 1_u32
            .checked_shl(attempts.saturating_sub(1))
            .and_then(|factor| self.initial_delay.checked_mul(factor))
            .unwrap_or(self.max_delay)
            .min(self.max_delay);
        let part = |number: f64| if number.is_nan() { 0.0 } else { number.clamp(0.0, 1.0) };
        let kept = 1.0 - part(self.jitter) * part(random);
        Duration::try_from_secs_f64(doubled.as_secs_f64() * kept).map_or(doubled, |delay| delay.min(doubled))
    }

    /// The longest time from the first attempt to the last, when each takes so long to be known as failed.
    pub(crate) fn longest(&self, attempt: Duration) -> Duration {
        let backoffs = (1..self.max_attempts).map(|attempts| self.delay(attempts, 0.0));
        backoffs.fold(attempt.saturating_mul(self.max_attempts), Duration::saturating_add)
    }

    /// The first setting that makes no sense, with its value and what it must be.
    pub(crate) fn fault(&self) -> Option<(&'static str, String, &'static str)> {
        const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);
        if !(1..=1_000).contains(&self.max_attempts) {
            return Some(("max_attempts", self.max_attempts.to_string(), "must be from 1 to 1,000"));
        }
        if self.max_delay > YEAR {
            return Some(("max_delay", format!("{:?}", self.max_delay), "must be at most a year"));
        }
        if self.initial_delay > self.max_delay {
            return Some((
                "initial_delay",
                format!("{:?}", self.initial_delay),
                "must not be longer than max_delay",
            ));
        }
        if !(0.0..=1.0).contains(&self.jitter) {
            return Some(("jitter", self.jitter.to_string(), "must be from 0 to 1"));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_up_to_the_maximum_and_stay_there() {
        let policy = RetryPolicy::default();
        let mut last = Duration::ZERO;
        for attempts in 1..=9 {
            // The longest delay of an attempt is shorter than the shortest of the next one.
            assert!(policy.delay(attempts, 0.999) > last, "attempt {attempts}");
            last = policy.delay(attempts, 0.0);
        }
        for attempts in 10..10_000 {
            assert!(policy.delay(attempts, 0.0) <= policy.max_delay());
            assert!(policy.delay(attempts, 0.5) >= Duration::from_secs(240));
        }
    }

    #[test]
    fn no_number_overflows() {
        for attempts in [0, 1, 31, 32, 33, 64, u32::MAX] {
            for random in [f64::NEG_INFINITY, -1.0, 0.0, 0.5, 1.0, 2.0, f64::INFINITY, f64::NAN] {
                for max in [Duration::ZERO, Duration::from_secs(1), Duration::MAX] {
                    let policy = RetryPolicy::default()
                        .with_initial_delay(Duration::MAX)
                        .with_max_delay(max)
                        .with_jitter(random);
                    assert!(policy.delay(attempts, random) <= max);
                }
            }
        }
    }

    #[test]
    fn a_setting_without_sense_is_named() {
        let fault = |policy: RetryPolicy| policy.fault().map(|(setting, ..)| setting);
        let policy = RetryPolicy::default();
        assert_eq!(fault(policy), None);
        assert_eq!(fault(policy.with_max_attempts(0)), Some("max_attempts"));
        assert_eq!(fault(policy.with_max_delay(Duration::MAX)), Some("max_delay"));
        assert_eq!(fault(policy.with_initial_delay(Duration::from_secs(301))), Some("initial_delay"));
        assert_eq!(fault(policy.with_jitter(f64::NAN)), Some("jitter"));
        assert_eq!(fault(policy.with_jitter(1.1)), Some("jitter"));
    }
}
