-- MySQL and MariaDB. Everything in one statement that may be repeated: it commits by itself, and a
-- migration that was cut off before its row in the history was written runs again.
CREATE TABLE IF NOT EXISTS outbox_message (
    id             bigint       NOT NULL AUTO_INCREMENT,
    -- RANDOM_BYTES is missing from MariaDB 10.6.
    message_id     binary(16)   NOT NULL DEFAULT (UNHEX(REPLACE(UUID(), '-', ''))),
    topic          varchar(255) NOT NULL,
    aggregate_type varchar(100),
    aggregate_id   varchar(255),
    ordering_key   varchar(255),
    event_type     varchar(100),
    content_type   varchar(100) NOT NULL DEFAULT 'application/json',
    headers        json         NOT NULL DEFAULT ('{}'),
    status         varchar(16)  NOT NULL DEFAULT 'PENDING',
    version        bigint       NOT NULL DEFAULT 0,
    attempts       integer      NOT NULL DEFAULT 0,
    requeues       integer      NOT NULL DEFAULT 0,
    -- Not timestamp: that ends in 2038, and what it shows depends on the session's time zone.
    available_at   datetime(6)  DEFAULT (UTC_TIMESTAMP(6)),
    claimed_by     varchar(100),
    lease_until    datetime(6),
    sent_at        datetime(6),
    failed_at      datetime(6),
    created_at     datetime(6)  NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    last_error     text,
    payload        longblob     NOT NULL,
    CONSTRAINT outbox_message_pkey PRIMARY KEY (id),
    CONSTRAINT outbox_message_message_id_key UNIQUE (message_id),
    -- A comparison passes over spaces at the end, a pattern does not.
    CONSTRAINT outbox_message_status CHECK (
        status IN ('PENDING', 'PROCESSING', 'SENT', 'FAILED') AND status NOT LIKE '% '
    ),
    CONSTRAINT outbox_message_counts CHECK (version >= 0 AND attempts >= 0 AND requeues >= 0),
    CONSTRAINT outbox_message_headers CHECK (JSON_TYPE(headers) = 'OBJECT'),
    CONSTRAINT outbox_message_available CHECK ((available_at IS NULL) = (status IN ('SENT', 'FAILED'))),
    CONSTRAINT outbox_message_claim CHECK (
        (lease_until IS NOT NULL) = (status = 'PROCESSING')
        AND (claimed_by IS NOT NULL) = (status = 'PROCESSING')
    ),
    CONSTRAINT outbox_message_finish CHECK (
        (sent_at IS NOT NULL) = (status = 'SENT')
        AND (failed_at IS NOT NULL) = (status = 'FAILED')
    ),
    -- There are no partial indexes. Finished rows stand together at the null end of this one, out of
    -- the way of a range.
    KEY outbox_message_due (available_at, id),
    -- sent_at before id: otherwise the head of a key is looked for among all that it has ever sent.
    KEY outbox_message_key (ordering_key, sent_at, id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
