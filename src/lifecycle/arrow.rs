//! Which changes of a row there are, and what each one demands of the row.

use super::Status;

/// A change of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Arrow {
    /// `PENDING → PROCESSING`: a relay wins the row; the attempt is counted now.
    Claim,
    /// `PROCESSING → SENT`: the broker acknowledged.
    Acknowledge,
    /// `PROCESSING → PENDING`: it failed and will be tried again later.
    Retry,
    /// `PROCESSING → FAILED`: it failed for good, or for the last time.
    Fail,
    /// `PROCESSING → PENDING`: given back unused, the attempt refunded.
    Release,
    /// `PROCESSING → PROCESSING`: the lease is extended; the version stays.
    Renew,
    /// `PROCESSING → PENDING`: the lease is over and attempts are left.
    Return,
    /// `PROCESSING → FAILED`: the lease is over and the attempts are spent.
    Bury,
    /// `FAILED → PENDING`: a person wants it tried again.
    Requeue,
    /// `FAILED → gone`: a person gives it up.
    Discard,
    /// `PENDING → gone`: the application takes it back.
    Cancel,
    /// `SENT → gone`: old enough to be deleted.
    Retire,
}

/// What a row must still look like for a change to happen. Otherwise the change is *lost*.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Guard {
    /// The version is the one that was read.
    ///
    /// This is enough to know the status as well, because every change of status raises the version.
    Version,
    /// The version is the one that was read, **and** the lease is over.
    ///
    /// A renewal keeps the version, so the version alone would let a sweep take a claim that was
    /// renewed after the sweep had read it.
    VersionAndLeaseOver,
}

impl Arrow {
    /// All of them.
    pub const ALL: [Arrow; 12] = [
        Arrow::Claim,
        Arrow::Acknowledge,
        Arrow::Retry,
        Arrow::Fail,
        Arrow::Release,
        Arrow::Renew,
        Arrow::Return,
        Arrow::Bury,
        Arrow::Requeue,
        Arrow::Discard,
        Arrow::Cancel,
        Arrow::Retire,
    ];

    /// The status that it starts from.
    pub const fn from(self) -> Status {
        match self {
            Arrow::Claim | Arrow::Cancel => Status::Pending,
            Arrow::Acknowledge
            | Arrow::Retry
            | Arrow::Fail
            | Arrow::Release
            | Arrow::Renew
            | Arrow::Return
            | Arrow::Bury => Status::Processing,
            Arrow::Requeue | Arrow::Discard => Status::Failed,
            Arrow::Retire => Status::Sent,
        }
    }

    /// The status that it leads to; `None` when the row is deleted.
    pub const fn to(self) -> Option<Status> {
        match self {
            Arrow::Claim | Arrow::Renew => Some(Status::Processing),
            Arrow::Acknowledge => Some(Status::Sent),
            Arrow::Fail | Arrow::Bury => Some(Status::Failed),
            Arrow::Retry | Arrow::Release | Arrow::Return | Arrow::Requeue => Some(Status::Pending),
            Arrow::Discard | Arrow::Cancel | Arrow::Retire => None,
        }
    }

    /// What the row must still look like.
    pub const fn guard(self) -> Guard {
        match self {
            Arrow::Return | Arrow::Bury => Guard::VersionAndLeaseOver,
            _ => Guard::Version,
        }
    }

    /// Whether the version rises. Only a renewal leaves it.
    pub const fn raises_version(self) -> bool {
        !matches!(self, Arrow::Renew)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_of_status_raises_the_version() {
        for arrow in Arrow::ALL {
            if arrow.to() != Some(arrow.from()) {
                assert!(arrow.raises_version(), "{arrow:?}");
            }
        }
    }

    #[test]
    fn an_arrow_that_keeps_the_version_is_answered_by_a_lease_test() {
        // Whatever may happen beside a renewal without knowing of it must test the lease.
        for arrow in Arrow::ALL {
            let by_somebody_else = matches!(arrow, Arrow::Return | Arrow::Bury);
            assert_eq!(arrow.guard() == Guard::VersionAndLeaseOver, by_somebody_else, "{arrow:?}");
        }
    }
}
