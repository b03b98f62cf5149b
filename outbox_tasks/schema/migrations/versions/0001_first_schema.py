"""The first schema: events by day, shards, blocked keys, dead letters.

Everything is one list of plain statements, so that a DBA reads with `--sql` what will run.
"""

from alembic import op

revision = "0001"
down_revision = None

FUNCTIONS = [
    # Ids that carry their time. Native from PostgreSQL 18 on; before, the milliseconds, the version digit
    # and the random rest of a version 4 id, whose variant digit is right already (RFC 9562, section 5.7).
    """
DO $migration$
BEGIN
    IF current_setting('server_version_num')::int >= 180000 THEN
        CREATE FUNCTION outbox_uuidv7() RETURNS uuid LANGUAGE sql VOLATILE PARALLEL SAFE
        AS 'SELECT uuidv7()';
    ELSE
        CREATE FUNCTION outbox_uuidv7() RETURNS uuid LANGUAGE sql VOLATILE PARALLEL SAFE
        AS $function$
            SELECT (lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0')
                    || '7' || substr(replace(gen_random_uuid()::text, '-', ''), 14))::uuid
        $function$;
    END IF;
END
$migration$
""",
    # The smallest UUIDv7 of a day (UTC): the bound between two partitions.
    """
CREATE FUNCTION outbox_day_floor(day date) RETURNS uuid LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
AS $function$
    SELECT (lpad(to_hex((day - DATE '1970-01-01')::bigint * 86400000), 12, '0') || repeat('0', 20))::uuid
$function$
""",
    # Makes the partition of a day unless it is there; true if made. ATTACH takes SHARE UPDATE EXCLUSIVE on
    # outbox, so writers go on; CREATE TABLE … PARTITION OF would take ACCESS EXCLUSIVE.
    """
CREATE FUNCTION outbox_make_partition(day date) RETURNS boolean LANGUAGE plpgsql
AS $function$
DECLARE
    name text := 'outbox_' || to_char(day, 'YYYYMMDD');
BEGIN
    IF to_regclass(quote_ident(name)) IS NOT NULL THEN
        RETURN false;
    END IF;
    EXECUTE format('CREATE TABLE %I (LIKE outbox INCLUDING ALL)', name);
    EXECUTE format('ALTER TABLE outbox ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
                   name, outbox_day_floor(day), outbox_day_floor(day + 1));
    RETURN true;
END
$function$
""",
]

TABLES = [
    "CREATE SEQUENCE outbox_id_seq CACHE 1",
    # shard repeats the expression of ordering_key: a generated column may not use another one.
    """
CREATE TABLE outbox (
    event_id uuid NOT NULL DEFAULT outbox_uuidv7(),
    id bigint NOT NULL DEFAULT nextval('outbox_id_seq'),
    aggregate_type text NOT NULL,
    aggregate_id text NOT NULL,
    event_type text NOT NULL,
    topic text,
    partition_key text,
    payload jsonb,
    payload_bytes bytea,
    headers jsonb NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    published_at timestamptz,
    state text NOT NULL DEFAULT 'pending',
    attempts integer NOT NULL DEFAULT 0,
    last_error text,
    ordering_key text NOT NULL GENERATED ALWAYS AS (
        coalesce(topic, aggregate_type) || '/' || coalesce(partition_key, aggregate_id)) STORED,
    shard smallint NOT NULL GENERATED ALWAYS AS ((hashtextextended(
        coalesce(topic, aggregate_type) || '/' || coalesce(partition_key, aggregate_id), 0) & 63)::smallint) STORED,
    CONSTRAINT outbox_pkey PRIMARY KEY (event_id),
    CONSTRAINT outbox_aggregate_type_not_empty CHECK (aggregate_type <> ''),
    CONSTRAINT outbox_aggregate_id_not_empty CHECK (aggregate_id <> ''),
    CONSTRAINT outbox_event_type_not_empty CHECK (event_type <> ''),
    CONSTRAINT outbox_topic_not_empty CHECK (topic <> ''),
    CONSTRAINT outbox_at_most_one_payload CHECK (payload IS NULL OR payload_bytes IS NULL),
    CONSTRAINT outbox_headers_are_an_object CHECK (jsonb_typeof(headers) = 'object'),
    CONSTRAINT outbox_header_values_are_text CHECK (
        NOT jsonb_path_exists(headers, 'strict $.* ? (@.type() != "string")', '{}', true)),
    -- An index entry has room for some 2,700 bytes: longer names would break an insert, or a settlement, later on.
    CONSTRAINT outbox_names_fit_an_index CHECK (
        octet_length(aggregate_type) <= 1000 AND octet_length(aggregate_id) <= 1000
        AND octet_length(event_type) <= 1000 AND octet_length(topic) <= 249 AND octet_length(partition_key) <= 1000),
    CONSTRAINT outbox_state_known CHECK (state IN ('pending', 'held', 'published'))
) PARTITION BY RANGE (event_id)
""",
    "ALTER SEQUENCE outbox_id_seq OWNED BY outbox.id",
    # Not compressed: then the size of a payload as it lies is the size that a read brings, and reads can be bounded.
    "ALTER TABLE outbox ALTER payload SET STORAGE EXTERNAL, ALTER payload_bytes SET STORAGE EXTERNAL",
    "CREATE INDEX outbox_pending ON outbox (shard, id) WHERE state = 'pending'",
    "CREATE INDEX outbox_held ON outbox (ordering_key, id) WHERE state = 'held'",
    "CREATE INDEX outbox_aggregate ON outbox (aggregate_type, aggregate_id, id)",
    "CREATE TABLE outbox_default PARTITION OF outbox DEFAULT",
    # A token proves the lease. A token whose time has passed belongs to a run that never released it. takeovers
    # counts those since the last progress; suspect is the event a run was about to handle, on its own, when it died.
    """
CREATE TABLE outbox_shard (
    shard smallint PRIMARY KEY CHECK (shard BETWEEN 0 AND 63),
    lease_token uuid,
    lease_owner text,
    leased_until timestamptz,
    claimed_at timestamptz,
    takeovers integer NOT NULL DEFAULT 0,
    suspect uuid,
    CONSTRAINT outbox_shard_lease_whole CHECK ((lease_token IS NULL) = (leased_until IS NULL))
) WITH (fillfactor = 50)
""",
    "INSERT INTO outbox_shard (shard) SELECT generate_series(0, 63)",
    # refused and misconfigured wait for retry_at; exhausted waits to be made a dead letter, dead for a person.
    """
CREATE TABLE outbox_blocked_key (
    ordering_key text PRIMARY KEY,
    topic text,
    event_id uuid NOT NULL,
    kind text NOT NULL CHECK (kind IN ('refused', 'misconfigured', 'exhausted', 'dead')),
    reason text NOT NULL,
    blocked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    retry_at timestamptz,
    takeovers integer NOT NULL DEFAULT 0,
    lease_token uuid,
    lease_owner text,
    leased_until timestamptz,
    CONSTRAINT outbox_blocked_key_lease_whole CHECK ((lease_token IS NULL) = (leased_until IS NULL)),
    CONSTRAINT outbox_blocked_key_has_a_time CHECK ((kind IN ('refused', 'misconfigured')) = (retry_at IS NOT NULL))
) WITH (fillfactor = 50)
""",
    "CREATE INDEX outbox_blocked_key_due ON outbox_blocked_key (retry_at)",
    "CREATE INDEX outbox_blocked_key_exhausted ON outbox_blocked_key (blocked_at) WHERE kind = 'exhausted'",
    # Keys that wait for one thing to be put right: a topic, or a route. One of them is tried, for all.
    """
CREATE INDEX outbox_blocked_key_cause ON outbox_blocked_key (md5(coalesce(topic, reason)), retry_at)
 WHERE kind = 'misconfigured'
""",
    "CREATE INDEX outbox_blocked_key_leased ON outbox_blocked_key (lease_token) WHERE lease_token IS NOT NULL",
    # Keys that runs died with are tried alone, and first.
    """
CREATE INDEX outbox_blocked_key_died ON outbox_blocked_key (retry_at)
 WHERE takeovers > 0 OR lease_token IS NOT NULL
""",
    """
CREATE TABLE outbox_dead_letter (
    event_id uuid PRIMARY KEY,
    id bigint NOT NULL,
    aggregate_type text NOT NULL,
    aggregate_id text NOT NULL,
    event_type text NOT NULL,
    topic text,
    partition_key text,
    payload jsonb,
    payload_bytes bytea,
    headers jsonb NOT NULL,
    created_at timestamptz NOT NULL,
    attempts integer NOT NULL,
    error text NOT NULL,
    ordering_key text NOT NULL,
    sent_to text,
    died_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    deaths integer NOT NULL DEFAULT 1,
    resolution text CHECK (resolution IN ('redriven', 'discarded')),
    resolved_at timestamptz,
    resolved_reason text,
    CONSTRAINT outbox_dead_letter_resolution_whole CHECK ((resolution IS NULL) = (resolved_at IS NULL))
)
""",
    "ALTER TABLE outbox_dead_letter ALTER payload SET STORAGE EXTERNAL, ALTER payload_bytes SET STORAGE EXTERNAL",
    "CREATE INDEX outbox_dead_letter_key ON outbox_dead_letter (ordering_key, id)",
    "CREATE INDEX outbox_dead_letter_open ON outbox_dead_letter (died_at) WHERE resolution IS NULL",
    "SELECT outbox_make_partition(((now() AT TIME ZONE 'UTC')::date + day)) FROM generate_series(0, 7) AS day",
]


def upgrade() -> None:
    for statement in FUNCTIONS + TABLES:
        op.execute(statement.strip())


def downgrade() -> None:
    """Drop everything, events included."""
    for table in ("outbox", "outbox_shard", "outbox_blocked_key", "outbox_dead_letter"):
        op.execute(f"DROP TABLE {table}")
    for function in ("outbox_make_partition(date)", "outbox_day_floor(date)", "outbox_uuidv7()"):
        op.execute(f"DROP FUNCTION {function}")
