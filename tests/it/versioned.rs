//! Optimistic locking of entities that have nothing to do with the outbox.

use std::error::Error;

use libtest_mimic::Trial;
use sea_orm::{
    ActiveValue, DatabaseConnection, DbBackend, ExecResult, IntoActiveModel, IsolationLevel, ModelTrait,
    QueryResult, Schema, Set, SqliteTransactionMode, Statement, TransactionOptions, TransactionTrait,
    TryIntoModel, entity::prelude::*,
};
use sea_orm_outbox::{Versioned, VersionedError, VersionedExt};

use crate::support::{Kind, TestDatabase, on_database, on_each_database, test};

/// An integer key and an `i64` version.
mod account {
    use sea_orm::entity::prelude::*;

    #[sea_orm::model]
    #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
    #[sea_orm(table_name = "account")]
    pub(crate) struct Model {
        #[sea_orm(primary_key)]
        pub(crate) id: i64,
        pub(crate) version: i64,
        pub(crate) owner: String,
        pub(crate) balance: i64,
    }

    impl ActiveModelBehavior for ActiveModel {}
}

/// A UUID key and an `i32` version.
mod document {
    use sea_orm::entity::prelude::*;

    #[sea_orm::model]
    #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
    #[sea_orm(table_name = "document")]
    pub(crate) struct Model {
        #[sea_orm(primary_key, auto_increment = false)]
        pub(crate) id: Uuid,
        pub(crate) title: String,
        pub(crate) version: i32,
    }

    impl ActiveModelBehavior for ActiveModel {}
}

/// A key of two columns, and a version of another name.
mod seat {
    use sea_orm::entity::prelude::*;

    #[sea_orm::model]
    #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
    #[sea_orm(table_name = "seat")]
    pub(crate) struct Model {
        #[sea_orm(primary_key, auto_increment = false)]
        pub(crate) show: i32,
        #[sea_orm(primary_key, auto_increment = false)]
        pub(crate) number: String,
        pub(crate) guest: Option<String>,
        pub(crate) revision: i64,
    }

    impl ActiveModelBehavior for ActiveModel {}
}

/// Columns that are cast when they are written and read.
mod visit {
    use sea_orm::entity::prelude::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq, EnumIter, DeriveActiveEnum)]
    #[sea_orm(rs_type = "String", db_type = "Enum", enum_name = "visit_state", rename_all = "snake_case")]
    pub(crate) enum State {
        Open,
        Closed,
    }

    #[sea_orm::model]
    #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
    #[sea_orm(table_name = "visit")]
    pub(crate) struct Model {
        #[sea_orm(primary_key)]
        pub(crate) id: i32,
        pub(crate) version: i32,
        pub(crate) state: State,
        #[sea_orm(select_as = "text", save_as = "inet")]
        pub(crate) origin: String,
    }

    impl ActiveModelBehavior for ActiveModel {}
}

/// Hooks that change what is saved and leave a trace.
mod note {
    use sea_orm::{Set, entity::prelude::*};

    use super::hook_call;

    #[sea_orm::model]
    #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
    #[sea_orm(table_name = "note")]
    pub(crate) struct Model {
        #[sea_orm(primary_key)]
        pub(crate) id: i64,
        pub(crate) version: i64,
        pub(crate) text: String,
    }

    #[async_trait::async_trait]
    impl ActiveModelBehavior for ActiveModel {
        async fn before_save<C: ConnectionTrait>(mut self, db: &C, insert: bool) -> Result<Self, DbErr> {
            hook_call::record(db, format!("before_save insert={insert}")).await?;
            if let Some(text) = self.text.take() {
                self.text = Set(text.to_uppercase());
            }
            Ok(self)
        }

        async fn after_save<C: ConnectionTrait>(
            mut model: Model,
            db: &C,
            insert: bool,
        ) -> Result<Model, DbErr> {
            hook_call::record(db, format!("after_save insert={insert}")).await?;
            model.text.push('!');
            Ok(model)
        }

        async fn before_delete<C: ConnectionTrait>(self, db: &C) -> Result<Self, DbErr> {
            hook_call::record(db, "before_delete".to_owned()).await?;
            if self.text.as_ref() == "KEEP!" {
                return Err(DbErr::Custom("to be kept".to_owned()));
            }
            Ok(self)
        }

        async fn after_delete<C: ConnectionTrait>(self, db: &C) -> Result<Self, DbErr> {
            hook_call::record(db, "after_delete".to_owned()).await?;
            Ok(self)
        }
    }
}

mod hook_call {
    use sea_orm::{QueryOrder, Set, entity::prelude::*};

    #[sea_orm::model]
    #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
    #[sea_orm(table_name = "hook_call")]
    pub(crate) struct Model {
        #[sea_orm(primary_key)]
        pub(crate) id: i64,
        pub(crate) name: String,
    }

    impl ActiveModelBehavior for ActiveModel {}

    pub(crate) async fn record<C: ConnectionTrait>(db: &C, name: String) -> Result<(), DbErr> {
        let call = ActiveModel { name: Set(name), ..Default::default() };
        Entity::insert(call).exec(db).await.map(|_| ())
    }

    /// The calls since this was asked last.
    pub(crate) async fn take<C: ConnectionTrait>(db: &C) -> Vec<String> {
        let calls = Entity::find().order_by_asc(Column::Id).all(db).await;
        Entity::delete_many().exec(db).await.unwrap();
        calls.unwrap().into_iter().map(|call| call.name).collect()
    }
}

/// A version of a type that cannot be raised.
mod tagged {
    use sea_orm::entity::prelude::*;

    #[sea_orm::model]
    #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
    #[sea_orm(table_name = "tagged")]
    pub(crate) struct Model {
        #[sea_orm(primary_key)]
        pub(crate) id: i64,
        pub(crate) version: String,
    }

    impl ActiveModelBehavior for ActiveModel {}
}

/// A version inside the primary key.
mod history {
    use sea_orm::entity::prelude::*;

    #[sea_orm::model]
    #[derive(Clone, Debug, PartialEq, DeriveEntityModel)]
    #[sea_orm(table_name = "history")]
    pub(crate) struct Model {
        #[sea_orm(primary_key, auto_increment = false)]
        pub(crate) id: i64,
        #[sea_orm(primary_key, auto_increment = false)]
        pub(crate) version: i64,
        pub(crate) text: String,
    }

    impl ActiveModelBehavior for ActiveModel {}
}

macro_rules! versioned {
    ($($entity:ident: $column:ident),*) => {
        $(impl Versioned for $entity::Entity {
            fn version_column() -> $entity::Column {
                $entity::Column::$column
            }
        })*
    };
}

versioned!(
    account: Version,
    document: Version,
    seat: Revision,
    visit: Version,
    note: Version,
    tagged: Version,
    history: Version
);

pub(crate) fn tests() -> Vec<Trial> {
    macro_rules! on_each {
        ($($name:ident),* $(,)?) => {
            [$(on_each_database(concat!("versioned::", stringify!($name)), $name)),*]
                .into_iter()
                .flatten()
        };
    }
    macro_rules! on {
        ($($kind:ident: $name:ident),* $(,)?) => {
            [$(on_database(
                Kind::$kind,
                concat!("versioned::", stringify!($name)),
                $name,
            )),*]
        };
    }
    on_each![
        a_write_with_an_integer_key_checks_the_version,
        a_write_with_a_uuid_key_checks_the_version,
        a_write_with_a_composite_key_checks_the_version,
        an_update_writes_what_is_set_and_leaves_the_rest,
        the_version_expected_may_come_from_a_form,
        of_two_writers_one_wins,
        eight_writers_who_retry_lose_no_increment,
        an_update_at_the_highest_version_is_refused,
        a_row_at_the_highest_version_can_be_deleted,
        hooks_run_as_for_update_and_delete,
        a_failing_hook_stops_the_write,
        rolling_a_savepoint_back_restores_the_version,
        an_update_without_returning_is_read_back,
        an_update_without_returning_that_was_overtaken_returns_what_was_sent,
        a_partial_update_without_returning_that_was_overtaken_says_so,
        an_error_of_the_database_is_not_a_conflict,
    ]
    .chain(on![
        Postgres: a_stale_write_at_repeatable_read_is_a_conflict,
        Postgres: a_stale_write_at_serializable_is_a_conflict,
        Postgres: a_conflict_at_read_committed_leaves_the_transaction_usable,
        Postgres: a_deadlock_is_not_a_conflict,
        Postgres: columns_are_cast_as_in_ordinary_updates,
        Sqlite: a_stale_write_after_a_read_is_a_conflict,
        Sqlite: a_busy_database_is_not_a_conflict,
    ])
    .chain([
        test("versioned::misuse_is_told_before_any_query", misuse_is_told_before_any_query),
        test("versioned::messages_name_table_and_version", messages_name_table_and_version),
    ])
    .collect()
}

async fn create_table<E: EntityTrait>(db: &DatabaseConnection, entity: E) {
    let table = Schema::new(db.get_database_backend()).create_table_from_entity(entity);
    db.execute(&table).await.unwrap();
}

async fn open_account(db: &DatabaseConnection) -> account::Model {
    create_table(db, account::Entity).await;
    another_account(db).await
}

async fn another_account(db: &DatabaseConnection) -> account::Model {
    account::ActiveModel {
        version: Set(0),
        owner: Set("Ada".to_owned()),
        balance: Set(0),
        ..Default::default()
    }
    .insert(db)
    .await
    .unwrap()
}

async fn read_account<C: ConnectionTrait>(db: &C, id: i64) -> account::Model {
    account::Entity::find_by_id(id).one(db).await.unwrap().unwrap()
}

fn with_balance(account: &account::Model, balance: i64) -> account::ActiveModel {
    account::ActiveModel { balance: Set(balance), ..account.clone().into_active_model() }
}

#[track_caller]
fn assert_conflict<T: std::fmt::Debug>(outcome: Result<T, VersionedError>, version: i64) {
    match outcome {
        Err(error @ VersionedError::Conflict { expected, .. }) => {
            assert_eq!(expected, version);
            assert!(error.is_conflict());
        }
        other => panic!("expected a conflict, got {other:?}"),
    }
}

/// The database refused the write itself.
#[track_caller]
fn assert_refused<T: std::fmt::Debug>(outcome: Result<T, VersionedError>, code: &str) {
    match outcome {
        Err(error @ VersionedError::Conflict { source: Some(_), .. }) => {
            let source = error.source().unwrap().downcast_ref::<DbErr>().unwrap();
            assert_eq!(database_code(source), code);
        }
        other => panic!("expected a conflict with the database's error, got {other:?}"),
    }
}

fn database_code(error: &DbErr) -> String {
    use sea_orm::RuntimeErr::SqlxError;
    match error {
        DbErr::Exec(SqlxError(error)) | DbErr::Query(SqlxError(error)) => {
            let error = error.as_database_error().unwrap();
            error.code().unwrap().into_owned()
        }
        other => panic!("not an error of a statement: {other:?}"),
    }
}

async fn checks_the_version<E>(
    db: &DatabaseConnection,
    table: &'static str,
    [new, bystander]: [E::ActiveModel; 2],
) where
    E: Versioned,
    E::Model: IntoActiveModel<E::ActiveModel> + PartialEq,
    E::ActiveModel: TryIntoModel<E::Model> + Send,
{
    create_table(db, E::default()).await;
    let version = |model: &E::Model| match model.get(E::version_column()) {
        Value::Int(Some(version)) => i64::from(version),
        Value::BigInt(Some(version)) => version,
        other => panic!("not a version: {other:?}"),
    };
    let rows = async || E::find().order_by_id_asc().all(db).await.unwrap();
    let created = new.insert(db).await.unwrap();
    let bystander = bystander.insert(db).await.unwrap();
    let first = version(&created);
    let stale = created.into_active_model();

    // Nothing but the version is set.
    let updated = stale.clone().update_versioned(db).await.unwrap();
    assert_eq!(version(&updated), first + 1);
    assert_eq!(rows().await, [updated.clone(), bystander.clone()]);

    assert_conflict(stale.clone().update_versioned(db).await, first);
    assert_conflict(stale.clone().delete_versioned(db).await, first);
    assert_eq!(rows().await, [updated.clone(), bystander.clone()]);

    let current = updated.into_active_model();
    current.clone().delete_versioned(db).await.unwrap();
    assert_eq!(rows().await, [bystander]);

    let update = current.clone().update_versioned(db).await;
    assert_eq!(update, Err(VersionedError::NotFound { table }));
    let delete = current.delete_versioned(db).await;
    assert_eq!(delete, Err(VersionedError::NotFound { table }));
}

async fn a_write_with_an_integer_key_checks_the_version(database: TestDatabase) {
    let accounts = ["Ada", "Bob"].map(|owner| account::ActiveModel {
        version: Set(7),
        owner: Set(owner.to_owned()),
        balance: Set(0),
        ..Default::default()
    });
    checks_the_version::<account::Entity>(&database.db, "account", accounts).await;
}

async fn a_write_with_a_uuid_key_checks_the_version(database: TestDatabase) {
    let documents = [1, 2].map(|id| document::ActiveModel {
        id: Set(Uuid::from_u128(id)),
        title: Set("Notes".to_owned()),
        version: Set(0),
    });
    checks_the_version::<document::Entity>(&database.db, "document", documents).await;
}

async fn a_write_with_a_composite_key_checks_the_version(database: TestDatabase) {
    let seats = ["A1", "A2"].map(|number| seat::ActiveModel {
        show: Set(1),
        number: Set(number.to_owned()),
        guest: Set(None),
        revision: Set(-1),
    });
    checks_the_version::<seat::Entity>(&database.db, "seat", seats).await;
}

async fn an_update_writes_what_is_set_and_leaves_the_rest(database: TestDatabase) {
    let db = &database.db;
    let account = open_account(db).await;
    let other = another_account(db).await;

    let updated = with_balance(&account, 5).update_versioned(db).await;

    let expected = account::Model { version: 1, balance: 5, ..account.clone() };
    assert_eq!(updated, Ok(expected.clone()));
    assert_eq!(read_account(db, account.id).await, expected);
    assert_eq!(read_account(db, other.id).await, other);
}

async fn the_version_expected_may_come_from_a_form(database: TestDatabase) {
    let db = &database.db;
    let account = open_account(db).await;
    let form =
        account::ActiveModel { id: Set(account.id), version: Set(0), balance: Set(5), ..Default::default() };

    let updated = form.clone().update_versioned(db).await.unwrap();

    assert_eq!((updated.version, updated.owner.as_str()), (1, "Ada"));
    assert_conflict(form.update_versioned(db).await, 0);
}

async fn of_two_writers_one_wins(database: TestDatabase) {
    let other = database.connect_again().await;
    let mut account = open_account(&database.db).await;
    for round in 0..20 {
        let (first, second) = tokio::join!(
            with_balance(&account, 1).update_versioned(&database.db),
            with_balance(&account, 2).update_versioned(&other),
        );
        let (won, lost) = if first.is_ok() { (first, second) } else { (second, first) };
        assert_conflict(lost, round);
        let stored = read_account(&database.db, account.id).await;
        assert_eq!(won, Ok(stored.clone()));
        account = stored;
    }
    assert_eq!(account.version, 20);
}

async fn eight_writers_who_retry_lose_no_increment(database: TestDatabase) {
    let account = open_account(&database.db).await;
    let mut writers = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (db, id) = (database.db.clone(), account.id);
        writers.spawn(async move {
            for _ in 0..25 {
                loop {
                    let read = read_account(&db, id).await;
                    let update = with_balance(&read, read.balance + 1);
                    match update.update_versioned(&db).await {
                        Err(error) if error.is_conflict() => continue,
                        done => break drop(done.unwrap()),
                    };
                }
            }
        });
    }
    writers.join_all().await;

    let account = read_account(&database.db, account.id).await;
    assert_eq!((account.balance, account.version), (200, 200));
}

async fn an_update_at_the_highest_version_is_refused(database: TestDatabase) {
    let db = &database.db;
    let mut account = open_account(db).await.into_active_model();
    account.version = Set(i64::MAX);
    let account = account.update(db).await.unwrap();
    let refused = with_balance(&account, 5).update_versioned(db).await;
    assert_eq!(refused, Err(VersionedError::Overflow { table: "account", version: i64::MAX }));
    assert_eq!(read_account(db, account.id).await, account);

    create_table(db, document::Entity).await;
    let document = document::ActiveModel {
        id: Set(Uuid::from_u128(1)),
        title: Set("Notes".to_owned()),
        version: Set(i32::MAX),
    };
    let document = document.insert(db).await.unwrap();
    let refused = document.clone().into_active_model().update_versioned(db);
    assert_eq!(refused.await, Err(VersionedError::Overflow { table: "document", version: i32::MAX.into() }));
    let stored = document::Entity::find().all(db).await.unwrap();
    assert_eq!(stored, [document]);
}

async fn a_row_at_the_highest_version_can_be_deleted(database: TestDatabase) {
    let db = &database.db;
    let mut account = open_account(db).await.into_active_model();
    account.version = Set(i64::MAX);
    let account = account.update(db).await.unwrap().into_active_model();

    account.delete_versioned(db).await.unwrap();

    assert!(account::Entity::find().all(db).await.unwrap().is_empty());
}

async fn write_note(db: &DatabaseConnection, text: &str) -> note::ActiveModel {
    create_table(db, note::Entity).await;
    create_table(db, hook_call::Entity).await;
    let note = note::ActiveModel { version: Set(0), text: Set(text.to_owned()), ..Default::default() };
    let note = note.insert(db).await.unwrap();
    hook_call::take(db).await;
    note.into_active_model()
}

async fn hooks_run_as_for_update_and_delete(database: TestDatabase) {
    let db = &database.db;
    let mut note = write_note(db, "a").await;
    let stale = note.clone();

    note.text = Set("changed".to_owned());
    let updated = note.update_versioned(db).await.unwrap();
    assert_eq!(updated.text, "CHANGED!");
    let stored = note::Entity::find().one(db).await.unwrap().unwrap();
    assert_eq!((stored.text.as_str(), stored.version), ("CHANGED", 1));
    let calls = hook_call::take(db).await;
    assert_eq!(calls, ["before_save insert=false", "after_save insert=false"]);

    assert_conflict(stale.clone().update_versioned(db).await, 0);
    assert_eq!(hook_call::take(db).await, ["before_save insert=false"]);

    assert_conflict(stale.delete_versioned(db).await, 0);
    assert_eq!(hook_call::take(db).await, ["before_delete"]);

    stored.into_active_model().delete_versioned(db).await.unwrap();
    assert_eq!(hook_call::take(db).await, ["before_delete", "after_delete"]);
}

async fn a_failing_hook_stops_the_write(database: TestDatabase) {
    let db = &database.db;
    let note = write_note(db, "keep").await;

    let kept = note.delete_versioned(db).await;

    let refusal = DbErr::Custom("to be kept".to_owned());
    assert_eq!(kept, Err(VersionedError::Database(refusal)));
    assert_eq!(note::Entity::find().all(db).await.unwrap().len(), 1);
}

async fn rolling_a_savepoint_back_restores_the_version(database: TestDatabase) {
    let db = &database.db;
    let account = open_account(db).await;

    let outer = db.begin().await.unwrap();
    let inner = outer.begin().await.unwrap();
    with_balance(&account, 1).update_versioned(&inner).await.unwrap();
    inner.rollback().await.unwrap();
    assert_eq!(read_account(&outer, account.id).await, account);

    let inner = outer.begin().await.unwrap();
    let updated = with_balance(&account, 2).update_versioned(&inner).await.unwrap();
    inner.commit().await.unwrap();
    assert_eq!(read_account(&outer, account.id).await, updated);
    outer.rollback().await.unwrap();
    assert_eq!(read_account(db, account.id).await, account);
}

/// A database that cannot return what it wrote, as MySQL; a command may slip in after each write.
struct WithoutReturning<'a> {
    db: &'a DatabaseConnection,
    meanwhile: Option<&'static str>,
}

#[async_trait::async_trait]
impl ConnectionTrait for WithoutReturning<'_> {
    fn get_database_backend(&self) -> DbBackend {
        self.db.get_database_backend()
    }

    async fn execute_raw(&self, statement: Statement) -> Result<ExecResult, DbErr> {
        let result = self.db.execute_raw(statement).await?;
        if let Some(command) = self.meanwhile {
            self.db.execute_unprepared(command).await?;
        }
        Ok(result)
    }

    async fn execute_unprepared(&self, sql: &str) -> Result<ExecResult, DbErr> {
        self.db.execute_unprepared(sql).await
    }

    async fn query_one_raw(&self, statement: Statement) -> Result<Option<QueryResult>, DbErr> {
        self.db.query_one_raw(statement).await
    }

    async fn query_all_raw(&self, statement: Statement) -> Result<Vec<QueryResult>, DbErr> {
        self.db.query_all_raw(statement).await
    }

    fn support_returning(&self) -> bool {
        false
    }
}

async fn an_update_without_returning_is_read_back(database: TestDatabase) {
    open_account(&database.db).await;
    let account = another_account(&database.db).await;
    let db = WithoutReturning {
        db: &database.db,
        // What the database makes of the values, say by rounding, belongs to the row as written.
        meanwhile: Some("UPDATE account SET owner = 'ADA'"),
    };

    let updated = with_balance(&account, 5).update_versioned(&db).await;

    let expected = account::Model { id: account.id, version: 1, owner: "ADA".to_owned(), balance: 5 };
    assert_eq!(updated, Ok(expected));
    assert_conflict(with_balance(&account, 6).update_versioned(&db).await, 0);
}

async fn an_update_without_returning_that_was_overtaken_returns_what_was_sent(database: TestDatabase) {
    let account = open_account(&database.db).await;
    let db = WithoutReturning {
        db: &database.db,
        meanwhile: Some("UPDATE account SET version = version + 1, balance = 100"),
    };

    let updated = with_balance(&account, 5).update_versioned(&db).await;

    let sent = account::Model { version: 1, balance: 5, ..account };
    assert_eq!(updated, Ok(sent));
}

async fn a_partial_update_without_returning_that_was_overtaken_says_so(database: TestDatabase) {
    let account = open_account(&database.db).await;
    let db = WithoutReturning { db: &database.db, meanwhile: Some("DELETE FROM account") };
    let partial = account::ActiveModel { owner: ActiveValue::NotSet, ..with_balance(&account, 5) };

    let updated = partial.update_versioned(&db).await;

    let overtaken = VersionedError::Overtaken { table: "account", version: 1 };
    assert_eq!(updated, Err(overtaken));
}

async fn an_error_of_the_database_is_not_a_conflict(database: TestDatabase) {
    // There is no table.
    let note = document::Model { id: Uuid::from_u128(1), title: "Notes".to_owned(), version: 0 };
    let note = note.into_active_model();

    let update = note.clone().update_versioned(&database.db).await;
    assert!(matches!(update, Err(VersionedError::Database(_))));
    let delete = note.delete_versioned(&database.db).await;
    assert!(matches!(delete, Err(VersionedError::Database(_))));
}

async fn a_stale_write_at_repeatable_read_is_a_conflict(database: TestDatabase) {
    a_stale_write_is_refused(&database.db, IsolationLevel::RepeatableRead).await;
}

async fn a_stale_write_at_serializable_is_a_conflict(database: TestDatabase) {
    a_stale_write_is_refused(&database.db, IsolationLevel::Serializable).await;
}

async fn a_stale_write_is_refused(db: &DatabaseConnection, level: IsolationLevel) {
    let account = open_account(db).await;
    for (version, delete) in [(0, false), (1, true)] {
        let txn = db.begin_with_config(Some(level), None).await.unwrap();
        let read = read_account(&txn, account.id).await;
        with_balance(&read, 1).update_versioned(db).await.unwrap();

        let stale = with_balance(&read, 2);
        if delete {
            assert_refused(stale.delete_versioned(&txn).await, "40001");
        } else {
            assert_refused(stale.update_versioned(&txn).await, "40001");
        }
        txn.rollback().await.unwrap();
        assert_eq!(read.version, version);
    }

    // From its start the transaction succeeds.
    let txn = db.begin_with_config(Some(level), None).await.unwrap();
    let read = read_account(&txn, account.id).await;
    with_balance(&read, 2).update_versioned(&txn).await.unwrap();
    txn.commit().await.unwrap();

    // The database does not tell that the row is gone.
    let txn = db.begin_with_config(Some(level), None).await.unwrap();
    let read = read_account(&txn, account.id).await.into_active_model();
    read.clone().delete_versioned(db).await.unwrap();
    assert_refused(read.update_versioned(&txn).await, "40001");
    txn.rollback().await.unwrap();
}

async fn a_conflict_at_read_committed_leaves_the_transaction_usable(database: TestDatabase) {
    let db = &database.db;
    let account = open_account(db).await;
    let level = Some(IsolationLevel::ReadCommitted);
    let txn = db.begin_with_config(level, None).await.unwrap();
    let stale = read_account(&txn, account.id).await;
    with_balance(&stale, 1).update_versioned(db).await.unwrap();

    assert_conflict(with_balance(&stale, 2).update_versioned(&txn).await, 0);
    let fresh = read_account(&txn, account.id).await;
    with_balance(&fresh, 2).update_versioned(&txn).await.unwrap();
    txn.commit().await.unwrap();

    let account = read_account(db, account.id).await;
    assert_eq!((account.version, account.balance), (2, 2));
}

async fn a_deadlock_is_not_a_conflict(database: TestDatabase) {
    let db = &database.db;
    let (left, right) = (open_account(db).await, another_account(db).await);
    let (first, second) = (db.begin().await.unwrap(), db.begin().await.unwrap());
    let lock = with_balance(&left, 1).update_versioned(&first);
    lock.await.unwrap();
    let lock = with_balance(&right, 2).update_versioned(&second);
    lock.await.unwrap();

    let (one, two) = tokio::join!(
        with_balance(&right, 1).update_versioned(&first),
        with_balance(&left, 2).update_versioned(&second),
    );

    let (survivor, victim) = if one.is_ok() { (one, two) } else { (two, one) };
    survivor.unwrap();
    match victim {
        Err(VersionedError::Database(error)) => assert_eq!(database_code(&error), "40P01"),
        other => panic!("expected a deadlock, got {other:?}"),
    }
}

async fn columns_are_cast_as_in_ordinary_updates(database: TestDatabase) {
    let db = &database.db;
    for command in [
        "CREATE TYPE visit_state AS ENUM ('open', 'closed')",
        "CREATE TABLE visit (id int PRIMARY KEY, version int, state visit_state, origin inet)",
        "INSERT INTO visit VALUES (1, 0, 'open', '10.0.0.1')",
    ] {
        db.execute_unprepared(command).await.unwrap();
    }
    let read = visit::Entity::find().one(db).await.unwrap().unwrap();
    let visit = visit::ActiveModel {
        state: Set(visit::State::Closed),
        origin: Set("10.0.0.2".to_owned()),
        ..read.into_active_model()
    };

    let updated = visit.clone().update_versioned(db).await.unwrap();

    let expected =
        visit::Model { id: 1, version: 1, state: visit::State::Closed, origin: "10.0.0.2/32".to_owned() };
    assert_eq!(updated, expected);
    assert_conflict(visit.update_versioned(db).await, 0);
}

async fn a_stale_write_after_a_read_is_a_conflict(database: TestDatabase) {
    let db = &database.db;
    let account = open_account(db).await;
    for delete in [false, true] {
        let txn = db.begin().await.unwrap();
        let read = read_account(&txn, account.id).await;
        with_balance(&read, 1).update_versioned(db).await.unwrap();

        let stale = with_balance(&read, 2);
        if delete {
            assert_refused(stale.delete_versioned(&txn).await, "517");
        } else {
            assert_refused(stale.update_versioned(&txn).await, "517");
        }
        txn.rollback().await.unwrap();
    }
}

async fn a_busy_database_is_not_a_conflict(database: TestDatabase) {
    let db = &database.db;
    let account = open_account(db).await;
    let writer = db
        .begin_with_options(TransactionOptions {
            sqlite_transaction_mode: Some(SqliteTransactionMode::Immediate),
            ..Default::default()
        })
        .await
        .unwrap();
    let impatient = db.begin().await.unwrap();
    let no_wait = "PRAGMA busy_timeout = 0";
    impatient.execute_unprepared(no_wait).await.unwrap();

    let busy = with_balance(&account, 1).update_versioned(&impatient).await;

    match busy {
        Err(VersionedError::Database(error)) => assert_eq!(database_code(&error), "5"),
        other => panic!("expected a busy database, got {other:?}"),
    }
    writer.rollback().await.unwrap();
}

async fn misuse_is_told_before_any_query() {
    let nowhere = DatabaseConnection::default();

    let table = "seat";
    let seat = seat::ActiveModel { show: Set(1), revision: Set(0), ..Default::default() };
    let update = seat.clone().update_versioned(&nowhere).await;
    assert_eq!(update, Err(VersionedError::PrimaryKeyNotSet { table }));
    let delete = seat.delete_versioned(&nowhere).await;
    assert_eq!(delete, Err(VersionedError::PrimaryKeyNotSet { table }));

    let table = "account";
    let account = account::ActiveModel { id: Set(1), balance: Set(5), ..Default::default() };
    let update = account.clone().update_versioned(&nowhere).await;
    assert_eq!(update, Err(VersionedError::VersionNotSet { table }));
    let delete = account.delete_versioned(&nowhere).await;
    assert_eq!(delete, Err(VersionedError::VersionNotSet { table }));

    let table = "tagged";
    let tagged = tagged::ActiveModel { id: Set(1), version: Set("v1".to_owned()) };
    let update = tagged.update_versioned(&nowhere).await;
    assert_eq!(update, Err(VersionedError::UnsupportedVersion { table }));

    let table = "history";
    let history = history::ActiveModel { id: Set(1), version: Set(1), text: Set("a".to_owned()) };
    let update = history.update_versioned(&nowhere).await;
    assert_eq!(update, Err(VersionedError::UnsupportedVersion { table }));
}

async fn messages_name_table_and_version() {
    let table = "account";
    let conflict = VersionedError::Conflict { table, expected: 42, source: None };
    let message = conflict.to_string();
    assert!(message.contains("account") && message.contains("42"));
    assert!(conflict.source().is_none() && !conflict.is_not_found());

    let missing = VersionedError::NotFound { table };
    assert!(missing.to_string().contains("account"));
    assert!(missing.is_not_found() && !missing.is_conflict());
}
