//! Enqueue: write messages in the caller's transaction.

use std::{collections::HashSet, time::Duration};

use sea_orm::{
    ColumnType, ConnectionTrait, DbErr, SqlErr, Value,
    sea_query::{Expr, InsertStatement, OnConflict, Query, SimpleExpr},
};
use uuid::Uuid;

use super::{
    claim::milliseconds,
    claimed::{PAYLOAD, message_columns, payload_column, read_message, read_payload},
    dialect::Dialect,
    table::{Role, Roles, Table, literal},
};
use crate::{
    lifecycle::Status,
    message::{Message, MessageId},
};

/// A message and when it becomes due.
pub(crate) struct EnqueuedRow {
    pub(crate) message: Message,
    pub(crate) delay: Duration,
}

/// Inserts rows with one statement and returns the ids that were there already; those are left alone.
///
/// Only a conflict on the message id is passed over: any other error of a row is an error of the statement.
pub(crate) async fn insert<C: ConnectionTrait>(
    db: &C,
    roles: &Roles,
    dialect: Dialect,
    rows: &[EnqueuedRow],
    ids_may_exist: bool,
) -> Result<HashSet<MessageId>, DbErr> {
    let mut insert = statement(roles, dialect, rows)?;
    if !ids_may_exist {
        db.execute(&insert).await?;
        return Ok(HashSet::new());
    }
    if dialect == Dialect::MySql {
        return insert_new(db, roles, dialect, rows, insert).await;
    }
    let message_id = roles.message_id.iden();
    insert
        .on_conflict(OnConflict::column(message_id.clone()).do_nothing().to_owned())
        .returning_col(message_id);
    let mut existing: HashSet<MessageId> = rows.iter().map(|row| row.message.id).collect();
    for row in db.query_all(&insert).await? {
        existing.remove(&row.try_get_by_index::<Uuid>(0)?.into());
    }
    Ok(existing)
}

/// The same for MySQL and MariaDB, which cannot say which rows they have passed over. A statement that fails writes
/// nothing there and leaves the transaction usable: when there is a conflict, the rows go one by one.
async fn insert_new<C: ConnectionTrait>(
    db: &C,
    roles: &Roles,
    dialect: Dialect,
    rows: &[EnqueuedRow],
    all: InsertStatement,
) -> Result<HashSet<MessageId>, DbErr> {
    let is_conflict = |error: &DbErr| matches!(error.sql_err(), Some(SqlErr::UniqueConstraintViolation(_)));
    match db.execute(&all).await {
        Err(error) if is_conflict(&error) => {}
        other => return other.map(|_| HashSet::new()),
    }
    let mut existing = HashSet::new();
    for row in rows {
        let insert = statement(roles, dialect, std::slice::from_ref(row))?;
        let id = HashSet::from([row.message.id]);
        match db.execute(&insert).await {
            Ok(_) => {}
            // There may be other unique columns.
            Err(error) if is_conflict(&error) && !stored(db, roles, dialect, &id).await?.is_empty() => {
                existing.extend(id);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(existing)
}

/// The messages that are stored under these ids.
pub(crate) async fn stored<C: ConnectionTrait>(
    db: &C,
    roles: &Roles,
    dialect: Dialect,
    ids: &HashSet<MessageId>,
) -> Result<Vec<Message>, DbErr> {
    let table = Table::new(roles.clone(), dialect);
    let parameters: Vec<String> = (1..=ids.len()).map(|number| format!("${number}")).collect();
    let sql = format!(
        "SELECT {columns} FROM {name} AS o WHERE o.{message_id} IN ({ids}){latest}",
        columns = message_columns(&table, "o.", &payload_column(&table, "o.")),
        name = table.name,
        message_id = table.quoted(&roles.message_id),
        ids = parameters.join(", "),
        // A row that kept ours out may have been committed after the snapshot of this transaction.
        latest = if dialect == Dialect::MySql { " LOCK IN SHARE MODE" } else { "" },
    );
    let values = ids.iter().map(|id| Value::from(id.as_uuid())).collect();
    let rows = db.query_all_raw(dialect.statement(sql, values)).await?;
    rows.iter().map(|row| read_message(row, 0, read_payload(row, PAYLOAD, &table)?, &table)).collect()
}

fn statement(roles: &Roles, dialect: Dialect, rows: &[EnqueuedRow]) -> Result<InsertStatement, DbErr> {
    let mut statement = Query::insert();
    let mut columns = vec![&roles.message_id, &roles.topic];
    let optional = [
        &roles.aggregate_type,
        &roles.aggregate_id,
        &roles.ordering_key,
        &roles.event_type,
        &roles.content_type,
        &roles.headers,
        &roles.requeues,
    ];
    columns.extend(optional.into_iter().flatten());
    // No database makes a UUID up unless it is told to.
    let key = fills_key(roles).then_some(&roles.id);
    columns.extend(key);
    columns.extend([&roles.status, &roles.version, &roles.attempts, &roles.available_at, &roles.payload]);
    statement.into_table(roles.table.clone()).columns(columns.iter().map(|role| role.iden()));
    let pending = literal(roles.status_text(Status::Pending));
    for row in rows {
        statement
            .values(values(roles, dialect, &pending, row)?)
            .map_err(|error| DbErr::Custom(error.to_string()))?;
    }
    Ok(statement)
}

/// The values of one row, in the order of the columns.
fn values(
    roles: &Roles,
    dialect: Dialect,
    pending: &str,
    row: &EnqueuedRow,
) -> Result<Vec<SimpleExpr>, DbErr> {
    let EnqueuedRow { message, delay } = row;
    let mut values = vec![Expr::val(message.id.as_uuid()), Expr::val(message.topic.clone())];
    let key = match &roles.ordering_key {
        // It was made from the aggregate, which is stored.
        None if message.aggregate.is_some() => None,
        _ => message.ordering_key.clone(),
    };
    for (what, role, value) in [
        ("aggregate type", &roles.aggregate_type, message.aggregate_type().map(str::to_owned)),
        ("aggregate id", &roles.aggregate_id, message.aggregate_id().map(str::to_owned)),
        ("ordering key", &roles.ordering_key, key),
        ("event type", &roles.event_type, message.event_type.clone()),
    ] {
        match role {
            Some(_) => values.push(Expr::val(value)),
            None if value.is_none() => {}
            None => return Err(no_column(roles, what)),
        }
    }
    if roles.content_type.is_some() {
        values.push(Expr::val(message.content_type.clone()));
    }
    match &roles.headers {
        Some(role) => {
            let headers = serde_json::to_vec(&message.headers);
            let headers = headers.map_err(|error| DbErr::Json(error.to_string()))?;
            values.push(content(role, dialect, "headers", &headers)?);
        }
        None if message.headers.is_empty() => {}
        None => return Err(no_column(roles, "headers")),
    }
    if roles.requeues.is_some() {
        values.push(Expr::val(0));
    }
    if fills_key(roles) {
        values.push(Expr::val(Uuid::now_v7()));
    }
    values.extend([
        Expr::cust(pending.to_owned()),
        Expr::val(0_i64),
        Expr::val(0),
        due(dialect, *delay),
        content(&roles.payload, dialect, "payload", &message.payload)?,
    ]);
    Ok(values)
}

/// Whether the key is a UUID of its own.
fn fills_key(roles: &Roles) -> bool {
    roles.has_uuid_key() && roles.id.name != roles.message_id.name
}

/// Bytes, as the type of the column asks for them.
fn content(role: &Role, dialect: Dialect, what: &str, bytes: &[u8]) -> Result<SimpleExpr, DbErr> {
    let refused =
        |error: &dyn std::fmt::Display| DbErr::Type(format!("the {what} does not fit its column: {error}"));
    if !role.is_json() && !role.is_text() {
        return Ok(Expr::val(bytes.to_vec()));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| refused(&error))?;
    if role.is_text() {
        return Ok(Expr::val(text));
    }
    serde_json::from_str::<serde::de::IgnoredAny>(text).map_err(|error| refused(&error))?;
    // As a text, which keeps numbers that are too long for those of Rust.
    Ok(match dialect {
        Dialect::Postgres if matches!(role.column_type, ColumnType::Json) => {
            Expr::cust_with_values("$1::json", [text])
        }
        Dialect::Postgres => Expr::cust_with_values("$1::jsonb", [text]),
        Dialect::MySql | Dialect::Sqlite => Expr::val(text),
    })
}

fn no_column(roles: &Roles, what: &str) -> DbErr {
    DbErr::Type(format!("the table {} has no column for the {what} of a message", roles.name))
}

/// By the database's clock, as everything that is compared with it later.
fn due(dialect: Dialect, delay: Duration) -> SimpleExpr {
    if delay.is_zero() {
        Expr::cust(dialect.now())
    } else {
        // Bound, so that each delay does not make another statement.
        let placeholder = match dialect {
            Dialect::Postgres => "$1::bigint",
            Dialect::MySql | Dialect::Sqlite => "?",
        };
        Expr::cust_with_values(dialect.clock_plus_ms(placeholder), [milliseconds(delay)])
    }
}
