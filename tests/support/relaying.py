"""The relay below Celery: runs on real connections and publishers, events put in by SQL, and what must always hold."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from outbox_tasks.event import SHARDS, Event
from outbox_tasks.ports import Ports, never
from outbox_tasks.publishing.factory import new_publisher
from outbox_tasks.publishing.kafka_python import KafkaPythonPublisher
from outbox_tasks.publishing.publisher import Publisher, Stopping
from outbox_tasks.settings import Settings
from outbox_tasks.store import events
from outbox_tasks.store.connection import Connection, connect
from outbox_tasks.store.settle import Refusal
from outbox_tasks.testing.services import Broker
from support.waiting import until

Row = dict[str, Any]

NO_BROKER = "127.0.0.1:1"
"""Nobody listens there."""

_STATES = {"pending", "held", "published"}

# Each finds what must not be, and calls it by name.
_FAULTS = {
    "held without a blocked key": """
        SELECT o.id, o.ordering_key FROM outbox AS o
         WHERE o.state = 'held'
           AND NOT EXISTS (SELECT FROM outbox_blocked_key AS b WHERE b.ordering_key = o.ordering_key)
    """,
    "blocked key that holds nothing, waits for nobody and is tried by nobody": """
        SELECT b.ordering_key, b.kind FROM outbox_blocked_key AS b
         WHERE b.lease_token IS NULL AND b.kind <> 'dead'
           AND NOT EXISTS (SELECT FROM outbox AS o WHERE o.ordering_key = b.ordering_key AND o.state = 'held')
    """,
    "lease that ended and was not given back": """
        SELECT shard::text, lease_owner FROM outbox_shard WHERE leased_until <= clock_timestamp()
        UNION ALL
        SELECT ordering_key, lease_owner FROM outbox_blocked_key WHERE leased_until <= clock_timestamp()
    """,
    "trace of a lease on something free": """
        SELECT shard::text, lease_owner FROM outbox_shard WHERE lease_token IS NULL AND lease_owner IS NOT NULL
        UNION ALL
        SELECT ordering_key, lease_owner FROM outbox_blocked_key WHERE lease_token IS NULL AND lease_owner IS NOT NULL
    """,
    "pending event with a history": """
        SELECT id, attempts, last_error FROM outbox
         WHERE state = 'pending' AND (attempts > 0 OR last_error IS NOT NULL OR published_at IS NOT NULL)
    """,
    "pending event under its shard's floor": """
        SELECT o.id, o.shard, s.floor FROM outbox AS o JOIN outbox_shard AS s USING (shard)
         WHERE o.state = 'pending' AND o.id <= s.floor
    """,
    "published event without a time, or the reverse": """
        SELECT id, state FROM outbox WHERE (state = 'published') <> (published_at IS NOT NULL)
    """,
}


def rows(database_url: str, query: str, *parameters: object) -> list[Row]:
    """Return what a query finds."""
    with psycopg.connect(database_url) as connection:
        return connection.cursor(row_factory=dict_row).execute(query.encode(), parameters).fetchall()


def execute(database_url: str, statement: str, *parameters: object) -> None:
    """Run a statement and commit it."""
    with psycopg.connect(database_url) as connection:
        connection.execute(statement.encode(), parameters)


def assert_consistent(database_url: str) -> None:
    """Assert what holds after every test, whatever happened in it."""
    found = {fault: rows(database_url, query)[:5] for fault, query in _FAULTS.items()}
    wrong = {fault: examples for fault, examples in found.items() if examples}
    assert not wrong, wrong
    states_seen = {row["state"] for row in rows(database_url, "SELECT DISTINCT state FROM outbox")}
    assert states_seen <= _STATES, states_seen


def insert(connection: psycopg.Connection[Any], *drafts: Mapping[str, object]) -> list[UUID]:
    """Write events column by column, in their order, as any language would; returns their ids."""
    return [_insert_one(connection, draft) for draft in drafts]


def _insert_one(connection: psycopg.Connection[Any], draft: Mapping[str, object]) -> UUID:
    columns = {"aggregate_type": "order", "aggregate_id": "1", "event_type": "order_placed"} | dict(draft)
    values = [Jsonb(value) if name in {"payload", "headers"} else value for name, value in columns.items()]
    statement = sql.SQL("INSERT INTO outbox ({}) VALUES ({}) RETURNING event_id").format(
        sql.SQL(", ").join(map(sql.Identifier, columns)), sql.SQL(", ").join(sql.Placeholder() * len(values))
    )
    row = connection.execute(statement, values).fetchone()
    assert row is not None
    event_id: UUID = row[0]
    return event_id


def new_topic(broker: Broker, **config: str) -> str:
    """Create a topic for one test, `_` standing for `.` in the names of its settings."""
    name = f"topic-{uuid4().hex}"
    broker.create_topic(name, config={key.replace("_", "."): value for key, value in config.items()})
    return name


def put(database_url: str, *drafts: Mapping[str, object]) -> list[UUID]:
    """Write events in one transaction."""
    with psycopg.connect(database_url) as connection:
        return insert(connection, *drafts)


def numbered(keys: Sequence[str], *, each: int, start: int = 0, **columns: object) -> list[Row]:
    """Return drafts of `each` events a key, the keys in turn; the payload says key and number."""
    return [
        {"aggregate_id": key, "payload": {"key": key, "number": number}, **columns}
        for number in range(start, start + each)
        for key in keys
    ]


def table(database_url: str) -> list[Row]:
    """Return all events by id."""
    return rows(database_url, "SELECT * FROM outbox ORDER BY id")


def states(database_url: str) -> list[str]:
    """Return the states of all events by id."""
    return [row["state"] for row in table(database_url)]


def blocked(database_url: str) -> dict[str, Row]:
    """Return the blocked keys."""
    found = rows(database_url, "SELECT *, retry_at - clock_timestamp() AS wait FROM outbox_blocked_key")
    return {row["ordering_key"]: row for row in found}


def leased_shards(database_url: str) -> list[int]:
    """Return the shards somebody holds, or died holding."""
    return [row["shard"] for row in rows(database_url, "SELECT shard FROM outbox_shard WHERE lease_token IS NOT NULL")]


def key_by_shard(database_url: str, shards: int) -> dict[int, str]:
    """Return an aggregate id of type `order` for each of so many shards."""
    query = """
        SELECT (hashtextextended('order/' || n, 0) & 63)::int AS shard, min(n)::text AS key
          FROM generate_series(1, 2000) AS n GROUP BY 1 ORDER BY 1 LIMIT %s
    """
    return {row["shard"]: row["key"] for row in rows(database_url, query, shards)}


def keys_of_one_shard(database_url: str, count: int) -> list[str]:
    """Return aggregate ids of type `order` that share a shard."""
    query = """
        SELECT n::text AS key FROM generate_series(1, 10000) AS n
         WHERE hashtextextended('order/' || n, 0) & 63 = 7 ORDER BY n LIMIT %s
    """
    return [row["key"] for row in rows(database_url, query, count)]


def make_due(database_url: str) -> None:
    """Let every blocked key be due, as if its time had come."""
    execute(database_url, "UPDATE outbox_blocked_key SET retry_at = clock_timestamp() WHERE retry_at IS NOT NULL")


def end_leases(database_url: str) -> None:
    """Let every lease be over, as if its time had passed."""
    for lease in ("outbox_shard", "outbox_blocked_key"):
        execute(database_url, f"UPDATE {lease} SET leased_until = clock_timestamp() WHERE lease_token IS NOT NULL")


def relay_settings(database_url: str, broker: Broker | str = NO_BROKER, **changed: Any) -> Settings:
    """Return settings for a test: the defaults, for this database and this broker."""
    servers = broker if isinstance(broker, str) else broker.bootstrap_servers
    return Settings(database_url=database_url, bootstrap_servers=servers, **changed)


def store_connection(database_url: str) -> Connection:
    """Open a connection as the relay does; the caller closes it."""
    return connect(relay_settings(database_url))


@contextmanager
def relay(
    settings: Settings,
    *,
    owner: str = "test",
    publisher: Publisher | None = None,
    stopping: Stopping = never,
) -> Iterator[Ports]:
    """Give what a run works with: a connection of its own and, if none is given, a publisher of its own."""
    mine = publisher or new_publisher(settings)
    try:
        with connect(settings) as connection:
            yield Ports(connection=connection, publisher=mine, settings=settings, owner=owner, stopping=stopping)
    finally:
        if publisher is None:
            mine.close()


def with_settings(ports: Ports, **changed: Any) -> Ports:
    """Return the same ports with other settings."""
    return replace(ports, settings=ports.settings.model_copy(update=changed))


class Interrupted(KafkaPythonPublisher):
    """A real publisher that has something happen at chosen moments: before it looks at topics, or once it has sent."""

    def __init__(
        self,
        settings: Settings,
        *,
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(settings, clock=time.monotonic)
        self._before, self._after = before, after
        self._look = self.topics.facts
        self.topics.facts = self._disturbed_look  # type: ignore[method-assign]

    def _disturbed_look(self, topics: Any) -> Any:
        """Have the first thing happen, once, then look."""
        before, self._before = self._before, lambda: None
        before()
        return self._look(topics)

    def send(self, records: Any, **options: Any) -> Any:
        """Send, then have the second thing happen, once."""
        sent = super().send(records, **options)
        after, self._after = self._after, lambda: None
        after()
        return sent


def pending(connection: Connection) -> list[Event]:
    """Return all pending events, as a run that holds every shard reads them."""
    return events.read_pending(connection, after=dict.fromkeys(range(SHARDS), 0), limit=10_000)


def refusal(event: Event, **changed: Any) -> Refusal:
    """Return what is to be written of an event that was refused."""
    given: Row = {"kind": "refused", "topic": event.topic, "reason": "it is too large", "retry_seconds": 60.0}
    return Refusal(event=event, **(given | changed))


def block(database_url: str, ordering_key: str, **changed: object) -> None:
    """Block a key and hold all its pending events, as settlements before this test would have."""
    columns = {"kind": "refused", "reason": "blocked by the test", "event_id": uuid4()} | changed
    names = ", ".join(columns)
    places = ", ".join(["%s"] * len(columns))
    execute(
        database_url,
        f"INSERT INTO outbox_blocked_key (ordering_key, retry_at, {names}) VALUES (%s, clock_timestamp(), {places})",
        ordering_key,
        *columns.values(),
    )
    hold = "UPDATE outbox SET state = 'held' WHERE state = 'pending' AND ordering_key = %s"
    execute(database_url, hold, ordering_key)


def backend(connection: psycopg.Connection[Any]) -> int:
    """Return the process that serves a connection."""
    return connection.info.backend_pid


def waits_for_lock(database_url: str, pid: int) -> bool:
    """Say whether a backend waits for a lock just now."""
    query = "SELECT 1 AS yes FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
    return bool(rows(database_url, query, pid))


def await_lock(database_url: str, connection: psycopg.Connection[Any]) -> None:
    """Return as soon as a connection waits for a lock somebody else holds."""
    until(partial(waits_for_lock, database_url, backend(connection)), "a session waits for a lock")


@dataclass(frozen=True)
class Steps:
    """A clock that a test moves by hand."""

    seconds: list[float]

    def __call__(self) -> float:
        """Return the time."""
        return self.seconds[0]

    def move(self, by: float) -> None:
        """Let time pass."""
        self.seconds[0] += by


def dice(seed: int) -> random.Random:
    """Return chance that repeats itself."""
    return random.Random(seed)  # noqa: S311 - a test is no secret


def an_event(**changed: Any) -> Event:
    """Return an event as a loop reads it, without a database."""
    given: Row = {
        "event_id": UUID(int=changed.get("id", 1)),
        "id": 1,
        "shard": 0,
        "ordering_key": "order/1",
        "aggregate_type": "order",
        "event_type": "order_placed",
        "topic": None,
        "key": b"1",
        "value": b"{}",
        "headers": {},
        "attempts": 0,
        "blocked": False,
    }
    return Event(**(given | changed))


def ports_without_database(settings: Settings, publisher: Publisher, *, stopping: Stopping = never) -> Ports:
    """Return what the pure part of a run works with: it has no connection to use."""
    nothing = cast("Connection", None)
    return Ports(connection=nothing, publisher=publisher, settings=settings, owner="", stopping=stopping)


def results_of(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[Any]:
    """Have what every call of a function returns noted from now on."""
    results: list[Any] = []
    function: Callable[..., Any] = getattr(owner, name)

    def counted(*arguments: Any, **named: Any) -> Any:
        results.append(function(*arguments, **named))
        return results[-1]

    monkeypatch.setattr(owner, name, counted)
    return results
