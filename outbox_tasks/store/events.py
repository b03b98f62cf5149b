"""Reads events of leased shards and of blocked keys, and counts what waits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import LiteralString

from psycopg.rows import args_row

from outbox_tasks.event import Event
from outbox_tasks.store.connection import Connection

READ_BYTES = 8_000_000
"""What one read brings at most, in bytes as stored: payloads of a megabyte must not fill a child's memory."""

# Pending events of each leased shard by id, after a given one. Locks nothing: only the holder of the lease
# changes pending events. One index range a shard; `shard = ANY(…) ORDER BY id` would sort them all. Payloads leave
# as the bytes that go to Kafka; those of blocked keys are not fetched, for their events only change their state.
# `bytes_before` is what is stored before an event in its read, by the size of the rows as they lie, so nothing is
# fetched to be measured; reading stops with the event that comes over the budget: what is behind it was cut off.
READ_PENDING = """
SELECT e.event_id, e.id, e.shard, e.ordering_key, e.aggregate_type, e.event_type, e.topic,
       CASE WHEN b.ordering_key IS NULL THEN
            convert_to(nullif(coalesce(e.partition_key, e.aggregate_id), ''), 'UTF8') END AS key,
       CASE WHEN b.ordering_key IS NULL THEN
            coalesce(e.payload_bytes, convert_to(e.payload::text, 'UTF8')) END AS value,
       CASE WHEN b.ordering_key IS NULL THEN nullif(e.headers, '{}') END AS headers,
       e.attempts, b.ordering_key IS NOT NULL AS blocked,
       coalesce(e.bytes_before, 0) + coalesce(pg_column_size(e.payload), pg_column_size(e.payload_bytes), 0)
           > %(bytes)s AS cut
  FROM unnest(%(shards)s::smallint[], %(after)s::bigint[]) AS s (shard, after)
 CROSS JOIN LATERAL (
       SELECT o.event_id, o.id, o.shard, o.ordering_key, o.aggregate_type, o.aggregate_id, o.event_type, o.topic,
              o.partition_key, o.payload, o.payload_bytes, o.headers, o.attempts,
              sum(coalesce(pg_column_size(o.payload), 0) + coalesce(pg_column_size(o.payload_bytes), 0))
                  OVER (ORDER BY o.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
         FROM outbox AS o
        WHERE o.shard = s.shard AND o.state = 'pending' AND o.id > s.after
        ORDER BY o.id
        LIMIT %(limit)s) AS e
  LEFT JOIN outbox_blocked_key AS b ON b.ordering_key = e.ordering_key
 WHERE coalesce(e.bytes_before, 0) <= %(bytes)s
"""

# Held events of each leased key by id, as above. Locks nothing: only the holder of the key's lease changes them.
READ_HELD = """
SELECT e.event_id, e.id, e.shard, e.ordering_key, e.aggregate_type, e.event_type, e.topic,
       convert_to(nullif(coalesce(e.partition_key, e.aggregate_id), ''), 'UTF8') AS key,
       coalesce(e.payload_bytes, convert_to(e.payload::text, 'UTF8')) AS value,
       nullif(e.headers, '{}') AS headers, e.attempts, false AS blocked
  FROM unnest(%(keys)s::text[]) AS k (ordering_key)
 CROSS JOIN LATERAL (
       SELECT o.event_id, o.id, o.shard, o.ordering_key, o.aggregate_type, o.aggregate_id, o.event_type, o.topic,
              o.partition_key, o.payload, o.payload_bytes, o.headers, o.attempts,
              sum(coalesce(pg_column_size(o.payload), 0) + coalesce(pg_column_size(o.payload_bytes), 0))
                  OVER (ORDER BY o.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
         FROM outbox AS o
        WHERE o.ordering_key = k.ordering_key AND o.state = 'held'
        ORDER BY o.id
        LIMIT %(limit)s) AS e
 WHERE coalesce(e.bytes_before, 0) <= %(bytes)s
"""

# How many events wait, up to an id, from the partial indexes.
COUNT_PENDING = "SELECT count(*) FROM outbox WHERE state = 'pending' AND id <= %(up_to)s"
COUNT_HELD = "SELECT count(*) FROM outbox WHERE state = 'held' AND id <= %(up_to)s"

# The last id drawn: every event visible now has this one or a lower one.
LAST_ID = "SELECT last_value FROM outbox_id_seq"


def read_pending(connection: Connection, *, after: Mapping[int, int], limit: int) -> list[Event]:
    """Return, by id, up to `limit` pending events of each shard in `after` that are later than the id given there."""
    shards: dict[str, object] = {"shards": list(after), "after": list(after.values())}
    return _read(connection, READ_PENDING, shards | {"limit": limit, "bytes": READ_BYTES // len(after)})


def read_held(connection: Connection, *, keys: Sequence[str], limit: int) -> list[Event]:
    """Return, by id, up to `limit` held events of each ordering key."""
    return _read(connection, READ_HELD, {"keys": list(keys), "limit": limit, "bytes": READ_BYTES // len(keys)})


def _read(connection: Connection, statement: LiteralString, parameters: dict[str, object]) -> list[Event]:
    with connection.cursor(binary=True, row_factory=args_row(Event)) as cursor:
        return sorted(cursor.execute(statement, parameters), key=attrgetter("id"))


def last_id(connection: Connection) -> int:
    """Return the last id drawn so far."""
    row = connection.execute(LAST_ID).fetchone()
    return int(row[0]) if row else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How many events are not published."""

    pending: int
    held: int


def count_waiting(connection: Connection, *, up_to: int) -> Waiting:
    """Return how many events up to an id are not published."""
    pending, held = (connection.execute(count, {"up_to": up_to}).fetchone() for count in (COUNT_PENDING, COUNT_HELD))
    return Waiting(pending=pending[0] if pending else 0, held=held[0] if held else 0)
