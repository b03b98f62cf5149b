"""What there is to see: how much waits, where, since when, who has which lease."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from psycopg.rows import class_row, dict_row

from outbox_tasks.store.connection import Connection

# Pending events of each shard and the oldest of them, from the partial index; and who has its lease.
SHARDS = """
SELECT s.shard, s.lease_owner, s.leased_until, s.takeovers, s.suspect,
       coalesce(p.pending, 0) AS pending, oldest.created_at AS oldest
  FROM outbox_shard AS s
  LEFT JOIN (SELECT shard, count(*) AS pending FROM outbox WHERE state = 'pending' GROUP BY shard) AS p
         ON p.shard = s.shard
  LEFT JOIN LATERAL (
       SELECT o.created_at FROM outbox AS o
        WHERE o.shard = s.shard AND o.state = 'pending' ORDER BY o.id LIMIT 1) AS oldest ON true
 ORDER BY s.shard
"""

# Blocked keys by kind, with what they hold: counted from the partial index of held events.
BLOCKED = """
SELECT b.kind, count(*) AS keys, coalesce(sum(h.held), 0)::bigint AS held,
       min(b.blocked_at) AS since, min(h.oldest) AS oldest
  FROM outbox_blocked_key AS b
  LEFT JOIN (SELECT ordering_key, count(*) AS held, min(created_at) AS oldest
               FROM outbox WHERE state = 'held' GROUP BY ordering_key) AS h
         ON h.ordering_key = b.ordering_key
 GROUP BY b.kind ORDER BY b.kind
"""

DEAD = "SELECT count(*) FROM outbox_dead_letter WHERE resolution IS NULL"

# Partitions as the catalogue knows them: size on disk, rows as last estimated (-1: never), what waits in each.
PARTITIONS = """
SELECT c.relname AS name, pg_get_expr(c.relpartbound, c.oid) = 'DEFAULT' AS is_default,
       CASE WHEN c.relname ~ '^outbox_[0-9]{8}$' THEN to_date(right(c.relname, 8), 'YYYYMMDD')::text END AS day,
       pg_total_relation_size(c.oid) AS bytes, c.reltuples::bigint AS rows,
       coalesce(u.unpublished, 0) AS unpublished
  FROM pg_inherits AS i
  JOIN pg_class AS c ON c.oid = i.inhrelid
  LEFT JOIN (SELECT tableoid, count(*) AS unpublished FROM outbox
              WHERE state IN ('pending', 'held') GROUP BY tableoid) AS u ON u.tableoid = c.oid
 WHERE i.inhparent = 'outbox'::regclass
 ORDER BY is_default, c.relname
"""

# The whole life of an event, wherever it is now.
EVENT = """
SELECT to_jsonb(o) - 'payload' - 'payload_bytes' AS event, o.tableoid::regclass::text AS partition,
       to_jsonb(b) AS blocked_key, to_jsonb(s) AS shard,
       o.payload, encode(o.payload_bytes, 'base64') AS payload_base64
  FROM outbox AS o
  LEFT JOIN outbox_blocked_key AS b ON b.ordering_key = o.ordering_key
  LEFT JOIN outbox_shard AS s ON s.shard = o.shard
 WHERE o.event_id = %(id)s
"""
DEAD_LETTER = """
SELECT to_jsonb(d) - 'payload' - 'payload_bytes' AS dead_letter, to_jsonb(b) AS blocked_key,
       d.payload, encode(d.payload_bytes, 'base64') AS payload_base64
  FROM outbox_dead_letter AS d
  LEFT JOIN outbox_blocked_key AS b ON b.ordering_key = d.ordering_key
 WHERE d.event_id = %(id)s
"""

SEQUENCE = """
SELECT seqcache, last_value < (SELECT max(floor) FROM outbox_shard) AS set_back
  FROM pg_sequence, outbox_id_seq WHERE seqrelid = 'outbox_id_seq'::regclass
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A shard: its lease, what is pending in it, and since when."""

    shard: int
    lease_owner: str | None
    leased_until: datetime | None
    takeovers: int
    suspect: UUID | None
    pending: int
    oldest: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """Blocked keys of one kind, how many events they hold, and the oldest of those."""

    kind: str
    keys: int
    held: int
    since: datetime
    oldest: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSize:
    """A partition: bytes with its indexes, estimated rows, unpublished events."""

    name: str
    is_default: bool
    day: str | None
    bytes: int
    rows: int
    unpublished: int


def shards(connection: Connection) -> list[Shard]:
    """Return all shards."""
    with connection.cursor(row_factory=class_row(Shard)) as cursor:
        return cursor.execute(SHARDS).fetchall()


def blocked(connection: Connection) -> list[Blocked]:
    """Return the blocked keys, counted by kind."""
    with connection.cursor(row_factory=class_row(Blocked)) as cursor:
        return cursor.execute(BLOCKED).fetchall()


def dead(connection: Connection) -> int:
    """Return how many dead letters nobody has decided on."""
    row = connection.execute(DEAD).fetchone()
    return int(row[0]) if row else 0


def partitions(connection: Connection) -> list[PartitionSize]:
    """Return the partitions, the DEFAULT one last."""
    with connection.cursor(row_factory=class_row(PartitionSize)) as cursor:
        return cursor.execute(PARTITIONS).fetchall()


def event(connection: Connection, event_id: UUID) -> dict[str, Any] | None:
    """Return everything known of an event, as what came of `to_jsonb`; None if there is none."""
    with connection.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(EVENT, {"id": event_id}).fetchone()
        dead_letter = cursor.execute(DEAD_LETTER, {"id": event_id}).fetchone()
    return (dead_letter or {}) | (row or {}) or None


class Sequence(NamedTuple):
    """The sequence of ids: how many a session draws at once, and whether it gives out ids again that were passed."""

    cache: int
    set_back: bool


def sequence(connection: Connection) -> Sequence | None:
    """Return the state of the sequence; anything but 1 and False breaks the order of publication."""
    row = connection.execute(SEQUENCE).fetchone()
    return None if row is None else Sequence(*row)
