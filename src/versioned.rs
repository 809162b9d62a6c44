//! Optimistic locking for any SeaORM entity.

use std::marker::PhantomData;

use sea_orm::{
    ActiveModelBehavior, ColumnTrait, ConnectionTrait, DbErr, EntityTrait, IntoActiveModel,
    PrimaryKeyToColumn, PrimaryKeyTrait, QueryFilter, Select, SelectExt, TryIntoModel, Value,
    sea_query::{FromValueTuple, ValueTuple},
};

/// An entity with a version column: what two writers of one row need so that neither overwrites
/// the other unseen.
///
/// [`VersionedExt`] then gives its active models
/// [`update_versioned`](VersionedExt::update_versioned) and
/// [`delete_versioned`](VersionedExt::delete_versioned). Both write
/// `WHERE key = … AND version = …` with the version that was read, and an update raises it.
/// Whoever comes second matches no row and gets a [`Conflict`](VersionedError::Conflict).
///
/// Use it where a row is read, changed in the application and written back: across a form that a
/// person fills in, across a call to another service, between processes. No lock is held in between.
/// Where writers of the same row meet all the time, a row lock (`SELECT … FOR UPDATE`) or a single
/// statement (`SET n = n + 1`) costs less than the retries.
///
/// # Example
///
/// The column is an `i32` or an `i64` outside the primary key, and not null.
///
/// ```
/// use sea_orm::{IntoActiveModel, Set, entity::prelude::*};
/// use sea_orm_outbox::{Versioned, VersionedError, VersionedExt};
///
/// mod account {
///     use sea_orm::entity::prelude::*;
///
///     #[sea_orm::model]
///     #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
///     #[sea_orm(table_name = "account")]
///     pub struct Model {
///         #[sea_orm(primary_key)]
///         pub id: i64,
///         pub version: i64,
///         pub balance: i64,
///     }
///
///     impl ActiveModelBehavior for ActiveModel {}
/// }
///
/// impl Versioned for account::Entity {
///     fn version_column() -> account::Column {
///         account::Column::Version
///     }
/// }
///
/// /// Retries are the caller's: read again, decide again, write again.
/// async fn deposit(
///     db: &impl ConnectionTrait,
///     id: i64,
///     amount: i64,
/// ) -> Result<account::Model, VersionedError> {
///     let mut attempt = 0;
///     loop {
///         attempt += 1;
///         let Some(read) = account::Entity::find_by_id(id).one(db).await? else {
///             return Err(VersionedError::NotFound { table: "account" });
///         };
///         let balance = read.balance + amount;
///         let mut account = read.into_active_model();
///         account.balance = Set(balance);
///         match account.update_versioned(db).await {
///             Err(error) if error.is_conflict() && attempt < 10 => continue,
///             done => return done,
///         }
///     }
/// }
///
/// # #[cfg(not(feature = "sqlite"))]
/// # fn main() {}
/// # #[cfg(feature = "sqlite")]
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), VersionedError> {
/// # let db = sea_orm::Database::connect("sqlite::memory:").await?;
/// # let table = sea_orm::Schema::new(db.get_database_backend())
/// #     .create_table_from_entity(account::Entity);
/// # db.execute(&table).await?;
/// let opened = account::ActiveModel {
///     version: Set(0),
///     balance: Set(100),
///     ..Default::default()
/// };
/// let account = opened.insert(&db).await?;
/// let stale = account.clone().into_active_model();
///
/// let account = deposit(&db, account.id, 20).await?;
/// assert_eq!((account.version, account.balance), (1, 120));
///
/// let refused = stale.clone().update_versioned(&db).await;
/// assert!(matches!(refused, Err(VersionedError::Conflict { expected: 0, .. })));
///
/// account.into_active_model().delete_versioned(&db).await?;
/// let gone = stale.delete_versioned(&db).await;
/// assert!(matches!(gone, Err(VersionedError::NotFound { .. })));
/// # Ok(())
/// # }
/// ```
///
/// # Inside a transaction
///
/// At READ COMMITTED a conflict leaves the transaction usable: read again in it and go on.
///
/// At REPEATABLE READ and SERIALIZABLE, and on SQLite in a deferred transaction that has read, it keeps
/// seeing the old row: **roll the outermost transaction back and retry it from its start.** A savepoint
/// does not help. There the database itself may refuse the write, with PostgreSQL's
/// SQLSTATE 40001, MariaDB's error 1020 or SQLite's `SQLITE_BUSY_SNAPSHOT`. This is a
/// [`Conflict`](VersionedError::Conflict) too, with the database's error as its source. It does not
/// tell which row was in the way or whether it was deleted, and a SERIALIZABLE transaction may still
/// be refused at its commit, where the error is SeaORM's. MySQL, and MariaDB without
/// `innodb_snapshot_isolation`, find no row instead, and report a conflict also where the row is gone.
///
/// A deadlock, or SQLite's `SQLITE_BUSY` after the busy timeout, is no conflict but a
/// [`Database`](VersionedError::Database) error.
///
/// # What is not promised
///
/// - Only writers that check the version are kept apart. SeaORM's own `update`, `update_many` and
///   `delete`, and hand-written SQL, neither check nor raise it.
/// - Nothing is retried.
/// - Only the row itself is guarded, not the rows that belong to it: to guard those, update the
///   owner as well, if need be with nothing set.
/// - After a database error such as a lost connection the write may or may not have happened. Read the row.
pub trait Versioned: EntityTrait {
    /// The column that holds the version.
    fn version_column() -> Self::Column;
}

/// Writes that check the version, for every active model of a [`Versioned`] entity.
///
/// The version expected is the one in the active model, whether `Unchanged` (as read) or `Set`
/// (say from a form). Its other fields mean what they mean to SeaORM's `update` and `delete`, and the
/// hooks of [`ActiveModelBehavior`] run as they do there. A model becomes an active model with
/// `into_active_model()`.
pub trait VersionedExt: ActiveModelBehavior
where
    Self::Entity: Versioned,
{
    /// Updates the row if it still has the version expected, and raises the version, even if nothing
    /// else is set. Returns the row as it was written.
    ///
    /// Without `RETURNING` (MySQL, MariaDB) the row is read back at its new version. If somebody has
    /// changed it again by then, the values that were sent are returned instead; if the active model
    /// does not have them all, that is [`VersionedError::Overtaken`].
    fn update_versioned<C: ConnectionTrait>(
        self,
        db: &C,
    ) -> impl Future<Output = Result<<Self::Entity as EntityTrait>::Model, VersionedError>> + Send;

    /// Deletes the row if it still has the version expected.
    fn delete_versioned<C: ConnectionTrait>(
        self,
        db: &C,
    ) -> impl Future<Output = Result<(), VersionedError>> + Send;
}

impl<E, A> VersionedExt for A
where
    E: Versioned,
    E::Model: IntoActiveModel<A>,
    A: ActiveModelBehavior<Entity = E> + TryIntoModel<E::Model> + Send,
{
    async fn update_versioned<C: ConnectionTrait>(self, db: &C) -> Result<E::Model, VersionedError> {
        let fence = Fence::<E>::of(&self)?;
        let raised = fence.raised()?;
        let mut am = self.before_save(db, false).await?;
        am.try_set(E::version_column(), raised.into())?;

        let update = E::update(am.clone()).validate()?.filter(E::version_column().eq(fence.version));
        // Where there is no RETURNING, SeaORM would read the row back whatever its version.
        let written = if db.support_returning() {
            update.exec(db).await.map(Some)
        } else {
            update.exec_without_returning(db).await.map(|_| None)
        };
        let model = match written {
            Ok(Some(model)) => model,
            Ok(None) => fence.read_back(am, raised, db).await?,
            Err(DbErr::RecordNotUpdated) => return Err(fence.missed(db).await),
            Err(error) => return Err(fence.failed(error)),
        };
        Ok(A::after_save(model, db, false).await?)
    }

    async fn delete_versioned<C: ConnectionTrait>(self, db: &C) -> Result<(), VersionedError> {
        let fence = Fence::<E>::of(&self)?;
        let am = self.before_delete(db).await?;
        let deleted =
            E::delete(am.clone()).validate()?.filter(E::version_column().eq(fence.version)).exec(db).await;
        match deleted {
            Ok(result) if result.rows_affected == 0 => Err(fence.missed(db).await),
            Ok(_) => {
                am.after_delete(db).await?;
                Ok(())
            }
            Err(error) => Err(fence.failed(error)),
        }
    }
}

/// Why a versioned write did not succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VersionedError {
    /// Somebody else changed the row since it was read. Read it again, after REPEATABLE READ or
    /// SERIALIZABLE in a new transaction, and decide again.
    #[error("conflict: the row of `{table}` no longer has version {expected}")]
    Conflict {
        /// The table of the row.
        table: &'static str,
        /// The version that the writer expected.
        expected: i64,
        /// The database's error, where it refused the write itself: then the transaction must be
        /// rolled back.
        source: Option<DbErr>,
    },
    /// There is no row with this primary key.
    #[error("the row of `{table}` does not exist")]
    NotFound {
        /// The table of the row.
        table: &'static str,
    },
    /// The row **was** updated, but somebody else changed it again before it could be read back, and the
    /// active model does not have all fields. Only on databases without `RETURNING`. `after_save` did
    /// not run.
    #[error("the row of `{table}` was updated to version {version}, then changed by another writer")]
    Overtaken {
        /// The table of the row.
        table: &'static str,
        /// The version that was written.
        version: i64,
    },
    /// The version cannot be raised any further. Nothing was written.
    #[error("the row of `{table}` has the highest version there is, {version}")]
    Overflow {
        /// The table of the row.
        table: &'static str,
        /// The version that the writer expected.
        version: i64,
    },
    /// The active model does not say which version it expects. Nothing was written.
    #[error("the version of the row of `{table}` is not set")]
    VersionNotSet {
        /// The table of the row.
        table: &'static str,
    },
    /// The active model does not say which row it is. Nothing was written.
    #[error("the primary key of the row of `{table}` is not set")]
    PrimaryKeyNotSet {
        /// The table of the row.
        table: &'static str,
    },
    /// The version column is neither an `i32` nor an `i64`, or is part of the primary key. Nothing was
    /// written.
    #[error("the version of `{table}` must be an i32 or an i64 outside the primary key")]
    UnsupportedVersion {
        /// The table of the row.
        table: &'static str,
    },
    /// Any other error of the database, or of a hook.
    #[error(transparent)]
    Database(#[from] DbErr),
}

impl VersionedError {
    /// Whether another writer came first, so that to read again and retry may succeed.
    pub fn is_conflict(&self) -> bool {
        matches!(self, VersionedError::Conflict { .. })
    }

    /// Whether the row does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, VersionedError::NotFound { .. })
    }
}

#[derive(Clone, Copy)]
enum Version {
    Int(i32),
    BigInt(i64),
}

impl From<Version> for Value {
    fn from(version: Version) -> Self {
        match version {
            Version::Int(version) => version.into(),
            Version::BigInt(version) => version.into(),
        }
    }
}

impl From<Version> for i64 {
    fn from(version: Version) -> Self {
        match version {
            Version::Int(version) => version.into(),
            Version::BigInt(version) => version,
        }
    }
}

/// The key and the version that the row must still have.
struct Fence<E> {
    table: &'static str,
    key: ValueTuple,
    version: Version,
    entity: PhantomData<E>,
}

impl<E: Versioned> Fence<E> {
    fn of<A: ActiveModelBehavior<Entity = E>>(am: &A) -> Result<Self, VersionedError> {
        let entity = E::default();
        let table = entity.table_name();
        let column = E::version_column();
        // SeaORM never sets a column of the key: the version would not rise.
        if E::PrimaryKey::from_column(column).is_some() {
            return Err(VersionedError::UnsupportedVersion { table });
        }
        let version = match am.get(column).into_value() {
            Some(Value::Int(Some(version))) => Version::Int(version),
            Some(Value::BigInt(Some(version))) => Version::BigInt(version),
            None | Some(Value::Int(None) | Value::BigInt(None)) => {
                return Err(VersionedError::VersionNotSet { table });
            }
            Some(_) => return Err(VersionedError::UnsupportedVersion { table }),
        };
        let key = am.get_primary_key_value().ok_or(VersionedError::PrimaryKeyNotSet { table })?;
        Ok(Self { table, key, version, entity: PhantomData })
    }

    fn raised(&self) -> Result<Version, VersionedError> {
        match self.version {
            Version::Int(version) => version.checked_add(1).map(Version::Int),
            Version::BigInt(version) => version.checked_add(1).map(Version::BigInt),
        }
        .ok_or(VersionedError::Overflow { table: self.table, version: self.version.into() })
    }

    fn select(&self) -> Select<E> {
        type Key<E> = <<E as EntityTrait>::PrimaryKey as PrimaryKeyTrait>::ValueType;
        E::find_by_id(Key::<E>::from_value_tuple(self.key.clone()))
    }

    async fn read_back<A, C>(&self, sent: A, raised: Version, db: &C) -> Result<E::Model, VersionedError>
    where
        A: TryIntoModel<E::Model>,
        C: ConnectionTrait,
    {
        let read = self.select().filter(E::version_column().eq(raised)).one(db).await?;
        read.map_or_else(|| sent.try_into_model(), Ok)
            .map_err(|_| VersionedError::Overtaken { table: self.table, version: raised.into() })
    }

    /// No row matched: says why. The version found must not decide it, because a transaction on MySQL
    /// may see its old snapshot here, with the version expected.
    async fn missed<C: ConnectionTrait>(&self, db: &C) -> VersionedError {
        match self.select().exists(db).await {
            Ok(true) => self.conflict(None),
            Ok(false) => VersionedError::NotFound { table: self.table },
            Err(error) => self.failed(error),
        }
    }

    fn failed(&self, error: DbErr) -> VersionedError {
        if is_stale_snapshot(&error) {
            // No look whether the row still exists: PostgreSQL has aborted the transaction.
            self.conflict(Some(error))
        } else {
            error.into()
        }
    }

    fn conflict(&self, source: Option<DbErr>) -> VersionedError {
        VersionedError::Conflict { table: self.table, expected: self.version.into(), source }
    }
}

/// Whether the database refused the statement because another transaction has changed what this one
/// has read.
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
fn is_stale_snapshot(error: &DbErr) -> bool {
    use sea_orm::RuntimeErr;

    let (DbErr::Exec(RuntimeErr::SqlxError(error)) | DbErr::Query(RuntimeErr::SqlxError(error))) = error
    else {
        return false;
    };
    let Some(error) = error.as_database_error() else {
        return false;
    };
    #[cfg(feature = "postgres")]
    if let Some(error) = error.try_downcast_ref::<sea_orm::SqlxPostgresError>() {
        return error.code() == "40001";
    }
    #[cfg(feature = "mysql")]
    if let Some(error) = error.try_downcast_ref::<sea_orm::SqlxMySqlError>() {
        // By number, because the SQLSTATE of a deadlock is 40001 here.
        return error.number() == 1020;
    }
    #[cfg(feature = "sqlite")]
    if error.try_downcast_ref::<sea_orm::SqlxSqliteError>().is_some() {
        return error.code().as_deref() == Some("517");
    }
    false
}

#[cfg(not(any(feature = "postgres", feature = "mysql", feature = "sqlite")))]
fn is_stale_snapshot(_: &DbErr) -> bool {
    false
}
