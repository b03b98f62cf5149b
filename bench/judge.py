"""The judge: reads a topic back and holds it against the table."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import psycopg

from bench.topics import Arrival, end_of, reading

EVENTS = "SELECT event_id::text, id FROM outbox WHERE aggregate_type = 'order' AND id > %(after)s"

READ_SECONDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What is wrong with a topic, in events.

    `violations` are first occurrences that came after a later event of their key.
    """

    missing: int
    violations: int
    duplicates: int


def judge(database_url: str, bootstrap_servers: str, topic: str, *, after: int = 0) -> Judgement:
    """Compare a topic with the table it came from; `after` is the last id that is not to be in it."""
    with psycopg.connect(database_url, options="-c log_statement=none") as connection:
        place: dict[str, int] = dict(connection.execute(EVENTS, {"after": after}).fetchall())
    return compare(_whole(bootstrap_servers, topic), place)


def compare(arrivals: Iterable[Arrival], place: Mapping[str, int]) -> Judgement:
    """Compare what came, in order per key, with each event's place in the order."""
    seen: set[str] = set()
    newest: dict[bytes | None, int] = {}
    violations = duplicates = 0
    for arrival in arrivals:
        if arrival.event_id in seen:
            duplicates += 1
            continue
        seen.add(arrival.event_id)
        violations += place.get(arrival.event_id, 0) < newest.get(arrival.key, 0)
        newest[arrival.key] = max(place.get(arrival.event_id, 0), newest.get(arrival.key, 0))
    return Judgement(missing=len(place.keys() - seen), violations=violations, duplicates=duplicates)


def _whole(bootstrap_servers: str, topic: str) -> Iterator[Arrival]:
    """Read all that is in a topic now, or what comes of it in time."""
    with end_of(bootstrap_servers, topic) as count:
        left = count()
    deadline = time.monotonic() + READ_SECONDS
    with reading(bootstrap_servers, topic) as poll:
        while left > 0 and time.monotonic() < deadline:
            arrivals = poll()
            left -= len(arrivals)
            yield from arrivals
