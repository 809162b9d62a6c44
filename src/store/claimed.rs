//! What a claim wins, and how it is read.

use std::collections::BTreeMap;

use bytes::Bytes;
use sea_orm::{ColumnType, DbErr, QueryResult, TryGetError, TryGetable};
use tokio::time::Instant;
use uuid::Uuid;

use super::{
    Fence, Position, Settlement, StoreError,
    claim::Trust,
    dialect::Dialect,
    fenced::output_id,
    table::{Role, Roles, Table},
};
use crate::{
    lifecycle::{EXPIRED, Outcome, RetryPolicy, settle},
    message::Message,
};

/// A row that is ours until its lease is over. It cannot be cloned, and settling consumes it: a claim is
/// settled once.
#[derive(Debug)]
#[must_use = "a claim that is not settled waits for the sweep"]
pub struct Claim {
    fence: Fence,
    attempts: u32,
    suspect: bool,
    trusted_until: Instant,
    message: Message,
    missing: Option<u64>,
}

impl Claim {
    /// The row and the version that the claim gave it.
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// Which attempt this is, counted from 1.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Whether workers may have died of it: a sweep returned it with two or more attempts spent. It is to be
    /// published with nothing else in flight in the process.
    pub fn is_suspect(&self) -> bool {
        self.suspect
    }

    /// Until when the lease certainly lasts: reckoned from before the statement was sent, so that it ends
    /// early rather than late. A renewal is for the caller to remember.
    pub fn trusted_until(&self) -> Instant {
        self.trusted_until
    }

    /// What to publish.
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// How many bytes the payload has, if it was larger than [`ClaimRequest::inline_bytes`](super::ClaimRequest) and is
    /// still to be [loaded](super::Store::load). Until then the message has an empty one.
    pub fn missing_payload(&self) -> Option<u64> {
        self.missing
    }

    /// Completes the message.
    pub fn set_payload(&mut self, payload: Bytes) {
        self.message.payload = payload;
        self.missing = None;
    }

    /// Decides what becomes of the row. Nothing is written until
    /// [`Store::settle`](super::Store::settle) has it.
    pub fn settle(self, outcome: Outcome, policy: &RetryPolicy, random: f64) -> Settlement {
        Settlement::new(self.fence, settle(self.attempts, outcome, policy, random))
    }
}

/// A row that was won and cannot be read. It fails, with the reason; its neighbours go on.
#[derive(Debug)]
pub struct Unreadable {
    fence: Fence,
    reason: String,
    ordering_key: Option<String>,
}

impl Unreadable {
    /// The row and the version that the claim gave it.
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// Its ordering key, if at least that can be read. With order per key and
    /// [`Hold`](super::BehindFailed::Hold) the messages of this key behind it are to be released.
    pub fn ordering_key(&self) -> Option<&str> {
        self.ordering_key.as_deref()
    }

    /// Fails the row.
    pub fn settle(self) -> Settlement {
        let outcome = Outcome::Permanent(format!("the row cannot be read: {}", self.reason));
        Settlement::new(self.fence, settle(1, outcome, &RetryPolicy::default(), 0.0))
    }
}

/// What came of claiming a batch.
#[derive(Debug, Default)]
pub struct Claimed {
    /// The rows won, by id.
    pub claims: Vec<Claim>,
    /// Rows won that cannot be read.
    pub unreadable: Vec<Unreadable>,
    /// How many rows were read at the version that somebody else changed first.
    pub lost_races: u64,
    /// Whether there may be more to claim at once.
    pub more: bool,
    /// Where to go on, to leave behind what cannot be claimed or is claimed already: for
    /// [`ClaimRequest::after`](super::ClaimRequest::after). `None`: stay where you were.
    ///
    /// What becomes claimable behind that place is not seen from there: begin at the head again every second or so.
    pub next: Option<Position>,
    /// The last place among the rows won.
    pub(super) last: Option<Position>,
}

impl Claimed {
    /// How many rows were won.
    pub(super) fn len(&self) -> usize {
        self.claims.len() + self.unreadable.len()
    }

    /// The rows won.
    pub(super) fn fences(&self) -> impl Iterator<Item = Fence> + '_ {
        let claims = self.claims.iter().map(Claim::fence);
        claims.chain(self.unreadable.iter().map(Unreadable::fence))
    }

    /// Reads each row by itself: one that cannot be read harms no other.
    pub(super) fn read(rows: &[QueryResult], table: &Table, trust: Trust) -> Result<Self, StoreError> {
        let mut claimed = Claimed { claims: Vec::with_capacity(rows.len()), ..Claimed::default() };
        for row in rows {
            let fence = match Fence::read(row, table) {
                Ok(fence) => fence,
                Err(error) => {
                    tracing::error!(%error, "a row of {table:?} has no readable id and version: nobody can settle it");
                    continue;
                }
            };
            // A time that cannot be read is no place to go on from.
            claimed.last = claimed.last.max(Position::read(row, 2, 0, table).ok());
            match Claim::read(row, fence, table, trust) {
                Ok(claim) => claimed.claims.push(claim),
                Err(error) => claimed.unreadable.push(Unreadable {
                    fence,
                    reason: reason(error),
                    ordering_key: row.try_get_by_index(MESSAGE + ORDERING_KEY).ok().flatten(),
                }),
            }
        }
        // RETURNING has no order.
        claimed.claims.sort_unstable_by_key(|claim| claim.fence);
        Ok(claimed)
    }
}

impl Claim {
    fn read(row: &QueryResult, fence: Fence, table: &Table, trust: Trust) -> Result<Self, DbErr> {
        let attempts: Option<i64> = row.try_get_by_index(3)?;
        let attempts = attempts.ok_or_else(|| DbErr::Type("attempts is null".to_owned()))?;
        let attempts = u32::try_from(attempts).ok().filter(|attempts| *attempts > 0).ok_or_else(|| {
            DbErr::Type(format!("attempts is {}, before this one", attempts.wrapping_sub(1)))
        })?;
        let missing = row.try_get_by_index::<Option<i64>>(5)?.map(i64::unsigned_abs);
        let payload = match missing {
            Some(_) => Vec::new(),
            None => read_payload(row, MESSAGE + PAYLOAD, table)?,
        };
        Ok(Self {
            fence,
            attempts,
            suspect: row.try_get_by_index::<i64>(4)? == 1,
            trusted_until: trust.0,
            message: read_message(row, MESSAGE, payload, table)?,
            missing,
        })
    }
}

/// Says what a person needs, and not what went through which layers.
fn reason(error: DbErr) -> String {
    match error {
        DbErr::Type(reason) | DbErr::Json(reason) => reason,
        other => other.to_string(),
    }
}

/// What a claim returns of `o`, in the order in which it is read here. Payloads of more bytes than `inline` are left
/// out.
pub(super) fn columns(table: &Table, inline: Option<u64>) -> String {
    let Table { dialect, version, attempts, last_error, .. } = table;
    // SQLite knows the columns of RETURNING only by their bare names.
    let o = if *dialect == Dialect::Sqlite { "" } else { "o." };
    let id = if *dialect == Dialect::Sqlite { table.id.clone() } else { output_id(table) };
    let (mut payload, mut missing) = (payload_column(table, o), None);
    if let Some(inline) = inline {
        let bytes = payload_bytes(table, o);
        payload = format!("CASE WHEN {bytes} <= {inline} THEN {payload} END");
        missing = Some(format!("CASE WHEN {bytes} > {inline} THEN {bytes} END"));
    }
    format!(
        "\
        {id}, {version}, {available_at}, {attempts_read}, \
        {suspect}, {missing}, {message}",
        version = dialect.integer(&format!("{o}{version}")),
        available_at = Position::output(table, o),
        attempts_read = dialect.integer(&format!("{o}{attempts}")),
        suspect = dialect.integer(&format!(
            "CASE WHEN {o}{attempts} > 2 AND {o}{last_error} LIKE '{EXPIRED}%' THEN 1 ELSE 0 END"
        )),
        missing = table.dialect.integer(&missing.unwrap_or_else(|| "NULL".to_owned())),
        message = message_columns(table, o, &payload),
    )
}

/// The place of the first column of the message.
const MESSAGE: usize = 6;

/// How many columns there are in all.
pub(super) const COLUMNS: usize = MESSAGE + PAYLOAD + 1;

/// The place of the ordering key among the columns of a message.
const ORDERING_KEY: usize = 4;

/// The place of the payload among them.
pub(super) const PAYLOAD: usize = 8;

/// The columns that make a message, in the order in which they are read here.
pub(super) fn message_columns(table: &Table, prefix: &str, payload: &str) -> String {
    let roles = &table.roles;
    let column = |role: &Role| format!("{prefix}{}", table.quoted(role));
    let text = |role: &Role| table.text(role, prefix);
    let optional = |role: &Option<Role>| match role {
        Some(role) => text(role),
        None => table.dialect.text("NULL"),
    };
    [
        column(&roles.message_id),
        text(&roles.topic),
        optional(&roles.aggregate_type),
        optional(&roles.aggregate_id),
        optional(&roles.ordering_key),
        optional(&roles.event_type),
        optional(&roles.content_type),
        optional(&roles.headers),
        payload.to_owned(),
    ]
    .join(", ")
}

/// The payload as [`read_payload`] reads it.
pub(super) fn payload_column(table: &Table, prefix: &str) -> String {
    let role = &table.roles.payload;
    let column = format!("{prefix}{}", table.quoted(role));
    if is_bytes(role) || role.is_text() { column } else { table.dialect.text(&column) }
}

fn payload_bytes(table: &Table, prefix: &str) -> String {
    let payload = payload_column(table, prefix);
    match table.dialect {
        Dialect::Postgres | Dialect::MySql => format!("octet_length({payload})"),
        // Of bytes the length is known without reading them.
        Dialect::Sqlite if is_bytes(&table.roles.payload) => format!("length({payload})"),
        Dialect::Sqlite => format!("length(CAST({payload} AS BLOB))"),
    }
}

pub(super) fn read_payload(row: &QueryResult, index: usize, table: &Table) -> Result<Vec<u8>, DbErr> {
    let role = &table.roles.payload;
    if is_bytes(role) { get(row, index, role) } else { Ok(get::<String>(row, index, role)?.into_bytes()) }
}

/// Reads a message from its columns, the first of which stands at `first`.
pub(super) fn read_message(
    row: &QueryResult,
    first: usize,
    payload: Vec<u8>,
    table: &Table,
) -> Result<Message, DbErr> {
    let roles = &table.roles;
    let text = |place: usize, role: &Option<Role>| match role {
        Some(role) => get::<Option<String>>(row, first + place, role),
        None => Ok(None),
    };
    let id: Uuid = get(row, first, &roles.message_id)?;
    Ok(Message {
        id: id.into(),
        topic: get(row, first + 1, &roles.topic)?,
        aggregate: text(2, &roles.aggregate_type)?.zip(text(3, &roles.aggregate_id)?),
        ordering_key: text(ORDERING_KEY, &roles.ordering_key)?,
        event_type: text(5, &roles.event_type)?,
        content_type: text(6, &roles.content_type)?.unwrap_or_else(|| default_content_type(roles).to_owned()),
        headers: headers(text(7, &roles.headers)?)?,
        payload: payload.into(),
    })
}

/// The value of a column, or what is wrong with it, by its name.
fn get<T: TryGetable>(row: &QueryResult, index: usize, role: &Role) -> Result<T, DbErr> {
    T::try_get_by(row, index).map_err(|error| match error {
        TryGetError::Null(_) => DbErr::Type(format!("{} is null", role.name)),
        TryGetError::DbErr(error) => DbErr::Type(format!("{}: {}", role.name, reason(error))),
    })
}

/// What of a message is found again when it is read from a table that has no column for the rest, and whose JSON is
/// not kept byte for byte.
pub(crate) fn as_stored(roles: &Roles, message: &Message) -> Message {
    let mut message = message.clone();
    if roles.content_type.is_none() {
        message.content_type = default_content_type(roles).to_owned();
    }
    if roles.ordering_key.is_none() {
        message.ordering_key = None;
    }
    if roles.payload.is_json()
        && let Ok(json) = serde_json::from_slice::<serde_json::Value>(&message.payload)
    {
        message.payload = json.to_string().into();
    }
    message
}

fn is_bytes(role: &Role) -> bool {
    matches!(
        role.column_type,
        ColumnType::Blob | ColumnType::Binary(_) | ColumnType::VarBinary(_) | ColumnType::Custom(_)
    )
}

fn default_content_type(roles: &Roles) -> &'static str {
    if roles.payload.is_json() { "application/json" } else { "application/octet-stream" }
}

fn headers(json: Option<String>) -> Result<BTreeMap<String, String>, DbErr> {
    match json.as_deref() {
        None | Some("{}") => Ok(BTreeMap::new()),
        Some(json) => serde_json::from_str(json)
            .map_err(|error| DbErr::Json(format!("headers are not an object of texts: {error}"))),
    }
}
