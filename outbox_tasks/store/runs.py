"""What runs did: written down once a run, for people to look at."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from outbox_tasks.store.connection import Connection

RECORD = """
INSERT INTO outbox_run (task, owner, host, started_at, report)
VALUES (%(task)s, %(owner)s, %(host)s, clock_timestamp() - %(seconds)s * interval '1 second', %(report)s)
"""

# The last run of every task, by the index on (task, id): one look-up a task, however long the list is.
LAST = """
WITH RECURSIVE task AS (
    (SELECT task FROM outbox_run ORDER BY task LIMIT 1)
     UNION ALL
    SELECT (SELECT r.task FROM outbox_run AS r WHERE r.task > task.task ORDER BY r.task LIMIT 1)
      FROM task WHERE task.task IS NOT NULL
)
SELECT r.task, r.owner, r.host, r.started_at, r.ended_at, r.report
  FROM task
 CROSS JOIN LATERAL (
       SELECT * FROM outbox_run AS r WHERE r.task = task.task ORDER BY r.id DESC LIMIT 1) AS r
 ORDER BY r.ended_at DESC
"""

# How many events the runs published that ended in the last so many seconds.
PUBLISHED_LATELY = """
SELECT coalesce(sum((report ->> 'published')::bigint), 0) FROM outbox_run
 WHERE ended_at > clock_timestamp() - %(seconds)s * interval '1 second' AND task = ANY(%(tasks)s)
"""

PUBLISHING_TASKS = ["outbox.dispatch", "outbox.retry", "outbox.flush"]


class Ended(NamedTuple):
    """A run that has just ended, and how many seconds it took."""

    task: str
    owner: str
    host: str
    seconds: float
    report: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that ended: `report` is what it returned."""

    task: str
    owner: str
    host: str
    started_at: datetime
    ended_at: datetime
    report: dict[str, Any]


def record(connection: Connection, ended: Ended) -> None:
    """Write down a run that has just ended."""
    connection.execute(RECORD, ended._asdict() | {"report": Jsonb(ended.report)})


def last(connection: Connection) -> list[Run]:
    """Return the last run of every task, latest first."""
    with connection.cursor(row_factory=class_row(Run)) as cursor:
        return cursor.execute(LAST).fetchall()


def published_lately(connection: Connection, *, seconds: float) -> int:
    """Return how many events were published by runs that ended in the last `seconds`."""
    row = connection.execute(PUBLISHED_LATELY, {"seconds": seconds, "tasks": PUBLISHING_TASKS}).fetchone()
    return int(row[0]) if row else 0
