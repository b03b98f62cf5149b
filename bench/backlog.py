"""Writes backlogs: many pending events at once, and days full of published ones."""

import psycopg

from bench.sizes import KEYS, PAYLOAD_BYTES, ROW_OVERHEAD_BYTES

# Keys in no order that repeats, so that those of neighbouring batches meet, as they do in life; always the same ones.
PENDING = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
SELECT 'order', ((hashint4(i) & 2147483647) %% %(keys)s)::text, 'placed',
       jsonb_build_object('i', i, 'pad', repeat('x', %(pad)s))
  FROM generate_series(1, %(events)s) AS i
"""

# A day's rows: UUIDv7 of that day in the order of time; no payload, so that many fit.
PUBLISHED = """
INSERT INTO outbox (event_id, aggregate_type, aggregate_id, event_type, state, created_at, published_at)
SELECT (lpad(to_hex((extract(epoch FROM day) * 1000 + i * 86400000.0 / %(rows)s - 1)::bigint), 12, '0')
        || '7000' || '8000' || lpad(to_hex(i), 12, '0'))::uuid,
       'past', (i %% %(keys)s)::text, 'placed', 'published', day, day
  FROM generate_series(1, %(rows)s) AS i,
       LATERAL (SELECT (((now() AT TIME ZONE 'UTC')::date - %(ago)s)::timestamp AT TIME ZONE 'UTC') AS day) AS of
"""

MAKE_PARTITION = "SELECT outbox_make_partition((now() AT TIME ZONE 'UTC')::date - %(ago)s)"

CHUNK_BYTES = 200_000_000
"""So much payload is written by one statement at most."""


def write_backlog(database_url: str, events: int, *, keys: int = KEYS, payload_bytes: int = PAYLOAD_BYTES) -> None:
    """Write pending events, over so many keys."""
    chunk = max(1, CHUNK_BYTES // payload_bytes)
    with psycopg.connect(database_url, autocommit=True, options="-c log_statement=none") as connection:
        for start in range(0, events, chunk):
            values = {"keys": keys, "pad": payload_bytes - ROW_OVERHEAD_BYTES, "events": min(chunk, events - start)}
            connection.execute(PENDING, values)
        connection.execute("ANALYZE outbox")


def fill_past_days(database_url: str, *, days: int, rows: int) -> None:
    """Make the partitions of the days before today, each with so many published rows."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        for ago in range(1, days + 1):
            connection.execute(MAKE_PARTITION, {"ago": ago})
            connection.execute(PUBLISHED, {"ago": ago, "rows": rows, "keys": KEYS})
        connection.execute("VACUUM ANALYZE outbox")  # else autovacuum does so while we measure
