"""What the demo asks the database: how far the outbox is, and at the end everything in it."""

from typing import NamedTuple
from uuid import UUID

import psycopg
from psycopg.rows import args_row, class_row, tuple_row

from outbox_tasks.demo.checks import Tables, Told

Connection = psycopg.Connection[tuple[object, ...]]

# How many events are committed, and how many of them published. Locks nothing.
_PROGRESS = "SELECT count(*) AS written, count(*) FILTER (WHERE state = 'published') AS published FROM outbox"

# Every event, and of the shop's own what it says is their place in the order. Locks nothing.
_EVENTS = """
SELECT event_id, aggregate_id, CASE WHEN payload ? 'doomed' THEN (payload ->> 'version')::int END
  FROM outbox
 ORDER BY id
"""

# How often every order was changed. Locks nothing.
_ORDERS = "SELECT id, version FROM orders"


class Progress(NamedTuple):
    """Events committed and, of these, published."""

    written: int
    published: int


def read_progress(connection: Connection) -> Progress:
    """Return how far the outbox is."""
    with connection.cursor(row_factory=class_row(Progress)) as cursor:
        progress = cursor.execute(_PROGRESS).fetchone()
    assert progress is not None
    return progress


def read_tables(connection: Connection) -> Tables:
    """Return what happened, by the database."""
    with connection.cursor(row_factory=args_row(_told)) as events:
        told = events.execute(_EVENTS).fetchall()
    with connection.cursor(row_factory=tuple_row) as rows:
        return Tables(events=told, orders=dict(rows.execute(_ORDERS).fetchall()))


def _told(event_id: UUID, order_id: str, version: int | None) -> Told:
    return Told(event_id=event_id, order_id=order_id, version=version)
