//! Optimistic locking for any SeaORM entity.
