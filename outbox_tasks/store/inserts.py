"""What the writer's side executes: the statements of one call of `append`, and what they are given."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sqlalchemy import text

from outbox_tasks.encoding import Row

MAX_EVENTS, MAX_BYTES = 5_000, 16_000_000
"""What one statement carries at most; a single event may be larger."""

# Inserts an event, and returns it if it was not there already. Locks only its new row; waits for the end of a
# transaction that has inserted the same event_id. Sent as text, so that a driver's own ways with jsonb and uuid, which
# the application may have changed, do not meet it.
_INSERT_ONE = """
INSERT INTO outbox (event_id, aggregate_type, aggregate_id, event_type,
                    topic, partition_key, payload, payload_bytes, headers)
VALUES (coalesce(CAST(CAST(:event_id AS text) AS uuid), outbox_uuidv7()), :aggregate_type, :aggregate_id, :event_type,
        :topic, :partition_key, CAST(CAST(:payload AS text) AS jsonb), CAST(:payload_bytes AS bytea),
        CAST(CAST(:headers AS text) AS jsonb))
ON CONFLICT (event_id) DO NOTHING
RETURNING id, CAST(event_id AS text)
"""

# The same for several, sorted so that `id` follows the order given. For a single event this would take a fifth longer.
_INSERT_MANY = """
INSERT INTO outbox (event_id, aggregate_type, aggregate_id, event_type,
                    topic, partition_key, payload, payload_bytes, headers)
SELECT coalesce(CAST(given_id AS uuid), outbox_uuidv7()), aggregate_type, aggregate_id, event_type,
       topic, partition_key, CAST(payload AS jsonb), payload_bytes, CAST(headers AS jsonb)
FROM unnest(CAST(:event_id AS text[]), CAST(:aggregate_type AS text[]), CAST(:aggregate_id AS text[]),
            CAST(:event_type AS text[]), CAST(:topic AS text[]), CAST(:partition_key AS text[]),
            CAST(:payload AS text[]), CAST(:payload_bytes AS bytea[]), CAST(:headers AS text[]))
     WITH ORDINALITY AS e (given_id, aggregate_type, aggregate_id, event_type,
                           topic, partition_key, payload, payload_bytes, headers, place)
ORDER BY place
ON CONFLICT (event_id) DO NOTHING
RETURNING id, CAST(event_id AS text)
"""

# Makes the writers of an ordering key wait for each other until they commit. The keys arrive sorted, so that
# no two writers wait for each other crosswise; the seed ("outbox_k") keeps these locks apart from others.
_SERIALIZE = """
SELECT count(pg_advisory_xact_lock(hashtextextended(ordering_key, 8031453476610924395)))
FROM unnest(CAST(:ordering_key AS text[])) AS ordering_key
"""

_PLACEHOLDER = re.compile(r":(\w+)")


class Statement:
    """A statement in the two styles of placeholders."""

    def __init__(self, statement: str, *, sent: str) -> None:
        self.sqlalchemy = text(statement)
        self.psycopg = _PLACEHOLDER.sub(rf"%(\1){sent}", statement).encode()


_ONE = Statement(_INSERT_ONE, sent="s")
_MANY, _KEYS = (Statement(sql, sent="b") for sql in (_INSERT_MANY, _SERIALIZE))  # lists in binary: a third faster


class Step(NamedTuple):
    """A statement to execute, and its parameters."""

    statement: Statement
    parameters: Mapping[str, object]


class Work(NamedTuple):
    """What locks the ordering keys, what inserts the events, and the id given for each event, if one was."""

    locks: list[Step]
    inserts: list[Step]
    given_ids: list[str | None]


def work(rows: list[Row], *, serialize: bool) -> Work:
    """Return what writes these events, in their order; `serialize` locks their ordering keys first."""
    locks = [Step(_KEYS, {"ordering_key": sorted({row.ordering_key for row in rows})})] if serialize and rows else []
    return Work(locks, [_insert(chunk) for chunk in _chunks(rows)], [row.event_id for row in rows])


def _chunks(rows: list[Row]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    size = 0
    for row in rows:
        if chunk and (len(chunk) == MAX_EVENTS or size + row.size > MAX_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += row.size
    if chunk:
        yield chunk


def _insert(rows: list[Row]) -> Step:
    if len(rows) == 1:
        return Step(_ONE, rows[0]._asdict())
    return Step(_MANY, {name: list(column) for name, column in zip(Row._fields, zip(*rows, strict=True), strict=True)})
