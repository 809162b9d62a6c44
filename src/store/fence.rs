use sea_orm::{DbErr, QueryResult};
use sea_orm_outbox_entity::outbox_message;

/// What a writer must still match: the row, and the version it has seen of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fence {
    /// The row.
    pub id: i64,
    /// The version that the row had when it was read.
    pub version: i64,
}

impl Fence {
    pub(super) fn read(row: &QueryResult) -> Result<Self, DbErr> {
        Ok(Self { id: row.try_get_by_index(0)?, version: row.try_get_by_index(1)? })
    }
}

impl From<&outbox_message::Model> for Fence {
    fn from(row: &outbox_message::Model) -> Self {
        Self { id: row.id, version: row.version }
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
