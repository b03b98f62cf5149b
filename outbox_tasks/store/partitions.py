"""Partitions: one a day; made ahead, dropped or detached when nothing in them is needed any more."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from typing import Literal
from uuid import UUID

from psycopg import sql
from psycopg.rows import class_row

from outbox_tasks.store.connection import Connection, set_lock_timeout

Action = Literal["drop", "detach"]

# One maintenance at a time. The lock ("outbox_m") belongs to the session and ends with it, whatever happens.
TRY_LOCK = "SELECT pg_try_advisory_lock(8031453476610924397)"
UNLOCK = "SELECT pg_advisory_unlock(8031453476610924397)"

NOW = "SELECT clock_timestamp()"

LIST = """
SELECT c.relname AS name, to_date(right(c.relname, 8), 'YYYYMMDD') AS day
  FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
 WHERE i.inhparent = 'outbox'::regclass AND c.relname ~ '^outbox_[0-9]{8}$'
 ORDER BY c.relname
"""

# Makes one day's partition unless it is there. ATTACH waits for no writer and no writer waits for it, but for
# those that write to the DEFAULT partition: it is locked while it is searched for rows of that day.
MAKE = "SELECT outbox_make_partition(%(day)s)"

# How many events of a day are in the DEFAULT partition, up to one more than asked for.
COUNT_IN_DEFAULT = """
SELECT count(*) FROM (
    SELECT FROM outbox_default WHERE event_id >= outbox_day_floor(%(day)s) AND event_id < outbox_day_floor(%(day)s + 1)
     LIMIT %(limit)s + 1) AS counted
"""

# Moves a day's events from the DEFAULT partition to a table that becomes that day's partition, in one transaction: both
# are locked against everybody meanwhile, so the caller sees to it that they are few.
LOCK_DEFAULT = "LOCK TABLE ONLY outbox, ONLY outbox_default IN ACCESS EXCLUSIVE MODE"
CREATE_DAY = "CREATE TABLE {} (LIKE outbox INCLUDING ALL)"
MOVE_DAY = """
WITH moved AS (
    DELETE FROM outbox_default
     WHERE event_id >= outbox_day_floor({day}) AND event_id < outbox_day_floor({day} + 1)
    RETURNING *
)
INSERT INTO {partition} (event_id, id, aggregate_type, aggregate_id, event_type, topic, partition_key, payload,
                         payload_bytes, headers, created_at, published_at, state, attempts, last_error)
SELECT event_id, id, aggregate_type, aggregate_id, event_type, topic, partition_key, payload,
       payload_bytes, headers, created_at, published_at, state, attempts, last_error FROM moved
"""
DAY_BOUNDS = "SELECT outbox_day_floor(%(day)s), outbox_day_floor(%(day)s + 1)"
ATTACH_DAY = "ALTER TABLE outbox ATTACH PARTITION {} FOR VALUES FROM ({}) TO ({})"

# Takes a partition away. Its parent is locked first, as writers do, so that nothing comes into it between the look for
# unpublished events and the end. A DEFAULT partition forbids DETACH … CONCURRENTLY.
LOCK_FOR_REMOVAL = "LOCK TABLE ONLY outbox, ONLY {} IN ACCESS EXCLUSIVE MODE"
UNPUBLISHED = """
SELECT count(*), min(created_at) FROM (
    SELECT created_at FROM {0} WHERE state = 'pending'
     UNION ALL
    SELECT created_at FROM {0} WHERE state = 'held') AS unpublished
"""
DROP = "DROP TABLE {}"
DETACH = "ALTER TABLE outbox DETACH PARTITION {}"

# Looks through a page of the DEFAULT partition and deletes what was published before a time. Pages go by id, so that
# every statement is bounded, however much is kept.
CLEAN_DEFAULT = """
WITH page AS MATERIALIZED (
    SELECT event_id FROM outbox_default WHERE event_id >= %(first)s ORDER BY event_id LIMIT %(limit)s
), gone AS (
    DELETE FROM outbox_default AS d USING page
     WHERE d.event_id = page.event_id AND d.state = 'published' AND d.published_at < %(before)s
    RETURNING 1
)
SELECT (SELECT event_id FROM page ORDER BY event_id DESC LIMIT 1), (SELECT count(*) FROM gone)
"""

# Forgets dead letters somebody decided on, and runs, some at a time.
CLEAN_DEAD_LETTERS = """
DELETE FROM outbox_dead_letter WHERE event_id IN (
    SELECT event_id FROM outbox_dead_letter
     WHERE resolution IS NOT NULL AND resolved_at < %(before)s LIMIT %(limit)s FOR UPDATE SKIP LOCKED)
"""
CLEAN_RUNS = """
DELETE FROM outbox_run WHERE id IN (
    SELECT id FROM outbox_run WHERE ended_at < %(before)s ORDER BY ended_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A day's partition."""

    name: str
    day: date


@dataclass(frozen=True, slots=True, kw_only=True)
class InTheWay:
    """Unpublished events that keep a partition: how many, and when the oldest was written."""

    events: int
    oldest: datetime | None


@contextmanager
def maintenance(connection: Connection) -> Iterator[bool]:
    """Be the only maintenance; gives False where another one is at work."""
    row = connection.execute(TRY_LOCK).fetchone()
    alone = bool(row and row[0])
    try:
        yield alone
    finally:
        if alone and not connection.closed:
            connection.execute(UNLOCK)


def now(connection: Connection) -> datetime:
    """Return the database's time."""
    row = connection.execute(NOW).fetchone()
    assert row is not None
    time: datetime = row[0]
    return time


def find(connection: Connection) -> list[Partition]:
    """Return the days' partitions, oldest first."""
    with connection.cursor(row_factory=class_row(Partition)) as cursor:
        return cursor.execute(LIST).fetchall()


def make(connection: Connection, *, day: date, lock_seconds: float) -> bool:
    """Make a day's partition; false if it was there.

    Raises:
        psycopg.errors.CheckViolation: the DEFAULT partition has events of that day.
        psycopg.errors.LockNotAvailable: something holds the DEFAULT partition for longer than `lock_seconds`.
    """
    with connection.transaction():
        set_lock_timeout(connection, lock_seconds)
        row = connection.execute(MAKE, {"day": day}).fetchone()
    return bool(row and row[0])


def count_in_default(connection: Connection, *, day: date, limit: int) -> int:
    """Return how many events of a day are in the DEFAULT partition; counts to `limit` + 1 only."""
    row = connection.execute(COUNT_IN_DEFAULT, {"day": day, "limit": limit}).fetchone()
    return int(row[0]) if row else 0


def make_from_default(connection: Connection, *, day: date, name: str, lock_seconds: float) -> None:
    """Make a day's partition of what the DEFAULT partition has of it.

    Raises:
        psycopg.errors.LockNotAvailable: something holds the table for longer than `lock_seconds`.
    """
    partition = sql.Identifier(name)
    with connection.transaction():
        set_lock_timeout(connection, lock_seconds)
        connection.execute(LOCK_DEFAULT)
        connection.execute(sql.SQL(CREATE_DAY).format(partition))
        connection.execute(sql.SQL(MOVE_DAY).format(partition=partition, day=sql.Literal(day)))
        bounds = connection.execute(DAY_BOUNDS, {"day": day}).fetchone()
        assert bounds is not None
        connection.execute(sql.SQL(ATTACH_DAY).format(partition, *map(sql.Literal, bounds)))


def remove(connection: Connection, *, name: str, action: Action, lock_seconds: float) -> InTheWay | None:
    """Drop or detach a partition; returns what is in the way if something in it is unpublished.

    Raises:
        psycopg.errors.LockNotAvailable: something holds the table for longer than `lock_seconds`.
    """
    partition = sql.Identifier(name)
    found = in_the_way(connection, name=name)
    if found is not None:
        return found
    with connection.transaction():
        set_lock_timeout(connection, lock_seconds)
        connection.execute(sql.SQL(LOCK_FOR_REMOVAL).format(partition))
        found = in_the_way(connection, name=name)
        if found is None:
            connection.execute(sql.SQL(DROP if action == "drop" else DETACH).format(partition))
    return found


def in_the_way(connection: Connection, *, name: str) -> InTheWay | None:
    """Return what is unpublished in a partition, None if nothing is."""
    row = connection.execute(sql.SQL(UNPUBLISHED).format(sql.Identifier(name))).fetchone()
    return InTheWay(events=row[0], oldest=row[1]) if row and row[0] else None


def clean_default(connection: Connection, *, first: UUID, before: datetime, limit: int) -> tuple[UUID | None, int]:
    """Delete, of `limit` events from the id `first` on, what was published before a time.

    Returns the last id looked at, None if there was none, and how many events were deleted.
    """
    row = connection.execute(CLEAN_DEFAULT, {"first": first, "before": before, "limit": limit}).fetchone()
    assert row is not None
    return row[0], row[1]


def clean_dead_letters(connection: Connection, *, before: datetime, limit: int) -> int:
    """Delete up to `limit` dead letters that were decided on before a time; returns how many there were."""
    return connection.execute(CLEAN_DEAD_LETTERS, {"before": before, "limit": limit}).rowcount


def clean_runs(connection: Connection, *, before: datetime, limit: int) -> int:
    """Forget up to `limit` runs that ended before a time; returns how many there were."""
    return connection.execute(CLEAN_RUNS, {"before": before, "limit": limit}).rowcount
