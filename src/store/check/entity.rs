//! What an entity says by itself, before any database is asked.

use sea_orm::ColumnType;

use crate::store::{
    StoreError,
    table::{Role, Roles},
};

impl Roles {
    /// What the entity says by itself.
    pub(in crate::store) fn check(&self) -> Result<(), StoreError> {
        let integer = |role: &Role| {
            matches!(
                role.column_type,
                ColumnType::TinyInteger
                    | ColumnType::SmallInteger
                    | ColumnType::Integer
                    | ColumnType::BigInteger
                    | ColumnType::TinyUnsigned
                    | ColumnType::SmallUnsigned
                    | ColumnType::Unsigned
                    | ColumnType::BigUnsigned
            )
        };
        if !integer(&self.id) && !self.has_uuid_key() {
            return Err(self.fault(format!("the key {} is neither an integer nor a UUID", self.id.name)));
        }
        if !matches!(self.message_id.column_type, ColumnType::Uuid) {
            return Err(self.fault(format!("the message id {} is no UUID", self.message_id.name)));
        }
        for role in [Some(&self.version), Some(&self.attempts), self.requeues.as_ref()].into_iter().flatten()
        {
            if !integer(role) {
                return Err(self.fault(format!("{} is no integer", role.name)));
            }
        }
        let text = |role: &&Role| {
            !role.is_text() && !matches!(role.column_type, ColumnType::Enum { .. } | ColumnType::Custom(_))
        };
        let texts = [&self.topic, &self.status, &self.claimed_by, &self.last_error].into_iter();
        let optional = [
            &self.content_type,
            &self.event_type,
            &self.aggregate_type,
            &self.aggregate_id,
            &self.ordering_key,
        ];
        if let Some(role) = texts.chain(optional.into_iter().flatten()).find(text) {
            return Err(self.fault(format!("{} is no text", role.name)));
        }
        let texts = self.statuses;
        if (1..4).any(|i| texts[..i].iter().any(|text| text.eq_ignore_ascii_case(texts[i]))) {
            return Err(self.fault(format!("two statuses have the same text: {:?}", self.statuses)));
        }
        // A settlement hands the text over as it is.
        if self.statuses.iter().any(|text| text.is_empty() || text.chars().count() > 100) {
            return Err(self.fault("a status text must have 1 to 100 characters".to_owned()));
        }
        Ok(())
    }

    /// What order per key asks of the entity.
    pub(in crate::store) fn check_ordering(&self) -> Result<(), StoreError> {
        if self.ordering_key.is_none() || self.sent_at.is_none() {
            return Err(self.fault("order per key needs the roles ordering_key and sent_at".to_owned()));
        }
        if self.has_uuid_key() {
            let fault =
                format!("order per key needs an integer key that rises, and {} is a UUID", self.id.name);
            return Err(self.fault(fault));
        }
        Ok(())
    }

    fn fault(&self, fault: String) -> StoreError {
        StoreError::Entity { table: self.name.clone(), fault }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(change: impl FnOnce(&mut Roles)) -> String {
        let mut roles = Roles::default();
        change(&mut roles);
        roles.check().expect_err("it is refused").to_string()
    }

    #[test]
    fn a_column_of_a_wrong_type_is_refused_by_name() {
        assert!(Roles::default().check().is_ok());
        for (fault, expected) in [
            (fault(|roles| roles.id = roles.topic.clone()), "the key topic is neither an integer nor a UUID"),
            (fault(|roles| roles.message_id = roles.id.clone()), "the message id id is no UUID"),
            (fault(|roles| roles.version = roles.topic.clone()), "topic is no integer"),
            (fault(|roles| roles.aggregate_id = Some(roles.id.clone())), "id is no text"),
            (fault(|roles| roles.statuses = ["new", "taken", "done", "Done"]), "the same text"),
            (fault(|roles| roles.statuses = ["", "taken", "done", "dead"]), "1 to 100 characters"),
        ] {
            assert!(fault.contains("outbox_message") && fault.contains(expected), "{fault}");
        }
    }

    #[test]
    fn order_per_key_needs_a_key_that_rises() {
        let mut roles = Roles::default();
        assert!(roles.check_ordering().is_ok());
        roles.id = roles.message_id.clone();
        let fault = roles.check_ordering().expect_err("a UUID does not rise").to_string();
        assert!(fault.contains("an integer key that rises, and message_id is a UUID"), "{fault}");
    }
}
