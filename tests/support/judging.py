"""The consumer as judge: what is on the topic, held against what was committed."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

import psycopg

from support.consuming import ConsumedRecord, consume_all
from support.writers import Written


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What is wrong with a topic: event ids, or keys; and how many records were repetitions."""

    missing: frozenset[UUID]
    phantom: frozenset[UUID]
    damaged: frozenset[UUID]
    out_of_order: frozenset[str]
    duplicates: int

    @property
    def faults(self) -> dict[str, object]:
        """Everything that must never be, whatever happened; empty where all is well."""
        kinds = {
            "missing": self.missing,
            "phantom": self.phantom,
            "damaged": self.damaged,
            "out of order": self.out_of_order,
        }
        return {kind: (len(found), sorted(found, key=str)[:5]) for kind, found in kinds.items() if found}


def judge(bootstrap_servers: str, topic: str, committed: Iterable[Written]) -> Judgement:
    """Read a topic back whole and compare it with what was committed."""
    return judge_records(consume_all(bootstrap_servers, topic), committed)


def judge_records(records: Sequence[ConsumedRecord], committed: Iterable[Written]) -> Judgement:
    """Compare records, in the order of their partitions, with what was committed."""
    expected = {event.event_id: event for event in committed}
    first: dict[UUID, ConsumedRecord] = {}
    for record in records:
        first.setdefault(event_id_of(record), record)
    seen = {event_id: expected[event_id] for event_id in first if event_id in expected}
    return Judgement(
        missing=frozenset(expected.keys() - first.keys()),
        phantom=frozenset(first.keys() - expected.keys()),
        damaged=frozenset(
            event_id_of(record) for record in records if not _is_intact(record, expected.get(event_id_of(record)))
        ),
        out_of_order=frozenset(_out_of_order(seen.values())),
        duplicates=len(records) - len(first),
    )


def event_id_of(record: ConsumedRecord) -> UUID:
    """Return the id a record carries."""
    return UUID(record.headers["event_id"].decode())


def _is_intact(record: ConsumedRecord, event: Written | None) -> bool:
    """Say whether a record has the key and the payload of its event; a phantom has none to have."""
    if event is None:
        return True
    payload = json.loads(record.value or b"null")
    return record.key == event.key.encode() and payload == {"key": event.key, "sequence": event.sequence}


def _out_of_order(events: Iterable[Written]) -> list[str]:
    """Return the keys whose events, as they first came, are not in the order they were written in."""
    sequences: defaultdict[str, list[int]] = defaultdict(list)
    for event in events:
        sequences[event.key].append(event.sequence)
    return [key for key, came in sequences.items() if came != sorted(came)]


def states(database_url: str) -> Counter[str]:
    """Count the events of the table by state; those that spent an attempt count as `attempted` besides."""
    with psycopg.connect(database_url) as connection:
        rows = connection.execute("SELECT state, attempts > 0, count(*) FROM outbox GROUP BY 1, 2").fetchall()
    found: Counter[str] = Counter()
    for state, attempted, count in rows:
        found[state] += count
        found["attempted"] += count if attempted else 0
    return +found


def table_of(database_url: str) -> list[Written]:
    """Return what the table holds, in the order of publication."""
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(
            "SELECT aggregate_id, (payload->>'sequence')::int, event_id FROM outbox ORDER BY id"
        ).fetchall()
    return [Written(*row) for row in rows]
