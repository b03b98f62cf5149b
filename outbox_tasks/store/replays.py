"""Replays: which published events are to be sent again, and how far that has come."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg.rows import args_row, class_row
from psycopg.types.json import Jsonb

from outbox_tasks.event import Event
from outbox_tasks.selection import Selection
from outbox_tasks.store.connection import Connection
from outbox_tasks.store.events import READ_BYTES

CHUNK = 500
"""Events of one chunk: what is sent, and noted as sent, at once."""

# Looking for events may take minutes where many are meant; nothing is locked meanwhile.
NO_TIMEOUT = "SELECT set_config('statement_timeout', '0', true)"

# Counts the events a replay would send. By the time in their ids, so that whole partitions are passed over; what lies
# in the DEFAULT partition, whose ids may say anything, by the time they were written.
COUNT = """
SELECT count(*)
  FROM (SELECT * FROM outbox WHERE event_id BETWEEN %(first)s AND %(last)s
         UNION ALL
        SELECT * FROM outbox_default
         WHERE event_id NOT BETWEEN %(first)s AND %(last)s AND created_at >= %(since)s AND created_at < %(until)s) AS o
 WHERE o.state = 'published'
   AND (%(ids)s::uuid[] IS NULL OR o.event_id = ANY(%(ids)s))
   AND (%(aggregate_type)s::text IS NULL OR o.aggregate_type = %(aggregate_type)s)
   AND (%(aggregate_id)s::text IS NULL OR o.aggregate_id = %(aggregate_id)s)
   AND (%(event_type)s::text IS NULL OR o.event_type = %(event_type)s)
   AND (%(topic)s::text IS NULL OR %(topic)s = coalesce(
        o.topic, %(routes)s::jsonb ->> o.event_type, %(routes)s::jsonb ->> o.aggregate_type))
"""

CREATE = """
INSERT INTO outbox_replay (wanted, to_topic, rate) VALUES (%(wanted)s, %(to_topic)s, %(rate)s) RETURNING replay_id
"""

# Writes down which events are meant, in the order of their ids. The same conditions as COUNT.
CHOOSE = """
WITH chosen AS (
    SELECT o.event_id, o.id, (row_number() OVER (ORDER BY o.id) - 1) / %(chunk)s AS place
      FROM (SELECT * FROM outbox WHERE event_id BETWEEN %(first)s AND %(last)s
             UNION ALL
            SELECT * FROM outbox_default
             WHERE event_id NOT BETWEEN %(first)s AND %(last)s
               AND created_at >= %(since)s AND created_at < %(until)s) AS o
     WHERE o.state = 'published'
       AND (%(ids)s::uuid[] IS NULL OR o.event_id = ANY(%(ids)s))
       AND (%(aggregate_type)s::text IS NULL OR o.aggregate_type = %(aggregate_type)s)
       AND (%(aggregate_id)s::text IS NULL OR o.aggregate_id = %(aggregate_id)s)
       AND (%(event_type)s::text IS NULL OR o.event_type = %(event_type)s)
       AND (%(topic)s::text IS NULL OR %(topic)s = coalesce(
            o.topic, %(routes)s::jsonb ->> o.event_type, %(routes)s::jsonb ->> o.aggregate_type))
), chunk AS (
    INSERT INTO outbox_replay_chunk (replay_id, place, event_ids)
    SELECT %(replay_id)s, place, array_agg(event_id ORDER BY id) FROM chosen GROUP BY place
    RETURNING cardinality(event_ids) AS events
)
UPDATE outbox_replay
   SET total = coalesce((SELECT sum(events) FROM chunk), 0),
       finished_at = CASE WHEN NOT EXISTS (SELECT FROM chunk) THEN clock_timestamp() END
 WHERE replay_id = %(replay_id)s
"""

# Leases the oldest replay that is not finished. Passes over one that another run is at.
CLAIM = """
WITH oldest AS MATERIALIZED (
    SELECT replay_id FROM outbox_replay
     WHERE finished_at IS NULL AND (leased_until IS NULL OR leased_until <= clock_timestamp())
     ORDER BY created_at LIMIT 1 FOR UPDATE SKIP LOCKED
)
UPDATE outbox_replay AS r
   SET lease_token = %(token)s, lease_owner = %(owner)s,
       leased_until = clock_timestamp() + %(seconds)s * interval '1 second'
  FROM oldest WHERE r.replay_id = oldest.replay_id
RETURNING r.replay_id, r.wanted, r.to_topic, r.rate, r.total, r.sent, r.refused, r.created_at, r.finished_at
"""

NEXT_CHUNK = """
SELECT place, event_ids FROM outbox_replay_chunk WHERE replay_id = %(replay_id)s ORDER BY place LIMIT 1
"""

# The events of a chunk, with the bytes that go to Kafka; those over the budget without, and marked. Locks nothing:
# published events do not change. Events whose partition was dropped meanwhile are not returned.
READ = """
SELECT e.event_id, e.id, e.shard, e.ordering_key, e.aggregate_type, e.event_type, coalesce(%(to_topic)s, e.topic),
       convert_to(nullif(coalesce(e.partition_key, e.aggregate_id), ''), 'UTF8') AS key,
       CASE WHEN coalesce(e.bytes_before, 0) <= %(bytes)s THEN
            coalesce(e.payload_bytes, convert_to(e.payload::text, 'UTF8')) END AS value,
       e.headers, e.attempts, coalesce(e.bytes_before, 0) > %(bytes)s AS blocked
  FROM (SELECT o.*, sum(coalesce(pg_column_size(o.payload), 0) + coalesce(pg_column_size(o.payload_bytes), 0))
                        OVER (ORDER BY o.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
          FROM outbox AS o
         WHERE o.event_id = ANY(%(ids)s) AND o.event_id BETWEEN %(first)s AND %(last)s) AS e
 ORDER BY e.id
"""

# Notes a chunk as sent, or what is left of it, under the lease. One statement: a chunk is never counted twice.
DONE = """
WITH mine AS MATERIALIZED (
    SELECT replay_id FROM outbox_replay WHERE replay_id = %(replay_id)s AND lease_token = %(token)s FOR UPDATE
), gone AS (
    DELETE FROM outbox_replay_chunk AS c USING mine
     WHERE c.replay_id = mine.replay_id AND c.place = %(place)s AND cardinality(%(left)s::uuid[]) = 0
), shortened AS (
    UPDATE outbox_replay_chunk AS c SET event_ids = %(left)s FROM mine
     WHERE c.replay_id = mine.replay_id AND c.place = %(place)s AND cardinality(%(left)s::uuid[]) > 0
)
UPDATE outbox_replay AS r SET sent = r.sent + %(sent)s, refused = r.refused + %(refused)s
  FROM mine WHERE r.replay_id = mine.replay_id
"""

FINISH = """
UPDATE outbox_replay SET finished_at = clock_timestamp()
 WHERE replay_id = %(replay_id)s AND lease_token = %(token)s
   AND NOT EXISTS (SELECT FROM outbox_replay_chunk AS c WHERE c.replay_id = %(replay_id)s)
"""

RELEASE = """
UPDATE outbox_replay SET lease_token = NULL, lease_owner = NULL, leased_until = NULL WHERE lease_token = %(token)s
"""

# Ends a replay where it is; what was sent stays sent.
CANCEL = """
WITH ended AS (
    UPDATE outbox_replay SET finished_at = clock_timestamp()
     WHERE replay_id = %(replay_id)s AND finished_at IS NULL RETURNING replay_id
)
DELETE FROM outbox_replay_chunk AS c USING ended WHERE c.replay_id = ended.replay_id
"""

GET = """
SELECT replay_id, wanted, to_topic, rate, total, sent, refused, created_at, finished_at
  FROM outbox_replay WHERE replay_id = %(replay_id)s
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(Selection):
    """Which published events are meant. Times are those in the events' ids."""

    aggregate_type: str | None = None
    aggregate_id: str | None = None
    event_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A replay: what is meant, events a second, and how far it has come."""

    replay_id: UUID
    wanted: dict[str, Any]
    to_topic: str | None
    rate: int
    total: int
    sent: int
    refused: int
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The next events of a replay, in order."""

    place: int
    event_ids: list[UUID]


def count(connection: Connection, wanted: Wanted, *, routes: dict[str, str]) -> int:
    """Return how many published events are meant; may take minutes."""
    with connection.transaction():
        connection.execute(NO_TIMEOUT)
        row = connection.execute(COUNT, _conditions(wanted, routes)).fetchone()
    return int(row[0]) if row else 0


def create(
    connection: Connection, wanted: Wanted, *, routes: dict[str, str], to_topic: str | None, rate: int
) -> Replay:
    """Begin a replay: writes down which events are meant; may take minutes."""
    described = {name: str(value) for name, value in asdict(wanted).items() if value is not None}
    with connection.transaction():
        connection.execute(NO_TIMEOUT)
        row = connection.execute(CREATE, {"wanted": Jsonb(described), "to_topic": to_topic, "rate": rate}).fetchone()
        assert row is not None
        connection.execute(CHOOSE, _conditions(wanted, routes) | {"replay_id": row[0], "chunk": CHUNK})
    replay = get(connection, row[0])
    assert replay is not None
    return replay


def get(connection: Connection, replay_id: UUID) -> Replay | None:
    """Return a replay, None if there is none."""
    with connection.cursor(row_factory=class_row(Replay)) as cursor:
        return cursor.execute(GET, {"replay_id": replay_id}).fetchone()


def claim(connection: Connection, *, token: UUID, owner: str, seconds: float) -> Replay | None:
    """Lease the oldest replay that is not finished, for `seconds` of the database's clock."""
    with connection.cursor(row_factory=class_row(Replay)) as cursor:
        return cursor.execute(CLAIM, {"token": token, "owner": owner, "seconds": seconds}).fetchone()


def next_chunk(connection: Connection, *, replay_id: UUID) -> Chunk | None:
    """Return the next events to send, None if all are sent."""
    with connection.cursor(row_factory=class_row(Chunk)) as cursor:
        return cursor.execute(NEXT_CHUNK, {"replay_id": replay_id}).fetchone()


def read(connection: Connection, event_ids: Sequence[UUID], *, to_topic: str | None) -> list[Event]:
    """Return events by id, with another topic if one is given; `blocked` marks what was too much for one read."""
    ids = {"ids": list(event_ids), "first": min(event_ids), "last": max(event_ids)}
    parameters = ids | {"to_topic": to_topic, "bytes": READ_BYTES}
    with connection.cursor(binary=True, row_factory=args_row(Event)) as cursor:
        return cursor.execute(READ, parameters).fetchall()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What became of a chunk: how many of its events were sent and refused, and which are left."""

    sent: int
    refused: int
    left: list[UUID]


def note(connection: Connection, progress: Progress, *, replay_id: UUID, place: int, token: UUID) -> bool:
    """Note what became of a chunk; false, and nothing noted, where the lease is lost."""
    parameters = {"replay_id": replay_id, "place": place, "token": token} | asdict(progress)
    return connection.execute(DONE, parameters).rowcount == 1


def finish(connection: Connection, *, replay_id: UUID, token: UUID) -> None:
    """Note that a replay is over, if it is."""
    connection.execute(FINISH, {"replay_id": replay_id, "token": token})


def release(connection: Connection, *, token: UUID) -> None:
    """Give a replay back."""
    connection.execute(RELEASE, {"token": token})


def cancel(connection: Connection, *, replay_id: UUID) -> bool:
    """End a replay; false where there is none, or it is over."""
    replay = get(connection, replay_id)
    connection.execute(CANCEL, {"replay_id": replay_id})
    return replay is not None and replay.finished_at is None


def _conditions(wanted: Wanted, routes: dict[str, str]) -> dict[str, object]:
    first = UUID(int=0) if wanted.since is None else _floor(wanted.since)
    last = UUID(int=2**128 - 1) if wanted.until is None else UUID(int=_floor(wanted.until).int - 1)
    times = {"since": wanted.since or "-infinity", "until": wanted.until or "infinity"}
    return asdict(wanted) | times | {"first": first, "last": last, "routes": Jsonb(routes)}


def _floor(time: datetime) -> UUID:
    """Return the smallest UUIDv7 of a time: its milliseconds are the upper 48 bits (RFC 9562, section 5.7)."""
    return UUID(int=round(time.timestamp() * 1000) << 80)
