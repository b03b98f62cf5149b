"""What tests of bad days share: events by the hundred, numbered within their keys, some of them too big."""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic
from types import TracebackType
from typing import Any, Self

import psycopg

from support.relaying import rows
from support.writers import Written

PACE_SECONDS = 0.05
"""How often a steady writer writes what is due."""

# In the order given, whatever the keys are. What makes an event big stands in a header, so that its payload stays
# what judges expect.
_PUT = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, topic, payload, headers)
SELECT 'order', given.key, 'order_changed', %(topic)s,
       jsonb_build_object('key', given.key, 'sequence', given.sequence),
       CASE WHEN given.padding = 0 THEN '{}' ELSE jsonb_build_object('padding', repeat('x', given.padding)) END
  FROM unnest(%(keys)s::text[], %(sequences)s::int[], %(paddings)s::int[])
       WITH ORDINALITY AS given (key, sequence, padding, place)
 ORDER BY given.place
RETURNING aggregate_id, (payload->>'sequence')::int, event_id
"""


@dataclass(frozen=True, slots=True)
class Draft:
    """An event to be written: the `sequence`-th of its key, made big by `padding` bytes."""

    key: str
    sequence: int
    padding: int = 0


def rounds(*, keys: int, events: int, start: int = 1) -> list[Draft]:
    """Return `events` drafts, taking `keys` keys in turn; each key's sequence goes on from `start`."""
    return [Draft(f"key-{number % keys}", start + number // keys) for number in range(events)]


def put(database_url: str, topic: str, drafts: Sequence[Draft]) -> list[Written]:
    """Write drafts in one transaction, in their order."""
    with psycopg.connect(database_url) as connection:
        return put_on(connection, topic, drafts)


def put_on(connection: psycopg.Connection[Any], topic: str, drafts: Sequence[Draft]) -> list[Written]:
    """Write drafts in one statement, in their order."""
    given: dict[str, object] = {
        "topic": topic,
        "keys": [draft.key for draft in drafts],
        "sequences": [draft.sequence for draft in drafts],
        "paddings": [draft.padding for draft in drafts],
    }
    return [Written(*row) for row in connection.execute(_PUT, given)]


def is_published(database_url: str, event: Written) -> bool:
    """Whether an event is published."""
    return bool(rows(database_url, "SELECT FROM outbox WHERE event_id = %s AND state = 'published'", event.event_id))


class SteadyWriter:
    """Writes events at an even pace until its context ends, whatever happens meanwhile to what it writes."""

    def __init__(self, database_url: str, topic: str, *, keys: int, per_second: int) -> None:
        self.written: list[Written] = []
        self._database_url = database_url
        self._topic = topic
        self._keys = keys
        self._per_second = per_second
        self._stop = Event()
        self._thread = Thread(target=self._write, name="steady-writer")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _write(self) -> None:
        began, count = monotonic(), 0
        with psycopg.connect(self._database_url, autocommit=True) as connection:
            while not self._stop.wait(PACE_SECONDS):
                due = round((monotonic() - began) * self._per_second)
                self.written += put_on(connection, self._topic, self._drafts(count, due))
                count = due

    def _drafts(self, first: int, end: int) -> list[Draft]:
        return [Draft(f"key-{number % self._keys}", 1 + number // self._keys) for number in range(first, end)]
