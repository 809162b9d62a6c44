//! Given a claim, what became of it and the policy: which arrow?

use std::time::Duration;

use super::{Arrow, RetryPolicy};

/// The most that `last_error` keeps, in characters.
const MAX_ERROR_CHARS: usize = 2_000;

/// How the error of a row begins that a sweep returned.
///
/// With two attempts spent such a row is a *suspect*: its workers may have died of it.
pub(crate) const EXPIRED: &str = "claim expired";

/// What became of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The broker has it, or had it already.
    Acknowledged,
    /// It failed in a way that another try may mend.
    Transient(String),
    /// It can never succeed: too large, refused for its form, not readable.
    Permanent(String),
    /// It is not the message's fault, and trying at once would not help: its destination is not set up, say.
    /// It is put off, and no attempt is spent.
    Postponed {
        /// What it waits for.
        reason: String,
        /// For how long.
        delay: Duration,
    },
    /// It was not used: shutdown, or the broker is away. No attempt is spent.
    Unused,
}

/// A change of a claimed row, ready to be written under its guard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transition {
    arrow: Arrow,
    delay: Option<Duration>,
    error: Option<String>,
}

impl Transition {
    /// Which change it is; the guard hangs on it.
    pub fn arrow(&self) -> Arrow {
        self.arrow
    }

    /// How long from now the row is put off. `None` leaves its due time as it was.
    pub fn delay(&self) -> Option<Duration> {
        self.delay
    }

    /// What `last_error` becomes. `None` leaves what it says.
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// Whether the attempt that the claim counted is given back.
    pub fn refunds_attempt(&self) -> bool {
        self.arrow == Arrow::Release
    }

    fn new(arrow: Arrow, delay: Option<Duration>, error: Option<String>) -> Self {
        Self { arrow, delay, error: error.map(|text| storable(&text)) }
    }
}

/// How a claim is settled that counted as attempt number `attempts`.
///
/// `random`, from 0 up to 1, is the chance in the backoff.
///
/// ```
/// use sea_orm_outbox::lifecycle::{Arrow, Outcome, RetryPolicy, settle};
///
/// let policy = RetryPolicy::default();
/// let failed = || Outcome::Transient("no answer".to_owned());
/// assert_eq!(settle(4, failed(), &policy, 0.0).arrow(), Arrow::Retry);
/// assert_eq!(settle(5, failed(), &policy, 0.0).arrow(), Arrow::Fail);
/// ```
pub fn settle(attempts: u32, outcome: Outcome, policy: &RetryPolicy, random: f64) -> Transition {
    match outcome {
        Outcome::Acknowledged => Transition::new(Arrow::Acknowledge, None, None),
        Outcome::Transient(error) if policy.allows_another(attempts) => {
            Transition::new(Arrow::Retry, Some(policy.delay(attempts, random)), Some(error))
        }
        Outcome::Transient(error) | Outcome::Permanent(error) => {
            Transition::new(Arrow::Fail, None, Some(error))
        }
        Outcome::Postponed { reason, delay } => Transition::new(Arrow::Release, Some(delay), Some(reason)),
        Outcome::Unused => Transition::new(Arrow::Release, None, None),
    }
}

/// What a sweep does with a claim whose lease is over.
///
/// `claimed_by` goes into the error, for the person who asks which worker it was.
pub fn sweep(attempts: u32, claimed_by: &str, policy: &RetryPolicy) -> Transition {
    if policy.allows_another(attempts) {
        let error = format!("{EXPIRED}: {claimed_by} did not settle attempt {attempts} in time");
        Transition::new(Arrow::Return, None, Some(error))
    } else {
        let error =
            format!("abandoned: {claimed_by} did not settle attempt {attempts} in time, and it was the last");
        Transition::new(Arrow::Bury, None, Some(error))
    }
}

/// A text that every database takes: no NUL, not too long.
fn storable(text: &str) -> String {
    text.chars().filter(|c| *c != '\0').take(MAX_ERROR_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: fn() -> RetryPolicy = RetryPolicy::default;

    #[test]
    fn an_acknowledged_message_is_sent_whatever_its_attempts() {
        for attempts in [1, 5, 6, u32::MAX] {
            let transition = settle(attempts, Outcome::Acknowledged, &POLICY(), 0.0);
            assert_eq!(transition, Transition::new(Arrow::Acknowledge, None, None));
        }
    }

    #[test]
    fn a_transient_error_is_tried_again_until_the_attempts_are_spent() {
        for attempts in 1..5 {
            let transition = settle(attempts, Outcome::Transient("x".into()), &POLICY(), 0.0);
            assert_eq!(transition.arrow(), Arrow::Retry);
            assert_eq!(transition.delay(), Some(POLICY().delay(attempts, 0.0)));
            assert_eq!(transition.error(), Some("x"));
        }
        let transition = settle(5, Outcome::Transient("x".into()), &POLICY(), 0.0);
        assert_eq!(transition, Transition::new(Arrow::Fail, None, Some("x".into())));
    }

    #[test]
    fn a_permanent_error_fails_at_once() {
        assert_eq!(settle(1, Outcome::Permanent("x".into()), &POLICY(), 0.0).arrow(), Arrow::Fail);
    }

    #[test]
    fn only_a_release_refunds_the_attempt() {
        let delay = Duration::from_secs(30);
        for attempts in [1, 5] {
            let unused = settle(attempts, Outcome::Unused, &POLICY(), 0.0);
            assert_eq!(unused, Transition::new(Arrow::Release, None, None));
            assert!(unused.refunds_attempt());
            let postponed = Outcome::Postponed { reason: "x".into(), delay };
            let postponed = settle(attempts, postponed, &POLICY(), 0.0);
            assert_eq!(postponed, Transition::new(Arrow::Release, Some(delay), Some("x".into())));
        }
        assert!(!settle(1, Outcome::Transient("x".into()), &POLICY(), 0.0).refunds_attempt());
    }

    #[test]
    fn a_sweep_returns_a_row_and_buries_it_when_its_attempts_are_spent() {
        let returned = sweep(4, "a:1", &POLICY());
        assert_eq!(returned.arrow(), Arrow::Return);
        assert!(returned.error().unwrap_or_default().starts_with(EXPIRED));
        let buried = sweep(5, "a:1", &POLICY());
        assert_eq!(buried.arrow(), Arrow::Bury);
        assert!(buried.error().unwrap_or_default().starts_with("abandoned"));
    }

    #[test]
    fn an_error_is_cut_to_what_every_database_takes() {
        let error = format!("a\0b{}", "ü".repeat(3_000));
        let transition = settle(1, Outcome::Permanent(error), &POLICY(), 0.0);
        let stored = transition.error().unwrap_or_default();
        assert!(stored.starts_with("abü"));
        assert_eq!(stored.chars().count(), MAX_ERROR_CHARS);
    }
}
