"""Events appended over every kind of connection, and what PostgreSQL then holds."""

import asyncio
import copy
import json
import pickle
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import UTC, date, datetime, timedelta
from typing import Any, Protocol
from uuid import UUID, uuid4

import asyncpg
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.pq import TransactionStatus
from sqlalchemy import Engine, Uuid, column, create_engine, event, insert, text
from sqlalchemy import table as sql_table
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from outbox_tasks import settings as settings_module
from outbox_tasks.append import EventId, NewEvent, append, append_all
from outbox_tasks.errors import InvalidEventError, NoRouteError, NoTransactionError
from outbox_tasks.settings import Settings
from outbox_tasks.store import inserts

PLACED: dict[str, Any] = {"aggregate_type": "order", "aggregate_id": "42", "event_type": "order_placed"}

# one face for every kind of connection


class _Writer(Protocol):
    """A connection within a transaction, whatever its kind."""

    def append(self, **event: Any) -> EventId: ...
    def append_all(self, events: list[NewEvent], **options: Any) -> list[EventId]: ...
    def execute(self, statement: str) -> None: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def append_in_lost_savepoint(self, **event: Any) -> None: ...


class _Sync:
    """A connection that returns."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.commit, self.rollback = connection.commit, connection.rollback

    def append(self, **event: Any) -> EventId:
        written: EventId = append(self.connection, **event)
        return written

    def append_all(self, events: list[NewEvent], **options: Any) -> list[EventId]:
        written: list[EventId] = append_all(self.connection, events, **options)
        return written

    def execute(self, statement: str) -> None:
        of_psycopg = isinstance(self.connection, psycopg.Connection)
        self.connection.execute(statement if of_psycopg else text(statement))

    def append_in_lost_savepoint(self, **event: Any) -> None:
        if isinstance(self.connection, psycopg.Connection):
            with self.connection.transaction(force_rollback=True):
                self.append(**event)
        else:
            savepoint = self.connection.begin_nested()
            self.append(**event)
            savepoint.rollback()


class _Awaited:
    """A connection whose results are awaited, here on a loop of its own."""

    def __init__(self, connection: Any, run: Callable[[Any], Any]) -> None:
        self.connection, self.run = connection, run

    async def _awaited(self, result: Awaitable[Any]) -> Any:
        return await result

    def append(self, **event: Any) -> EventId:
        result: EventId = self.run(self._awaited(append(self.connection, **event)))
        return result

    def append_all(self, events: list[NewEvent], **options: Any) -> list[EventId]:
        result: list[EventId] = self.run(self._awaited(append_all(self.connection, events, **options)))
        return result

    def execute(self, statement: str) -> None:
        of_psycopg = isinstance(self.connection, psycopg.AsyncConnection)
        self.run(self._awaited(self.connection.execute(statement if of_psycopg else text(statement))))

    def commit(self) -> None:
        self.run(self.connection.commit())

    def rollback(self) -> None:
        self.run(self.connection.rollback())

    def append_in_lost_savepoint(self, **event: Any) -> None:
        self.run(self._append_in_lost_savepoint(**event))

    async def _append_in_lost_savepoint(self, **event: Any) -> None:
        if isinstance(self.connection, psycopg.AsyncConnection):
            async with self.connection.transaction(force_rollback=True):
                await append(self.connection, **event)
        else:
            savepoint = await self.connection.begin_nested()
            await append(self.connection, **event)
            await savepoint.rollback()


KINDS = [
    "psycopg.Connection",
    "psycopg.AsyncConnection",
    *(f"{kind} psycopg" for kind in ("Session", "scoped_session", "Connection")),
    *(f"{kind} psycopg" for kind in ("AsyncSession", "async_scoped_session", "AsyncConnection")),
    *(f"{kind} asyncpg" for kind in ("AsyncSession", "async_scoped_session", "AsyncConnection")),
]


@pytest.fixture(params=KINDS)
def writer(request: pytest.FixtureRequest, database_url: str) -> Iterator[_Writer]:
    """Open each kind of connection in turn."""
    with ExitStack() as stack:
        yield _open_writer(stack, request.param, database_url)


def _open_writer(stack: ExitStack, kind: str, url: str) -> _Writer:
    name, _, driver = kind.partition(" ")
    if name == "psycopg.Connection":
        return _Sync(stack.enter_context(closing(psycopg.connect(url))))
    if not name.lower().startswith(("async", "psycopg.async")):
        return _Sync(_open_sync(stack, name, _engine_on(stack, url)))
    runner = stack.enter_context(asyncio.Runner())
    connection = runner.run(_open_async(name, url, driver))
    stack.callback(lambda: runner.run(_close_async(connection)))
    return _Awaited(connection, runner.run)


def _engine_on(stack: ExitStack, url: str, **options: Any) -> Engine:
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"), **options)
    stack.callback(engine.dispose)
    return engine


def _open_sync(stack: ExitStack, name: str, engine: Engine) -> Any:
    if name == "Connection":
        return stack.enter_context(engine.connect())
    if name == "Session":
        return stack.enter_context(Session(engine))
    registry = scoped_session(sessionmaker(engine))
    stack.callback(registry.remove)
    return registry


async def _open_async(name: str, url: str, driver: str, **options: Any) -> Any:
    if name == "psycopg.AsyncConnection":
        return await psycopg.AsyncConnection.connect(url)
    engine = create_async_engine(url.replace("postgresql:", f"postgresql+{driver}:"), **options)
    if name == "AsyncConnection":
        return await engine.connect()
    if name == "AsyncSession":
        return AsyncSession(engine)
    return async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 0)


async def _close_async(connection: Any) -> None:
    engine = getattr(connection, "engine", None) or getattr(connection, "bind", None)
    await connection.close()
    if isinstance(engine, AsyncEngine):
        await engine.dispose()


# what the table holds


def _rows(url: str, columns: str = "event_id", order: str = "id") -> list[Any]:
    with psycopg.connect(url) as connection:
        found = connection.execute(f"SELECT {columns} FROM outbox ORDER BY {order}").fetchall()
    return [row[0] if len(row) == 1 else row for row in found]


def _some(count: int, **fields: Any) -> list[NewEvent]:
    return [NewEvent(**PLACED, payload=number, **fields) for number in range(count)]


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """Open a psycopg connection."""
    with closing(psycopg.connect(database_url)) as opened:
        yield opened


def test_every_part_arrives(writer: _Writer, database_url: str) -> None:
    """Over every connection, all parts of an event arrive in their columns when the transaction commits."""
    event_id = uuid4()
    written = writer.append(
        **PLACED,
        payload={"a": [1, None, "x"]},
        topic="orders",
        partition_key="p",
        headers={"k": "v"},
        event_id=event_id,
    )
    assert _rows(database_url) == []
    writer.commit()
    columns = "event_id, aggregate_type, aggregate_id, event_type, topic, partition_key, payload, headers, state"
    assert _rows(database_url, columns) == [
        (event_id, "order", "42", "order_placed", "orders", "p", {"a": [1, None, "x"]}, {"k": "v"}, "pending")
    ]
    assert written == event_id
    assert written.is_new


def test_ids_are_made_by_the_database(writer: _Writer, database_url: str) -> None:
    """Over every connection, an event without an id gets a UUIDv7, and the caller is told it."""
    written = writer.append(**PLACED)
    writer.commit()
    assert _rows(database_url) == [written]
    assert written.version == 7
    assert isinstance(written, EventId)


def test_rollback_leaves_nothing(writer: _Writer, database_url: str) -> None:
    """Over every connection, a transaction that rolls back takes its events with it."""
    writer.append(**PLACED)
    writer.append_all(_some(3))
    writer.rollback()
    writer.commit()
    assert _rows(database_url) == []


def test_lost_savepoint_leaves_nothing(writer: _Writer, database_url: str) -> None:
    """Over every connection, a savepoint that rolls back takes its event with it, and no other one."""
    first = writer.append(**PLACED)
    writer.append_in_lost_savepoint(**PLACED)
    last = writer.append(**PLACED)
    writer.commit()
    assert _rows(database_url) == [first, last]


def test_duplicate_stays_one_event(writer: _Writer, database_url: str) -> None:
    """Over every connection, an event id that is there already is reported and not written again."""
    event_id = uuid4()
    assert writer.append(**PLACED, payload="first", event_id=event_id).is_new
    assert not writer.append(**PLACED, payload="second", event_id=event_id).is_new
    writer.commit()
    again = writer.append(**PLACED, payload="third", event_id=event_id)
    writer.commit()
    assert (again, again.is_new) == (event_id, False)
    assert _rows(database_url, "event_id, payload") == [(event_id, "first")]


def test_many_keep_their_order(writer: _Writer, database_url: str) -> None:
    """Over every connection, ids come back in the order of the events, and publication has that order too."""
    known, twice = uuid4(), uuid4()
    writer.append(**PLACED, payload="known", event_id=known)
    events = _some(50)
    events[10:10] = [NewEvent(**PLACED, payload="twice", event_id=twice)]
    events[20:20] = [NewEvent(**PLACED, payload=f"again {id_}", event_id=id_) for id_ in (twice, known)]
    ids = writer.append_all(events)
    writer.commit()
    assert [id_ for id_ in ids if not id_.is_new] == ids[20:22] == [twice, known]
    written = [(id_, event.payload) for id_, event in zip(ids, events, strict=True) if id_.is_new]
    assert _rows(database_url, "event_id, payload") == [(known, "known"), *written]


def test_refusal_leaves_the_transaction_usable(writer: _Writer, database_url: str) -> None:
    """Over every connection, a refused event writes nothing, and the transaction still commits other work."""
    writer.execute("CREATE TABLE business (n int)")
    with pytest.raises(InvalidEventError):
        writer.append(**PLACED, payload={"a": "\0"})
    with pytest.raises(InvalidEventError) as caught:
        writer.append_all([*_some(2), NewEvent(**PLACED, payload=float("nan"))])
    assert caught.value.__notes__ == ["It is events[2] of the call."]
    writer.execute("INSERT INTO business VALUES (1)")
    writer.commit()
    assert _rows(database_url) == []
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT n FROM business").fetchall() == [(1,)]


def test_bytes_and_tombstones(writer: _Writer, database_url: str) -> None:
    """Over every connection, bytes are stored as they are, and no payload as neither column."""
    raw = bytes(range(256))
    values: list[object] = [raw, None, {}, b""]
    writer.append_all([NewEvent(**PLACED, payload=value) for value in values])
    writer.commit()
    assert _rows(database_url, "payload, payload_bytes") == [
        (None, raw),
        (None, None),
        ({}, None),
        (None, b""),
    ]


def test_serialize_over_every_connection(writer: _Writer, database_url: str) -> None:
    """Over every connection, a serialized writer holds one lock per ordering key until it commits."""
    writer.append_all([NewEvent(**PLACED | {"aggregate_id": key}) for key in ("a", "b", "a")], serialize=True)
    assert _advisory_locks(database_url) == 2
    writer.commit()
    assert _advisory_locks(database_url) == 0


def _advisory_locks(url: str) -> int:
    of_this_database = "(SELECT oid FROM pg_database WHERE datname = current_database())"
    with psycopg.connect(url) as connection:
        found = connection.execute(
            f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = {of_this_database}"
        ).fetchone()
    assert found is not None
    return int(found[0])


# serialize


def test_second_writer_of_a_key_waits(database_url: str) -> None:
    """A serialized writer of a key waits until the first commits, and is given its place only then."""
    with (
        psycopg.connect(database_url) as one,
        psycopg.connect(database_url) as two,
        ThreadPoolExecutor() as pool,
    ):
        append(one, **PLACED, payload=1, serialize=True)
        second = pool.submit(lambda: append(two, **PLACED, payload=3, serialize=True))
        _wait_until_blocked(database_url, two.info.backend_pid)
        append(one, **PLACED, payload=2)
        one.commit()
        second.result(timeout=10)
        two.commit()
    assert _rows(database_url, "payload") == [1, 2, 3]


def _wait_until_blocked(url: str, pid: int) -> None:
    query = "SELECT wait_event = 'advisory' FROM pg_stat_activity WHERE pid = %s"
    deadline = time.monotonic() + 10
    with psycopg.connect(url, autocommit=True) as connection:
        while connection.execute(query, [pid]).fetchone() != (True,):
            assert time.monotonic() < deadline, "the second writer did not wait"


@pytest.mark.parametrize(
    "other",
    [{"aggregate_id": "43"}, {"partition_key": "p"}, {"topic": "other"}, {"aggregate_type": "invoice"}],
)
def test_other_keys_do_not_wait(database_url: str, other: dict[str, str]) -> None:
    """A serialized writer of another ordering key goes on while the first is open."""
    with psycopg.connect(database_url) as one, psycopg.connect(database_url) as two:
        append(one, **PLACED, serialize=True)
        two.execute("SET LOCAL lock_timeout = '1s'")
        append(two, **(PLACED | other), serialize=True)


def test_same_key_by_another_name_waits(database_url: str) -> None:
    """The key that is locked is the ordering key, whichever of its parts it comes from."""
    with psycopg.connect(database_url) as one, psycopg.connect(database_url) as two:
        append(one, **PLACED, serialize=True)
        two.execute("SET LOCAL lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            append(
                two,
                aggregate_type="parcel",
                aggregate_id="7",
                event_type="sent",
                topic="order",
                partition_key="42",
                serialize=True,
            )


def test_crosswise_writers_do_not_deadlock(database_url: str) -> None:
    """Two calls that lock the same keys take them in the same order, however their events are sorted."""
    keys = [str(number) for number in range(50)]

    def write(order: list[str]) -> None:
        with psycopg.connect(database_url) as connection:
            append_all(connection, [NewEvent(**PLACED | {"aggregate_id": key}) for key in order], serialize=True)

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(write, keys[:: 1 if n % 2 else -1]) for n in range(20)]:
            done.result(timeout=30)
    assert len(_rows(database_url)) == 20 * len(keys)


# many, large, concurrent


def test_chunks(connection: psycopg.Connection[Any], database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that do not fit into one statement go in several, and nothing else changes."""
    monkeypatch.setattr(inserts, "MAX_EVENTS", 7)
    monkeypatch.setattr(inserts, "MAX_BYTES", 1000)
    twice = uuid4()
    events = [
        *_some(20),
        NewEvent(**PLACED, payload="x" * 3000),
        NewEvent(**PLACED, event_id=twice),
        *_some(20),
    ]
    ids = append_all(connection, [*events, NewEvent(**PLACED, event_id=twice)])
    connection.commit()
    assert _rows(database_url) == ids[:-1]
    assert [id_.is_new for id_ in ids] == [True] * 42 + [False]
    assert _rows(database_url, "payload") == [event.payload for event in events]


def test_no_events(connection: psycopg.Connection[Any]) -> None:
    """Appending nothing returns nothing, and begins no transaction."""
    assert append_all(connection, []) == []
    assert append_all(connection, [], serialize=True) == []
    assert connection.info.transaction_status is TransactionStatus.IDLE


@pytest.mark.parametrize("count", [1, 2])
def test_an_asyncpg_connection_with_codecs_of_its_own(database_url: str, count: int) -> None:
    """An application that has asyncpg encode jsonb in its own way stores the same payloads and headers."""

    async def write() -> None:
        engine = create_async_engine(database_url.replace("postgresql:", "postgresql+asyncpg:"))

        @event.listens_for(engine.sync_engine, "connect")
        def set_codec(connection: Any, _record: object) -> None:
            codec = {"encoder": json.dumps, "decoder": json.loads, "schema": "pg_catalog"}
            connection.run_async(lambda driver: driver.set_type_codec("jsonb", **codec))

        async with AsyncSession(engine) as session, session.begin():
            await append_all(session, [NewEvent(**PLACED, payload={"n": 1}, headers={"a": "b"})] * count)
        await engine.dispose()

    asyncio.run(write())
    assert _rows(database_url, "payload, headers") == [({"n": 1}, {"a": "b"})] * count


def test_twelve_thousand_events(connection: psycopg.Connection[Any], database_url: str) -> None:
    """More events than one statement carries keep their order."""
    ids = append_all(connection, iter(_some(12_000)))
    connection.commit()
    assert _rows(database_url) == ids


def test_large_payload(writer: _Writer, database_url: str) -> None:
    """A payload just within the limit arrives whole, over every connection."""
    payload = {"text": 'é"\\' * 166_000}
    writer.append(**PLACED, payload=payload)
    writer.commit()
    assert _rows(database_url, "payload") == [payload]


def _append(connection: psycopg.Connection[Any], event_id: UUID) -> EventId:
    return append(connection, **PLACED, event_id=event_id)


def test_uncommitted_duplicate_waits(database_url: str) -> None:
    """An id that another transaction has inserted waits for its end, and is new if that one rolled back."""
    event_id = uuid4()
    for end, is_new in (("rollback", True), ("commit", False)):
        with psycopg.connect(database_url) as one, psycopg.connect(database_url) as two:
            append(one, **PLACED, event_id=event_id)
            with ThreadPoolExecutor() as pool:
                second = pool.submit(_append, two, event_id)
                getattr(one, end)()
                assert second.result(timeout=10).is_new is is_new
            two.rollback()


# payloads

HOSTILE = [
    'it\'s "quoted" \\ $$ %s :name {} ; DROP TABLE outbox; --',
    "".join(map(chr, range(1, 32))) + "\x7f\x80\u2028\ufeff",
    "\U0001d518\U0001d52b 🎈 \U0010ffff",
    "\\u0000 and \\\\u0000",
    10**1000,
    -(2**63),
    5e-324,
    {"": {"": [[], {}, None, True, False, ""]}},
    {"{NULL}": "NULL", "a,b": '{"a","b"}'},
]


def _deep(depth: int) -> object:
    value: object = "bottom"
    for level in range(depth):
        value = {"level": value} if level % 2 else [value]
    return value


@pytest.mark.parametrize("payload", [*HOSTILE, _deep(100)], ids=lambda payload: repr(payload)[:20])
def test_hostile_payloads(writer: _Writer, database_url: str, payload: object) -> None:
    """Over every connection, whatever is JSON is read back as it was."""
    writer.append(**PLACED, payload=payload)
    writer.commit()
    assert _rows(database_url, "payload") == [payload]


def test_hostile_text(writer: _Writer, database_url: str) -> None:
    """Over every connection, hostile text in the other columns is read back as it was."""
    names = [*(text for text in HOSTILE if isinstance(text, str)), "NULL", "{}", "%", ":a", "'"]
    events = [
        NewEvent(aggregate_type=name, aggregate_id=name, event_type=name, partition_key=name, headers={name: name})
        for name in names
    ]
    writer.append_all(events)
    writer.commit()
    assert _rows(database_url, "aggregate_type, aggregate_id, event_type, partition_key, headers") == [
        (name, name, name, name, {name: name}) for name in names
    ]


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=20,
)


def _numbers_as_floats(value: Any) -> Any:
    """Undo what jsonb does to floats: 1e300 is written as a number of 301 digits."""
    return json.loads(json.dumps(value), parse_int=float)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=JSON.filter(lambda value: value is not None))
def test_any_json(connection: psycopg.Connection[Any], payload: Any) -> None:
    """Any JSON value is read back equal."""
    event_id = append(connection, **PLACED, payload=payload)
    found = connection.execute("SELECT payload FROM outbox WHERE event_id = %s", [event_id]).fetchone()
    connection.rollback()
    assert found is not None
    assert _numbers_as_floats(found[0]) == _numbers_as_floats(payload)


# transactions


def test_psycopg_autocommit_is_refused(database_url: str) -> None:
    """A psycopg connection in autocommit mode is refused, but not within a transaction block."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        with pytest.raises(NoTransactionError, match="no transaction to be part of"):
            append(connection, **PLACED)
        with connection.transaction():
            written = append(connection, **PLACED)
        connection.execute("BEGIN")
        append(connection, **PLACED)
        connection.execute("ROLLBACK")
    assert _rows(database_url) == [written]


def test_async_psycopg_autocommit_is_refused(database_url: str) -> None:
    """An asyncio psycopg connection in autocommit mode is refused, but not within a transaction block."""

    async def run() -> EventId:
        async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
            with pytest.raises(NoTransactionError, match="no transaction to be part of"):
                await append(connection, **PLACED)
            async with connection.transaction():
                return await append(connection, **PLACED)

    written = asyncio.run(run())
    assert _rows(database_url) == [written]


@pytest.mark.parametrize("kind", ["Session", "scoped_session", "Connection"])
def test_sqlalchemy_autocommit_is_refused(database_url: str, kind: str) -> None:
    """SQLAlchemy's AUTOCOMMIT is refused, whether an engine, an engine's option or a connection sets it."""
    with ExitStack() as stack:
        engine = _engine_on(stack, database_url)
        by_engine = _engine_on(stack, database_url, isolation_level="AUTOCOMMIT")
        by_option = engine.execution_options(isolation_level="AUTOCOMMIT")
        for autocommit in (by_engine, by_option):
            with pytest.raises(NoTransactionError, match="no transaction to be part of"):
                append(_open_sync(stack, kind, autocommit), **PLACED)
        with engine.connect() as connection, pytest.raises(NoTransactionError):
            append(connection.execution_options(isolation_level="AUTOCOMMIT"), **PLACED)
    assert _rows(database_url) == []


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("kind", ["AsyncSession", "async_scoped_session", "AsyncConnection"])
def test_async_sqlalchemy_autocommit_is_refused(database_url: str, kind: str, driver: str) -> None:
    """SQLAlchemy's AUTOCOMMIT is refused with asyncio, too."""

    async def run() -> None:
        connection = await _open_async(kind, database_url, driver, isolation_level="AUTOCOMMIT")
        with pytest.raises(NoTransactionError, match="no transaction to be part of"):
            await append(connection, **PLACED)
        await _close_async(connection)

    asyncio.run(run())
    assert _rows(database_url) == []


@pytest.mark.parametrize("connection", [None, "postgresql://", object(), psycopg])
def test_unsupported_connection(connection: Any) -> None:
    """What is no known connection is refused with a list of those that are."""
    with pytest.raises(TypeError, match="pass a Session, scoped_session or Connection of SQLAlchemy"):
        append(connection, **PLACED)


def test_other_database() -> None:
    """A connection of SQLAlchemy to another database is refused by its name."""
    with (
        closing(create_engine("sqlite://").connect()) as connection,
        pytest.raises(TypeError, match="sqlite"),
    ):
        append(connection, **PLACED)


def test_dict_is_no_event(connection: psycopg.Connection[Any]) -> None:
    """`append_all` takes nothing but events."""
    with pytest.raises(TypeError, match=r"events\[0\] is a dict: pass NewEvent"):
        append_all(connection, [PLACED])  # type: ignore[list-item]


class Base(DeclarativeBase):
    """Business tables."""


class Order(Base):
    """A business row."""

    __tablename__ = "business_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]


def test_session_is_flushed_first(database_url: str) -> None:
    """A Session writes its changes before the event: the aggregate is locked when the order is drawn."""
    with ExitStack() as stack:
        engine = _engine_on(stack, database_url)
        Base.metadata.create_all(engine)
        session = stack.enter_context(Session(engine))
        order = Order(state="placed")
        session.add(order)
        append(session, **PLACED)
        assert order.id is not None
        order.state = "paid"
        with session.no_autoflush:
            append(session, **PLACED)
        assert order in session.dirty
        session.commit()
    assert len(_rows(database_url)) == 2


def test_within_a_flush(database_url: str) -> None:
    """An event may be appended from a hook of the Session's own flush."""
    with ExitStack() as stack:
        engine = _engine_on(stack, database_url)
        Base.metadata.create_all(engine)
        session = stack.enter_context(Session(engine))
        event.listen(session, "after_flush", lambda session, _: append(session, **PLACED))
        session.add(Order(state="placed"))
        session.commit()
    assert len(_rows(database_url)) == 1


def test_row_factories_do_not_matter(database_url: str) -> None:
    """A connection's own row factory and cursor class are left alone and do no harm."""
    options: Any = {"row_factory": psycopg.rows.dict_row, "cursor_factory": psycopg.RawCursor}
    with psycopg.connect(database_url, **options) as connection:
        written = append(connection, **PLACED, payload=1)
    assert _rows(database_url) == [written]


def test_pipeline(connection: psycopg.Connection[Any], database_url: str) -> None:
    """Appending works in psycopg's pipeline mode."""
    with connection.pipeline():
        written = append(connection, **PLACED)
    connection.commit()
    assert _rows(database_url) == [written]


# settings


def _settings(**values: object) -> Settings:
    return Settings.model_validate({"database_url": "postgresql://", **values})


def test_settings_of_the_process(connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without settings of its own, a call is checked against those of the process, if there are any."""
    monkeypatch.setattr(settings_module, "_in_use", None)
    append(connection, **PLACED)
    settings_module.use(_settings(max_payload_bytes=10))
    with pytest.raises(NoRouteError):
        append(connection, **PLACED)
    with pytest.raises(InvalidEventError, match="outbox_max_payload_bytes"):
        append_all(connection, [NewEvent(**PLACED, topic="t", payload="x" * 10)])
    append(connection, **PLACED, settings=_settings(routes={"order": "t"}))


# event ids


def test_event_id_is_a_uuid() -> None:
    """An event id equals the UUID it is, survives pickling and copying, and cannot be changed."""
    plain = uuid4()
    event_id = EventId(str(plain), is_new=True)
    assert event_id == plain
    assert {plain: 1}[event_id] == 1
    for other in (pickle.loads(pickle.dumps(event_id)), copy.deepcopy(event_id)):  # noqa: S301 - our own
        assert (other, type(other), other.is_new) == (plain, EventId, True)
    with pytest.raises(TypeError):
        event_id.is_new = False


def test_event_id_is_taken_by_drivers(database_url: str) -> None:
    """Psycopg, SQLAlchemy and asyncpg take an event id where they take a UUID."""
    event_id = EventId(str(uuid4()), is_new=True)
    seen = sql_table("seen", column("id", Uuid))

    async def insert_asyncpg() -> None:
        connection = await asyncpg.connect(database_url)
        await connection.execute("INSERT INTO seen VALUES ($1)", event_id)
        await connection.close()

    with ExitStack() as stack, psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE seen (id uuid)")
        connection.execute("INSERT INTO seen VALUES (%s)", [event_id])
        with _engine_on(stack, database_url).begin() as sqlalchemy:
            sqlalchemy.execute(insert(seen), {"id": event_id})
        asyncio.run(insert_asyncpg())
        assert connection.execute("SELECT id FROM seen").fetchall() == [(event_id,)] * 3


def test_event_id_may_be_given_back(connection: psycopg.Connection[Any]) -> None:
    """The id of an event can be given to another call."""
    written = append(connection, **PLACED)
    again = append(connection, **PLACED, event_id=written)
    assert (again, again.is_new) == (written, False)


# plain SQL

INSERT = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '42', 'placed', '{}')
"""


def test_four_columns_are_enough(connection: psycopg.Connection[Any]) -> None:
    """A plain INSERT of four columns makes a pending event with a UUIDv7, in the partition of its day."""
    before = datetime.now(UTC).date()
    connection.execute(INSERT)
    found = connection.execute(
        "SELECT state, headers, attempts, topic, event_id, tableoid::regclass::text FROM outbox"
    ).fetchone()
    assert found is not None
    *defaults, event_id, partition = found
    assert defaults == ["pending", {}, 0, None]
    assert event_id.version == 7
    assert partition in {f"outbox_{day:%Y%m%d}" for day in (before, datetime.now(UTC).date())}


@pytest.mark.parametrize(
    ("columns", "constraint"),
    [
        ({"headers": '{"a": 1}'}, "outbox_header_values_are_text"),
        ({"headers": '{"a": null}'}, "outbox_header_values_are_text"),
        ({"headers": '{"a": ["x"]}'}, "outbox_header_values_are_text"),
        ({"headers": "[]"}, "outbox_headers_are_an_object"),
        ({"aggregate_id": ""}, "outbox_aggregate_id_not_empty"),
        ({"aggregate_type": ""}, "outbox_aggregate_type_not_empty"),
        ({"event_type": ""}, "outbox_event_type_not_empty"),
        ({"topic": ""}, "outbox_topic_not_empty"),
        ({"payload": "{}", "payload_bytes": "x"}, "outbox_at_most_one_payload"),
        ({"state": "sent"}, "outbox_state_known"),
    ],
)
def test_checks_of_the_table(connection: psycopg.Connection[Any], columns: dict[str, str], constraint: str) -> None:
    """What `append` refuses, the table refuses from plain SQL as far as a CHECK can tell."""
    values = PLACED | columns
    query = f"INSERT INTO outbox ({', '.join(values)}) VALUES ({', '.join(['%s'] * len(values))})"
    with pytest.raises(psycopg.errors.CheckViolation) as caught:
        connection.execute(query, list(values.values()))
    assert caught.value.diag.constraint_name == constraint


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    day=st.dates(min_value=date(1970, 1, 1), max_value=date(9999, 12, 30)),
    milliseconds=st.integers(0, 86_399_999) | st.sampled_from([0, 86_399_999]),
    random_bits=st.integers(0, 2**74 - 1) | st.sampled_from([0, 2**74 - 1]),
)
def test_days_bound_their_ids(
    connection: psycopg.Connection[Any], day: date, milliseconds: int, random_bits: int
) -> None:
    """Every UUIDv7 of a day lies between the floor of its day and that of the next one."""
    since_epoch = (day - date(1970, 1, 1)).days * 86_400_000 + milliseconds
    rand_a, rand_b = divmod(random_bits, 2**62)
    id_ = UUID(int=since_epoch << 80 | 7 << 76 | rand_a << 64 | 2 << 62 | rand_b)
    assert id_.version == 7
    found = connection.execute(
        "SELECT outbox_day_floor(%(day)s) <= %(id)s AND %(id)s < outbox_day_floor(%(next)s)",
        {"day": day, "next": day + timedelta(days=1), "id": id_},
    ).fetchone()
    assert found == (True,)
