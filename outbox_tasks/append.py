"""The writer's side: puts events into the outbox, in the caller's own transaction, over any connection."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, Required, TypedDict, TypeVar, Unpack, overload
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from outbox_tasks import commits
from outbox_tasks.encoding import NewEvent, Row, encode
from outbox_tasks.errors import NoTransactionError, OutboxError
from outbox_tasks.event import EventId
from outbox_tasks.settings import Settings, in_use
from outbox_tasks.store import inserts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

__all__ = ["AnyConnection", "EventId", "NewEvent", "append", "append_all"]

SyncConnection = Session | scoped_session[Any] | Connection | psycopg.Connection[Any]
AwaitedConnection = AsyncSession | async_scoped_session[Any] | AsyncConnection | psycopg.AsyncConnection[Any]
AnyConnection = SyncConnection | AwaitedConnection

T = TypeVar("T")


class _Options(TypedDict, total=False):
    """How to append."""

    serialize: bool
    settings: Settings | None


class _Event(_Options, total=False):
    """The arguments of `append`, for its two signatures."""

    aggregate_type: Required[str]
    aggregate_id: Required[str]
    event_type: Required[str]
    payload: object
    topic: str | None
    partition_key: str | None
    headers: Mapping[str, str] | None
    event_id: UUID | None


@overload
def append(connection: SyncConnection, **event: Unpack[_Event]) -> EventId: ...


@overload
def append(connection: AwaitedConnection, **event: Unpack[_Event]) -> Awaitable[EventId]: ...


def append(  # noqa: PLR0913 - an event has that many parts, and each is a keyword
    connection: AnyConnection,
    *,
    aggregate_type: str,
    aggregate_id: str,
    event_type: str,
    payload: object = None,
    topic: str | None = None,
    partition_key: str | None = None,
    headers: Mapping[str, str] | None = None,
    event_id: UUID | None = None,
    serialize: bool = False,
    settings: Settings | None = None,
) -> EventId | Awaitable[EventId]:
    """Write one event, at once and in the transaction that `connection` is in.

    The event is published once that transaction commits; if it, or a savepoint around the call, rolls back,
    the event never was. A Session is flushed first, as before a query of its own (unless `autoflush` is off):
    the aggregate's row is then locked before the event gets its place in the order. A Session with several
    binds cannot tell which one is meant: pass `session.connection(bind_arguments=…)`.

    A Session's outermost commit wakes the relay, if anything new was committed. Over the other connections call
    `outbox_tasks.wake()` after your commit, or leave the event to beat's next tick.

    Args:
        connection: SQLAlchemy `Session`, `scoped_session` or `Connection`, psycopg `Connection`; or one of
            their asyncio forms, where the result is to be awaited.
        aggregate_type: What kind of thing the event is about, such as `order`. At most 1,000 bytes, as
            `aggregate_id`, `event_type` and `partition_key`: they are indexed.
        aggregate_id: Which one. Events of one aggregate are published in order.
        event_type: What happened, such as `order_placed`.
        payload: None for a tombstone; `bytes`, `bytearray` or `memoryview` to be sent as they are; else JSON:
            what `json` knows, and date, time and datetime (ISO 8601), UUID and Decimal (text), Enum (its
            value), pydantic models (`model_dump(mode="json")`), dataclasses (their fields), mappings, tuples
            and sets (arrays; sets sorted by value, or else by their encoded text). Stored as `jsonb`, which
            keeps every digit of a number but not how it was written, and no order of keys.
        topic: Kafka topic. None: the routes decide when the event is published.
        partition_key: Key of the Kafka record. None: the aggregate id. '': a record without a key.
        headers: Headers of the Kafka record, text to text; `event_id` and `event_type` are the relay's.
        event_id: Makes the call idempotent: an id that is there already stays one event. None: a new UUIDv7.
        serialize: First wait until other transactions that serialize on this event's ordering key have ended,
            so that its events are published in the order of commits. Needed only where the writers of a key
            lock no common row. Held until the transaction ends: append last, and in one order of keys.
        settings: Routes and limits to check against. None: those of this process, if it has set any.

    Returns:
        The event's id, which knows whether it `is_new`.

    Raises:
        InvalidEventError: the event cannot be written as it is. Nothing was sent: the transaction goes on.
        NoRouteError: the event names no topic, and neither do the routes.
        NoTransactionError: the connection commits every statement by itself.
        TypeError: `connection` is none of the supported ones.
    """
    event = NewEvent(
        aggregate_type=aggregate_type,
        aggregate_id=aggregate_id,
        event_type=event_type,
        payload=payload,
        topic=topic,
        partition_key=partition_key,
        headers=headers,
        event_id=event_id,
    )
    rows = [encode(event, settings=settings or in_use())]
    return _run(connection, inserts.work(rows, serialize=serialize), itemgetter(0))


@overload
def append_all(
    connection: SyncConnection, events: Iterable[NewEvent], **options: Unpack[_Options]
) -> list[EventId]: ...


@overload
def append_all(
    connection: AwaitedConnection, events: Iterable[NewEvent], **options: Unpack[_Options]
) -> Awaitable[list[EventId]]: ...


def append_all(
    connection: AnyConnection,
    events: Iterable[NewEvent],
    *,
    serialize: bool = False,
    settings: Settings | None = None,
) -> list[EventId] | Awaitable[list[EventId]]:
    """Write many events, in their order: as `append`, with one statement for every 5,000 of them or 16 MB.

    All are checked before the first is written. `serialize` takes one lock per distinct ordering key, and
    PostgreSQL has room for some thousands of locks (`max_locks_per_transaction`).

    Returns:
        One id per event, in the order of `events`. Of two with one `event_id`, only the first may be new.

    Raises:
        InvalidEventError: as `append`; a note on the error says which event it was.
        TypeError: as `append`, or something in `events` is no `NewEvent`.
    """
    rows = _encode_all(events, settings=settings or in_use())
    return _run(connection, inserts.work(rows, serialize=serialize), list)


_Inserted = tuple[int, str]
"""What an insert returns of a new event: its `id`, its event id."""


def _encode_all(events: Iterable[NewEvent], *, settings: Settings | None) -> list[Row]:
    return [_encode_at(place, event, settings=settings) for place, event in enumerate(events)]


def _encode_at(place: int, event: NewEvent, *, settings: Settings | None) -> Row:
    if not isinstance(event, NewEvent):
        raise TypeError(f"events[{place}] is a {type(event).__qualname__}: pass NewEvent(…)")
    try:
        return encode(event, settings=settings)
    except OutboxError as error:
        error.add_note(f"It is events[{place}] of the call.")
        raise


def _event_ids(work: inserts.Work, inserted: list[_Inserted]) -> list[EventId]:
    """Say of each event what its id is and whether it is new.

    An insert does not promise the order of what it returns, but `id` has the order of the events; those whose
    id was not given are all new. Of two events with one id only the first is.
    """
    given = set(work.given_ids)
    made = iter([event_id for _, event_id in sorted(inserted) if event_id not in given])
    new = {event_id for _, event_id in inserted}
    return [_event_id(next(made) if event_id is None else event_id, new) for event_id in work.given_ids]


def _event_id(event_id: str, new: set[str]) -> EventId:
    is_new = event_id in new
    new.discard(event_id)
    return EventId(event_id, is_new=is_new)


def _run(connection: AnyConnection, work: inserts.Work, result: Callable[[list[EventId]], T]) -> T | Awaitable[T]:
    """Do the work over whatever `connection` is, and return, or make awaitable, the result of its ids."""
    if isinstance(connection, psycopg.Connection):
        return result(_event_ids(work, _over_psycopg(connection, work)))
    if isinstance(connection, psycopg.AsyncConnection):
        return _awaited(_over_async_psycopg(connection, work), work, result)
    if isinstance(connection, scoped_session | async_scoped_session):
        return _run(connection(), work, result)
    if isinstance(connection, AsyncSession | AsyncConnection):
        return _awaited(connection.run_sync(_over_sqlalchemy, work), work, result)
    return result(_event_ids(work, _over_sqlalchemy(connection, work)))


async def _awaited(inserted: Awaitable[list[_Inserted]], work: inserts.Work, result: Callable[[list[EventId]], T]) -> T:
    return result(_event_ids(work, await inserted))


def _over_sqlalchemy(given: Session | Connection, work: inserts.Work) -> list[_Inserted]:
    connection = _connection_of(given)
    if connection.dialect.name != "postgresql":
        raise _unsupported(f"a SQLAlchemy connection to {connection.dialect.name}")
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise _no_transaction()
    for statement, parameters in work.locks:
        connection.execute(statement.sqlalchemy, parameters)
    results = (connection.execute(statement.sqlalchemy, parameters) for statement, parameters in work.inserts)
    inserted = [(id_, event_id) for result in results for id_, event_id in result]
    if inserted and isinstance(given, Session):
        commits.mark(given, connection)
    return inserted


def _connection_of(given: Session | Connection) -> Connection:
    if isinstance(given, Connection):
        return given
    if not isinstance(given, Session):
        raise _unsupported(f"a {type(given).__module__}.{type(given).__qualname__}")
    given._autoflush()  # noqa: SLF001 - as every query of a Session does; it knows whether a flush is under way
    return given.connection()


def _over_psycopg(connection: psycopg.Connection[Any], work: inserts.Work) -> list[_Inserted]:
    _check_transaction(connection)
    inserted: list[_Inserted] = []
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        for statement, parameters in work.locks:
            cursor.execute(statement.psycopg, parameters)
        for statement, parameters in work.inserts:
            inserted += cursor.execute(statement.psycopg, parameters)
    return inserted


async def _over_async_psycopg(connection: psycopg.AsyncConnection[Any], work: inserts.Work) -> list[_Inserted]:
    _check_transaction(connection)
    inserted: list[_Inserted] = []
    async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
        for statement, parameters in work.locks:
            await cursor.execute(statement.psycopg, parameters)
        for statement, parameters in work.inserts:
            await cursor.execute(statement.psycopg, parameters)
            inserted += await cursor.fetchall()
    return inserted


def _check_transaction(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Refuse autocommit, but not within `with connection.transaction()`."""
    if connection.autocommit and connection.info.transaction_status is TransactionStatus.IDLE:
        raise _no_transaction()


def _no_transaction() -> NoTransactionError:
    return NoTransactionError(
        "no transaction to be part of: the connection is in autocommit mode, so the event would not commit "
        "together with your data. Use a connection without autocommit, or (psycopg) append within "
        "`with connection.transaction():`"
    )


def _unsupported(what: str) -> TypeError:
    return TypeError(
        f"cannot append over {what}: pass a Session, scoped_session or Connection of SQLAlchemy (or an "
        "AsyncSession, async_scoped_session or AsyncConnection) on PostgreSQL, or a Connection or "
        "AsyncConnection of psycopg 3"
    )
