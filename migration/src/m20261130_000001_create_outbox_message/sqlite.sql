CREATE TABLE outbox_message (
    -- AUTOINCREMENT: without it the id of a deleted row is given out again.
    id             integer NOT NULL PRIMARY KEY AUTOINCREMENT,
    message_id     blob    NOT NULL DEFAULT (randomblob(16)),
    topic          text    NOT NULL,
    aggregate_type text,
    aggregate_id   text,
    ordering_key   text,
    event_type     text,
    content_type   text    NOT NULL DEFAULT 'application/json',
    headers        text    NOT NULL DEFAULT '{}',
    status         text    NOT NULL DEFAULT 'PENDING',
    version        integer NOT NULL DEFAULT 0,
    attempts       integer NOT NULL DEFAULT 0,
    requeues       integer NOT NULL DEFAULT 0,
    -- Times are texts in the one form that compares correctly with values bound by SeaORM;
    -- CURRENT_TIMESTAMP has another and does not.
    available_at   text    DEFAULT (strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now')),
    claimed_by     text,
    lease_until    text,
    sent_at        text,
    failed_at      text,
    created_at     text    NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now')),
    last_error     text,
    payload        blob    NOT NULL,
    CONSTRAINT outbox_message_message_id_key UNIQUE (message_id),
    CONSTRAINT outbox_message_message_id CHECK (length(message_id) = 16),
    CONSTRAINT outbox_message_status CHECK (status IN ('PENDING', 'PROCESSING', 'SENT', 'FAILED')),
    CONSTRAINT outbox_message_counts CHECK (version >= 0 AND attempts >= 0 AND requeues >= 0),
    CONSTRAINT outbox_message_headers CHECK (json_valid(headers) AND json_type(headers) = 'object'),
    CONSTRAINT outbox_message_times CHECK (
        available_at LIKE '____-__-__T__:__:__%+00:00' AND lease_until LIKE '____-__-__T__:__:__%+00:00'
    ),
    CONSTRAINT outbox_message_available CHECK ((available_at IS NULL) = (status IN ('SENT', 'FAILED'))),
    CONSTRAINT outbox_message_claim CHECK (
        (lease_until IS NOT NULL) = (status = 'PROCESSING')
        AND (claimed_by IS NOT NULL) = (status = 'PROCESSING')
    ),
    CONSTRAINT outbox_message_finish CHECK (
        (sent_at IS NOT NULL) = (status = 'SENT')
        AND (failed_at IS NOT NULL) = (status = 'FAILED')
    )
) STRICT; -- Otherwise a text in a number would only be found when a relay trips over it.

CREATE INDEX outbox_message_due ON outbox_message (available_at, id)
    WHERE available_at IS NOT NULL;

CREATE INDEX outbox_message_key ON outbox_message (ordering_key, id)
    WHERE ordering_key IS NOT NULL AND sent_at IS NULL;
