"""Dead letters: events given up on, and what people do with them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from uuid import UUID

from psycopg.rows import class_row, dict_row

from outbox_tasks.selection import Selection
from outbox_tasks.store.connection import Connection

# Moves the event of every exhausted key to the dead letters, writes a copy for the dead-letter topic, and lets the key
# go on or wait. All or nothing, in one statement. Locks the keys' rows, passing over locked ones; nobody else changes
# held events of such a key. The copy of a copy is not written: a dead-letter topic that refuses must not feed itself.
BURY = """
WITH exhausted AS MATERIALIZED (
    SELECT ordering_key, event_id, reason, topic FROM outbox_blocked_key
     WHERE kind = 'exhausted' ORDER BY blocked_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), moved AS (
    DELETE FROM outbox AS o USING exhausted AS x
     WHERE o.event_id = x.event_id AND o.state = 'held'
    RETURNING o.*, x.reason, coalesce(x.topic, o.topic) AS sent_to
), buried AS (
    INSERT INTO outbox_dead_letter AS d (event_id, id, aggregate_type, aggregate_id, event_type, topic, partition_key,
                payload, payload_bytes, headers, created_at, attempts, error, ordering_key, sent_to)
    SELECT event_id, id, aggregate_type, aggregate_id, event_type, topic, partition_key,
           payload, payload_bytes, headers, created_at, attempts, reason, ordering_key, sent_to
      FROM moved
        ON CONFLICT (event_id) DO UPDATE
       SET attempts = excluded.attempts, error = excluded.error, sent_to = excluded.sent_to,
           died_at = clock_timestamp(), deaths = d.deaths + 1,
           resolution = NULL, resolved_at = NULL, resolved_reason = NULL
), copied AS (
    INSERT INTO outbox (aggregate_type, aggregate_id, event_type, topic, partition_key, payload, payload_bytes, headers)
    SELECT aggregate_type, aggregate_id, event_type, %(topic)s, partition_key, payload, payload_bytes,
           headers || jsonb_strip_nulls(jsonb_build_object(
               'dead_letter_event_id', event_id::text,
               'dead_letter_topic', sent_to,
               'dead_letter_key', coalesce(partition_key, aggregate_id),
               'dead_letter_error', reason,
               'dead_letter_attempts', attempts::text,
               'dead_letter_created_at', to_json(created_at) #>> '{}',
               'dead_letter_died_at', to_json(clock_timestamp()) #>> '{}'))
      FROM moved
     WHERE %(topic)s::text IS NOT NULL AND sent_to IS DISTINCT FROM %(topic)s
     ORDER BY id
), waiting AS (
    SELECT x.ordering_key, %(wait)s AND m.event_id IS NOT NULL AS waits
      FROM exhausted AS x LEFT JOIN moved AS m ON m.event_id = x.event_id
), on_with_it AS (
    UPDATE outbox_blocked_key AS b
       SET kind = CASE WHEN w.waits THEN 'dead' ELSE 'refused' END,
           retry_at = CASE WHEN w.waits THEN NULL ELSE clock_timestamp() END
      FROM waiting AS w WHERE w.ordering_key = b.ordering_key
)
SELECT event_id, ordering_key, reason FROM moved
"""

# What the people's commands select dead letters by; a filter that is NULL lets everything through.
SELECT_IDS = """
SELECT event_id FROM outbox_dead_letter
 WHERE resolution IS NULL
   AND (%(ids)s::uuid[] IS NULL OR event_id = ANY(%(ids)s))
   AND (%(key)s::text IS NULL OR ordering_key = %(key)s OR coalesce(partition_key, aggregate_id) = %(key)s)
   AND (%(topic)s::text IS NULL OR sent_to = %(topic)s)
   AND (%(error)s::text IS NULL OR position(lower(%(error)s) IN lower(error)) > 0)
   AND (%(since)s::timestamptz IS NULL OR died_at >= %(since)s)
   AND (%(until)s::timestamptz IS NULL OR died_at < %(until)s)
 ORDER BY id
"""

LIST = """
SELECT event_id, aggregate_type, aggregate_id, event_type, sent_to AS topic,
       coalesce(partition_key, aggregate_id) AS key, attempts, error, created_at, died_at, deaths,
       resolution, resolved_at, resolved_reason
  FROM outbox_dead_letter
 WHERE event_id = ANY(%(ids)s) ORDER BY id
"""

SHOW = """
SELECT * FROM outbox_dead_letter WHERE event_id = %(id)s
"""

KEYS_OF = """
SELECT DISTINCT ordering_key FROM outbox_dead_letter WHERE event_id = ANY(%(ids)s) AND resolution IS NULL
"""

# Makes sure the key of dead letters is blocked, and due: its events wait there, in their old place, for the next retry.
# One key a transaction: a settlement takes the rows of several, new ones last, so holding two could end in a deadlock.
# A key that waits because of another event, to bury
# it or to hear what a person decides, goes on waiting.
OPEN_KEY = """
INSERT INTO outbox_blocked_key AS b (ordering_key, topic, event_id, kind, reason, retry_at)
SELECT ordering_key, sent_to, event_id, 'refused', 'redriven', clock_timestamp()
  FROM outbox_dead_letter WHERE event_id = ANY(%(ids)s) AND ordering_key = %(key)s AND resolution IS NULL
 ORDER BY id LIMIT 1
    ON CONFLICT (ordering_key) DO UPDATE
   SET kind = CASE b.kind WHEN 'dead' THEN 'refused' ELSE b.kind END, retry_at = clock_timestamp()
 WHERE b.kind IN ('refused', 'misconfigured') OR (b.kind = 'dead' AND b.event_id = ANY(%(ids)s))
"""

# Puts dead letters back: the same event, the same place in the order, its attempts to spend anew.
REDRIVE = """
WITH redriven AS (
    UPDATE outbox_dead_letter
       SET resolution = 'redriven', resolved_at = clock_timestamp(), resolved_reason = %(reason)s
     WHERE event_id = ANY(%(ids)s) AND ordering_key = %(key)s AND resolution IS NULL
    RETURNING *
)
INSERT INTO outbox (event_id, id, aggregate_type, aggregate_id, event_type, topic, partition_key,
                    payload, payload_bytes, headers, created_at, state, last_error)
SELECT event_id, id, aggregate_type, aggregate_id, event_type, topic, partition_key,
       payload, payload_bytes, headers, created_at, 'held', error
  FROM redriven ORDER BY id
    ON CONFLICT (event_id) DO NOTHING
"""

# Lets keys go on that waited for a person to decide on one of these dead letters. Takes the locks in the order of the
# keys, as settlements do.
LET_GO_ON = """
WITH waiting AS MATERIALIZED (
    SELECT ordering_key FROM outbox_blocked_key
     WHERE kind = 'dead' AND event_id = ANY(%(ids)s) ORDER BY ordering_key FOR UPDATE
)
UPDATE outbox_blocked_key AS b SET kind = 'refused', retry_at = clock_timestamp()
  FROM waiting WHERE waiting.ordering_key = b.ordering_key
"""

DISCARD = """
UPDATE outbox_dead_letter
   SET resolution = 'discarded', resolved_at = clock_timestamp(), resolved_reason = %(reason)s
 WHERE event_id = ANY(%(ids)s) AND resolution IS NULL
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buried:
    """An event that has become a dead letter."""

    event_id: UUID
    ordering_key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter(Selection):
    """Which dead letters are meant, by when they died among others; `error` is part of the error's text."""

    key: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A dead letter as a person reads it in a list."""

    event_id: UUID
    aggregate_type: str
    aggregate_id: str
    event_type: str
    topic: str | None
    key: str
    attempts: int
    error: str
    created_at: datetime
    died_at: datetime
    deaths: int
    resolution: str | None
    resolved_at: datetime | None
    resolved_reason: str | None


def bury(connection: Connection, *, limit: int, topic: str | None, wait: bool) -> list[Buried]:
    """Make dead letters of up to `limit` exhausted events; `topic` gets copies, `wait` keeps their keys blocked."""
    with connection.cursor(row_factory=class_row(Buried)) as cursor:
        return cursor.execute(BURY, {"limit": limit, "topic": topic, "wait": wait}).fetchall()


def select(connection: Connection, wanted: Filter) -> list[UUID]:
    """Return the ids of unresolved dead letters, oldest event first."""
    return [row[0] for row in connection.execute(SELECT_IDS, asdict(wanted))]


def describe(connection: Connection, ids: Sequence[UUID]) -> list[DeadLetter]:
    """Return dead letters as a person reads them, oldest event first."""
    with connection.cursor(row_factory=class_row(DeadLetter)) as cursor:
        return cursor.execute(LIST, {"ids": list(ids)}).fetchall()


def show(connection: Connection, event_id: UUID) -> dict[str, object] | None:
    """Return everything about one dead letter, payload and all; None if there is none."""
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(SHOW, {"id": event_id}).fetchone()


def redrive(connection: Connection, ids: Sequence[UUID], *, reason: str) -> int:
    """Put dead letters back in their old place, key by key; returns how many there were. Lock order: key, events."""
    keys = [row[0] for row in connection.execute(KEYS_OF, {"ids": list(ids)})]
    return sum(_redrive_key(connection, key, ids, reason=reason) for key in keys)


def _redrive_key(connection: Connection, key: str, ids: Sequence[UUID], *, reason: str) -> int:
    given: dict[str, object] = {"ids": list(ids), "key": key}
    with connection.transaction():
        connection.execute(OPEN_KEY, given)
        return connection.execute(REDRIVE, given | {"reason": reason}).rowcount


def discard(connection: Connection, ids: Sequence[UUID], *, reason: str) -> int:
    """Give dead letters up for good, and let their keys go on; returns how many there were."""
    with connection.transaction():
        connection.execute(LET_GO_ON, {"ids": list(ids)})
        return connection.execute(DISCARD, {"ids": list(ids), "reason": reason}).rowcount
