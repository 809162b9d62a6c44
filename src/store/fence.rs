use std::fmt;

use sea_orm::{DbErr, QueryResult, Value, prelude::Uuid};
use sea_orm_outbox_entity::outbox_message;

use super::table::Table;

/// The primary key of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum RowId {
    /// A number, as in `outbox_message`.
    Integer(i64),
    /// A UUID, in tables of one's own.
    Uuid(Uuid),
}

impl RowId {
    pub(super) fn read(row: &QueryResult, index: usize, table: &Table) -> Result<Self, DbErr> {
        if table.roles.has_uuid_key() {
            Ok(Self::Uuid(row.try_get_by_index(index)?))
        } else {
            Ok(Self::Integer(integer(row, index)?))
        }
    }
}

impl From<i64> for RowId {
    fn from(id: i64) -> Self {
        Self::Integer(id)
    }
}

impl From<Uuid> for RowId {
    fn from(id: Uuid) -> Self {
        Self::Uuid(id)
    }
}

impl From<RowId> for Value {
    fn from(id: RowId) -> Self {
        match id {
            RowId::Integer(id) => id.into(),
            RowId::Uuid(id) => id.into(),
        }
    }
}

impl PartialEq<i64> for RowId {
    fn eq(&self, id: &i64) -> bool {
        *self == Self::Integer(*id)
    }
}

impl fmt::Display for RowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(id) => id.fmt(f),
            Self::Uuid(id) => id.fmt(f),
        }
    }
}

/// What a writer must still match: the row, and the version it has seen of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence {
    /// The row.
    pub id: RowId,
    /// The version that the row had when it was read.
    pub version: i64,
}

impl Fence {
    /// A fence from an entity of one's own.
    pub fn new(id: impl Into<RowId>, version: i64) -> Self {
        Self { id: id.into(), version }
    }

    /// Reads the first two columns.
    pub(super) fn read(row: &QueryResult, table: &Table) -> Result<Self, DbErr> {
        Ok(Self { id: RowId::read(row, 0, table)?, version: integer(row, 1)? })
    }
}

/// An integer of whatever width the table has.
fn integer(row: &QueryResult, index: usize) -> Result<i64, DbErr> {
    let error = match row.try_get_by_index::<i64>(index) {
        Ok(integer) => return Ok(integer),
        Err(error) => error,
    };
    let narrow = row.try_get_by_index::<i32>(index).map(i64::from);
    let narrow = narrow.or_else(|_| row.try_get_by_index::<i16>(index).map(i64::from));
    match narrow {
        Ok(integer) => Ok(integer),
        Err(_) => row.try_get_by_index::<u64>(index).ok().and_then(|n| i64::try_from(n).ok()).ok_or(error),
    }
}

impl From<&outbox_message::Model> for Fence {
    fn from(row: &outbox_message::Model) -> Self {
        Self::new(row.id, row.version)
    }
}

/// The rows of a batch that somebody else had changed before. Nothing of them was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "a lost row belongs to somebody else now"]
pub struct Lost(pub(super) Vec<Fence>);

impl Lost {
    /// Their fences, as they were given.
    pub fn fences(&self) -> &[Fence] {
        &self.0
    }

    /// Whether every row was written.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many were lost.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}
