use sea_orm::entity::prelude::*;

/// Where a message stands in its life cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EnumIter, DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "String(StringLen::N(16))", rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Status {
    /// Waits for a relay, from `available_at` on.
    Pending,
    /// Claimed by a relay until `lease_until`.
    Processing,
    /// Acknowledged by the broker.
    Sent,
    /// Given up, with the reason in `last_error`: a dead letter, for a person to see.
    Failed,
}

impl Status {
    /// The text in the `status` column.
    pub const fn as_str(self) -> &'static str {
        match self {
            Status::Pending => "PENDING",
            Status::Processing => "PROCESSING",
            Status::Sent => "SENT",
            Status::Failed => "FAILED",
        }
    }

    /// Whether the relay is done with the row: nothing but a person moves it from here.
    pub const fn is_finished(self) -> bool {
        matches!(self, Status::Sent | Status::Failed)
    }
}

#[cfg(test)]
mod tests {
    use sea_orm::Iterable;

    use super::*;

    #[test]
    fn the_text_is_what_the_entity_stores() {
        for status in Status::iter() {
            assert_eq!(status.as_str(), status.to_value());
        }
    }
}
