"""How PostgreSQL carries the store's statements out, with the session settings of the relay's own connections."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb
from support.relaying import assert_consistent, execute, rows, store_connection

from outbox_tasks.event import SHARDS
from outbox_tasks.store.blocked_keys import FREE_KEYS
from outbox_tasks.store.connection import Connection
from outbox_tasks.store.events import COUNT_HELD, COUNT_PENDING, READ_HELD, READ_PENDING
from outbox_tasks.store.leases import CLAIM, SUSPECT
from outbox_tasks.store.settle import HOLD, PUBLISHED, REFUSED, SETTLE

Node = dict[str, Any]

DAYS = 4
PUBLISHED_EVENTS = 20_000

_FILL = """
INSERT INTO outbox (event_id, aggregate_type, aggregate_id, event_type, payload, state, published_at)
SELECT given.event_id, 'order', given.key, 'order_placed', '{}', given.state,
       CASE given.state WHEN 'published' THEN clock_timestamp() END
  FROM unnest(%s::uuid[], %s::text[], %s::text[]) AS given (event_id, key, state)
"""
_BLOCK = """
INSERT INTO outbox_blocked_key (ordering_key, event_id, kind, reason, retry_at)
SELECT ordering_key, gen_random_uuid(), 'refused', 'test', clock_timestamp()
  FROM outbox WHERE state = 'held' GROUP BY ordering_key
"""


@pytest.fixture(autouse=True)
def consistent(database_url: str) -> Iterator[None]:
    """Look, after each test, at what must always hold."""
    yield
    assert_consistent(database_url)


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    """Open a connection as the relay does."""
    with closing(store_connection(database_url)) as opened:
        # A plan may be bad, and is then to be seen, not cut off.
        opened.execute("SET statement_timeout = '60s'")
        yield opened


@dataclass(frozen=True)
class Statement:
    """A statement of the store, with parameters as a run gives them."""

    text: LiteralString
    parameters: Mapping[str, object]


def uuid_of(day: int, number: int) -> UUID:
    """Return a UUIDv7 of a day from today on."""
    midnight = datetime.now(tz=UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    milliseconds = int((midnight + timedelta(days=day)).timestamp() * 1000) + number
    return UUID(int=milliseconds << 80 | 0x7 << 76 | 0b10 << 62 | number)


def statements(ids: list[UUID]) -> dict[str, Statement]:
    """Return the statements that run over and over, on these events where they name any."""
    bounds: dict[str, object] = {"ids": ids, "first": min(ids), "last": max(ids)}
    refused = Jsonb([{"event_id": str(event_id), "kind": "refused", "reason": "x"} for event_id in ids])
    claim = {"token": uuid4(), "owner": "run", "limit": 16, "seconds": 60, "deaths": 3}
    shards = list(range(SHARDS))
    read = {"shards": shards, "after": [0] * SHARDS, "limit": 15, "bytes": 1_000_000}
    settled = {"token": uuid4(), "shards": shards, "done": shards, "floors": [0] * SHARDS}
    keys = [f"order/{number}" for number in range(20)]
    return {
        "claim": Statement(CLAIM, claim),
        "read pending": Statement(READ_PENDING, read),
        "read held": Statement(READ_HELD, {"keys": keys, "limit": 15, "bytes": 1_000_000}),
        "published": Statement(PUBLISHED, bounds | {"state": "pending"}),
        "settle": Statement(SETTLE, bounds | settled | {"state": "pending"}),
        "hold": Statement(HOLD, bounds | {"state": "pending"}),
        "refused": Statement(REFUSED, bounds | {"refusals": refused, "state": "pending"}),
        "free keys": Statement(FREE_KEYS, {"token": uuid4(), "keys": keys}),
        "suspect": Statement(SUSPECT, {"token": uuid4(), "shard": 1}),
        "count pending": Statement(COUNT_PENDING, {"up_to": 10}),
        "count held": Statement(COUNT_HELD, {"up_to": 10}),
    }


class Planner:
    """Prepares statements once, as a connection that lives on does, and explains how each is carried out."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def prepare(self, name: str, statement: Statement) -> None:
        """Have the database parse a statement, and plan it when it is first carried out."""
        text, _ = _numbered(statement)
        self._connection.execute(f'PREPARE "{name}" AS {text}'.encode())

    def explain(self, name: str, statement: Statement) -> Node:
        """Carry a prepared statement out, undo it, and return its plan."""
        _, values = _numbered(statement)
        call = sql.SQL("EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, FORMAT JSON) EXECUTE {}({})").format(
            sql.Identifier(name), sql.SQL(", ").join(map(sql.Literal, values))
        )
        with self._connection.transaction(force_rollback=True):
            row = self._connection.execute(call).fetchone()
        assert row is not None
        plan: Node = row[0][0]["Plan"]
        return plan


def _numbered(statement: Statement) -> tuple[str, list[object]]:
    """Return a statement with the numbered parameters PREPARE knows, and their values."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    text = re.sub(r"%\((\w+)\)[sb]", number, statement.text).replace("%%", "%")
    return text, [statement.parameters[name] for name in names]


def nodes(plan: Node) -> Iterator[Node]:
    """Yield every node of a plan."""
    yield plan
    for below in plan.get("Plans", []):
        yield from nodes(below)


def is_event_scan(node: Node) -> bool:
    """Say whether a node reads a partition of the events."""
    relation = str(node.get("Relation Name", ""))
    return "Scan" in node["Node Type"] and re.fullmatch(r"outbox(_\d{8}|_default)?", relation) is not None


def event_scans(plan: Node) -> list[Node]:
    """Return the nodes that read partitions of the events; at least one does, or the test looks at nothing."""
    found = [node for node in nodes(plan) if is_event_scan(node)]
    assert found
    return found


def assert_by_index(plan: Node, index: str, *conditions: str) -> None:
    """Assert that events are read through this kind of index alone, and by these columns."""
    for scan in event_scans(plan):
        # A bitmap is read in the order of the table, but made from an index all the same.
        by_index = scan["Plans"][0] if scan["Node Type"] == "Bitmap Heap Scan" else scan
        assert by_index["Node Type"] in {"Index Scan", "Index Only Scan", "Bitmap Index Scan"}, scan
        assert by_index["Index Name"].endswith(index), scan
        for condition in conditions:
            assert condition in by_index.get("Index Cond", ""), scan


def assert_nothing_sorts_events(plan: Node) -> None:
    """Assert that no sort has events below it, but for what a LIMIT let through."""

    def feeds_events(node: Node) -> bool:
        if node["Node Type"] == "Limit":
            return False
        return is_event_scan(node) or any(feeds_events(below) for below in node.get("Plans", []))

    assert not [node for node in nodes(plan) if "Sort" in node["Node Type"] and feeds_events(node)]


# What a plan must be, whatever the partitions hold and whatever the planner knows of them.
EXPECTED: dict[str, Callable[[Node], None]] = {
    "claim": lambda plan: assert_by_index(plan, "_shard_id_idx", "shard =", "id >"),
    "read pending": lambda plan: assert_by_index(plan, "_shard_id_idx", "shard =", "id >"),
    "read held": lambda plan: assert_by_index(plan, "_ordering_key_id_idx", "ordering_key ="),
    "published": lambda plan: assert_by_index(plan, "_pkey", "event_id"),
    "settle": lambda plan: assert_by_index(plan, "_pkey", "event_id"),
    "hold": lambda plan: assert_by_index(plan, "_pkey", "event_id"),
    "refused": lambda plan: assert_by_index(plan, "_pkey", "event_id"),
    "free keys": lambda plan: assert_by_index(plan, "_ordering_key_id_idx", "ordering_key ="),
    "suspect": lambda plan: assert_by_index(plan, "_shard_id_idx", "shard =", "id >"),
    "count pending": lambda plan: assert_by_index(plan, "_shard_id_idx"),
    "count held": lambda plan: assert_by_index(plan, "_ordering_key_id_idx"),
}
NO_EVENTS = [uuid_of(0, 1)]


def fill(database_url: str) -> list[UUID]:
    """Fill several days with published events and a few pending and held ones; returns the last day's pending."""
    given: list[tuple[UUID, str, str]] = [
        (uuid_of(number % DAYS, number), str(number % 500), "published") for number in range(PUBLISHED_EVENTS)
    ]
    start = PUBLISHED_EVENTS
    given += [(uuid_of(number % DAYS, number), str(number % 100), "held") for number in range(start, start + 2000)]
    start += 2000
    given += [(uuid_of(number % DAYS, number), str(number % 300), "pending") for number in range(start, start + 400)]
    with psycopg.connect(database_url) as writer:
        writer.execute(_FILL, [list(column) for column in zip(*given, strict=True)])
        writer.execute(_BLOCK)
    return [event_id for event_id, _, state in given if state == "pending" and event_id >= uuid_of(DAYS - 1, 0)]


def turn_autovacuum_off(database_url: str) -> None:
    """Have the planner know nothing of the partitions until a test says so."""
    for row in rows(database_url, "SELECT relid::regclass::text AS name FROM pg_partition_tree('outbox') WHERE isleaf"):
        execute(database_url, f"ALTER TABLE {row['name']} SET (autovacuum_enabled = off)")


@pytest.mark.parametrize("name", EXPECTED)
def test_plans_of_empty_partitions(connection: Connection, name: str) -> None:
    """On empty partitions every statement already goes by the index that will be right once they are full."""
    statement = statements(NO_EVENTS)[name]
    planner = Planner(connection)
    planner.prepare(name, statement)
    plan = planner.explain(name, statement)
    EXPECTED[name](plan)
    assert_nothing_sorts_events(plan)


@pytest.mark.parametrize("known", ["never analysed", "analysed", "planned while empty"])
def test_plans_of_full_partitions(database_url: str, connection: Connection, known: str) -> None:
    """On full partitions every statement goes by its index, analysed or not, and even if it was planned before."""
    turn_autovacuum_off(database_url)
    planner = Planner(connection)
    if known == "planned while empty":
        for name, statement in statements(NO_EVENTS).items():
            planner.prepare(name, statement)
            planner.explain(name, statement)
    ids = fill(database_url)
    if known == "analysed":
        execute(database_url, "ANALYZE outbox")
    faults: dict[str, str] = {}
    for name, statement in statements(ids).items():
        if known != "planned while empty":
            planner.prepare(name, statement)
        plan = planner.explain(name, statement)
        try:
            EXPECTED[name](plan)
            assert_nothing_sorts_events(plan)
        except AssertionError as fault:
            faults[name] = str(fault)[:600]
    assert not faults


@pytest.mark.parametrize("name", ["published", "hold", "refused"])
def test_settling_touches_only_the_partitions_of_its_events(
    database_url: str, connection: Connection, name: str
) -> None:
    """Partitions that hold none of a settlement's events are passed over when it runs."""
    statement = statements(fill(database_url))[name]
    planner = Planner(connection)
    planner.prepare(name, statement)
    plan = planner.explain(name, statement)
    touched = {scan["Relation Name"] for scan in event_scans(plan) if scan["Actual Loops"] > 0}
    day = (datetime.now(tz=UTC) + timedelta(days=DAYS - 1)).strftime("%Y%m%d")
    # The DEFAULT partition may hold an id of any day.
    assert touched <= {f"outbox_{day}", "outbox_default"}
    assert f"outbox_{day}" in touched


def test_reading_takes_no_more_than_its_limit(database_url: str, connection: Connection) -> None:
    """A read of a shard takes from its index what it returns, not all that is pending there."""
    with psycopg.connect(database_url) as writer:
        ids = [uuid_of(number % DAYS, number) for number in range(5000)]
        writer.execute(_FILL, [ids, ["7"] * 5000, ["pending"] * 5000])
    shards = list(range(SHARDS))
    statement = Statement(READ_PENDING, {"shards": shards, "after": [0] * SHARDS, "limit": 10, "bytes": 10**6})
    planner = Planner(connection)
    planner.prepare("read", statement)
    plan = planner.explain("read", statement)
    read = sum(scan["Actual Rows"] * scan["Actual Loops"] for scan in event_scans(plan))
    assert read <= 10 + 2 * DAYS


def test_a_key_with_many_held_events_is_looked_up_at_once(database_url: str, connection: Connection) -> None:
    """Freeing a key looks for one event it holds, not through all that others hold, even if planned on empty tables."""
    turn_autovacuum_off(database_url)
    planner = Planner(connection)
    statement = statements(NO_EVENTS)["free keys"]
    planner.prepare("free", statement)
    planner.explain("free", statement)
    fill(database_url)
    token = uuid4()
    execute(
        database_url,
        "UPDATE outbox_blocked_key SET lease_token = %s, leased_until = now() + interval '1 hour', lease_owner = 'x'",
        token,
    )
    held_by_20_keys = Statement(FREE_KEYS, {**statement.parameters, "token": token})
    plan = planner.explain("free", held_by_20_keys)
    read = sum(
        (scan["Actual Rows"] + scan.get("Rows Removed by Filter", 0)) * scan["Actual Loops"]
        for scan in event_scans(plan)
    )
    assert read <= 20 * DAYS
