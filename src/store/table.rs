//! Which table the outbox is and which of its columns play which roles, for the statements.

use std::fmt;

use sea_orm::{
    ColumnTrait, ColumnType,
    sea_query::{Alias, DynIden, IntoIden, TableRef},
};
use sea_orm_outbox_entity::outbox_message;

use super::{OutboxTable, dialect::Dialect};
use crate::lifecycle::Status;

/// The roles of one entity, by name.
#[derive(Clone, Debug)]
pub(crate) struct Roles {
    pub(super) table: TableRef,
    pub(super) schema: Option<String>,
    pub(super) name: String,
    pub(super) id: Role,
    pub(super) message_id: Role,
    pub(super) topic: Role,
    pub(super) payload: Role,
    pub(super) status: Role,
    pub(super) version: Role,
    pub(super) attempts: Role,
    pub(super) available_at: Role,
    pub(super) claimed_by: Role,
    pub(super) lease_until: Role,
    pub(super) last_error: Role,
    pub(super) headers: Option<Role>,
    pub(super) content_type: Option<Role>,
    pub(super) event_type: Option<Role>,
    pub(super) aggregate_type: Option<Role>,
    pub(super) aggregate_id: Option<Role>,
    pub(super) ordering_key: Option<Role>,
    pub(super) requeues: Option<Role>,
    pub(super) sent_at: Option<Role>,
    pub(super) failed_at: Option<Role>,
    pub(super) statuses: [&'static str; 4],
}

/// One column.
#[derive(Clone, Debug)]
pub(super) struct Role {
    pub(super) name: &'static str,
    pub(super) column_type: ColumnType,
}

impl Role {
    fn of(column: impl ColumnTrait) -> Self {
        Self { name: column.as_str(), column_type: column.def().get_column_type().clone() }
    }

    pub(super) fn iden(&self) -> DynIden {
        Alias::new(self.name).into_iden()
    }

    /// Whether it is read as a text without being converted.
    pub(super) fn is_text(&self) -> bool {
        matches!(self.column_type, ColumnType::Char(_) | ColumnType::String(_) | ColumnType::Text)
    }

    pub(super) fn is_json(&self) -> bool {
        matches!(self.column_type, ColumnType::Json | ColumnType::JsonBinary)
    }
}

impl Roles {
    pub(crate) fn of<E: OutboxTable>() -> Self {
        let entity = E::default();
        Self {
            table: entity.table_ref(),
            schema: entity.schema_name().map(str::to_owned),
            name: entity.table_name().to_owned(),
            id: Role::of(E::id()),
            message_id: Role::of(E::message_id()),
            topic: Role::of(E::topic()),
            payload: Role::of(E::payload()),
            status: Role::of(E::status()),
            version: Role::of(E::version()),
            attempts: Role::of(E::attempts()),
            available_at: Role::of(E::available_at()),
            claimed_by: Role::of(E::claimed_by()),
            lease_until: Role::of(E::lease_until()),
            last_error: Role::of(E::last_error()),
            headers: E::headers().map(Role::of),
            content_type: E::content_type().map(Role::of),
            event_type: E::event_type().map(Role::of),
            aggregate_type: E::aggregate_type().map(Role::of),
            aggregate_id: E::aggregate_id().map(Role::of),
            ordering_key: E::ordering_key().map(Role::of),
            requeues: E::requeues().map(Role::of),
            sent_at: E::sent_at().map(Role::of),
            failed_at: E::failed_at().map(Role::of),
            statuses: [Status::Pending, Status::Processing, Status::Sent, Status::Failed].map(E::status_text),
        }
    }

    /// The text that stands for a status.
    pub(super) fn status_text(&self, status: Status) -> &'static str {
        let [pending, processing, sent, failed] = self.statuses;
        match status {
            Status::Pending => pending,
            Status::Processing => processing,
            Status::Sent => sent,
            Status::Failed => failed,
        }
    }

    pub(super) fn has_uuid_key(&self) -> bool {
        matches!(self.id.column_type, ColumnType::Uuid)
    }
}

impl Default for Roles {
    fn default() -> Self {
        Self::of::<outbox_message::Entity>()
    }
}

/// The same for the statements of one database: names quoted, values converted.
#[derive(Clone)]
pub(super) struct Table {
    pub(super) dialect: Dialect,
    pub(super) roles: Roles,
    pub(super) name: String,
    pub(super) id: String,
    pub(super) status: String,
    pub(super) version: String,
    pub(super) attempts: String,
    pub(super) available_at: String,
    pub(super) claimed_by: String,
    pub(super) lease_until: String,
    pub(super) last_error: String,
    /// The literals `'PENDING'` and so on.
    pub(super) pending: String,
    pub(super) processing: String,
    pub(super) sent: String,
    pub(super) failed: String,
}

impl Table {
    pub(super) fn new(roles: Roles, dialect: Dialect) -> Self {
        let quoted = |role: &Role| dialect.quote(role.name);
        let name = match &roles.schema {
            Some(schema) => format!("{}.{}", dialect.quote(schema), dialect.quote(&roles.name)),
            None => dialect.quote(&roles.name),
        };
        let [pending, processing, sent, failed] = roles.statuses.map(literal);
        Self {
            dialect,
            name,
            id: quoted(&roles.id),
            status: quoted(&roles.status),
            version: quoted(&roles.version),
            attempts: quoted(&roles.attempts),
            available_at: quoted(&roles.available_at),
            claimed_by: quoted(&roles.claimed_by),
            lease_until: quoted(&roles.lease_until),
            last_error: quoted(&roles.last_error),
            pending,
            processing,
            sent,
            failed,
            roles,
        }
    }

    pub(super) fn quoted(&self, role: &Role) -> String {
        self.dialect.quote(role.name)
    }

    /// A column read as a text, whatever type it has.
    pub(super) fn text(&self, role: &Role, prefix: &str) -> String {
        let column = format!("{prefix}{}", self.quoted(role));
        if role.is_text() { column } else { self.dialect.text(&column) }
    }

    /// A role that an entity need not have.
    pub(super) fn optional(&self, role: &Option<Role>) -> Option<String> {
        role.as_ref().map(|role| self.quoted(role))
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// A text in SQL.
pub(super) fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}
