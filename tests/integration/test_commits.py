"""Which commits of a Session wake the relay: those that committed an event, once each, and no others."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from outbox_tasks import append, append_all, waker
from outbox_tasks.append import NewEvent

PLACED: dict[str, Any] = {"aggregate_type": "order", "aggregate_id": "42", "event_type": "order_placed"}


class Counter:
    """Counts how often the relay was woken."""

    wakes = 0

    def wake(self) -> None:
        """Count."""
        self.wakes += 1


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Install a counter as what wakes the relay."""
    installed = Counter()
    monkeypatch.setattr(waker, "_installed", installed)
    return installed


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """Open the database as a service does."""
    opened = create_engine(database_url.replace("postgresql:", "postgresql+psycopg:"))
    yield opened
    opened.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """Open a session."""
    with Session(engine) as opened:
        yield opened


class Base(DeclarativeBase):
    """The tables of the service."""


class Note(Base):
    """A business row, of which no two have the same text once they commit."""

    __tablename__ = "note"
    id: Mapped[int] = mapped_column(primary_key=True)
    body: Mapped[str]


def test_one_commit_is_one_wake(session: Session, counter: Counter) -> None:
    """However many events a transaction holds, and however they were appended, its commit wakes the relay once."""
    append(session, **PLACED)
    append_all(session, [NewEvent(**PLACED), NewEvent(**PLACED)])
    with session.begin_nested():
        append(session, **PLACED)
    assert counter.wakes == 0
    session.commit()
    assert counter.wakes == 1


def test_commits_without_events_wake_nobody(session: Session, counter: Counter) -> None:
    """A session wakes nobody when it commits no event, before and after one that it did commit."""
    session.execute(text("SELECT 1"))
    session.commit()
    append(session, **PLACED)
    session.commit()
    session.execute(text("SELECT 1"))
    session.commit()
    assert counter.wakes == 1


@pytest.mark.parametrize("end", ["rollback", "close", "reset"])
def test_what_is_not_committed_wakes_nobody(session: Session, counter: Counter, end: str) -> None:
    """An event that is rolled back, in whatever way, wakes nobody, and neither does the session's next commit."""
    append(session, **PLACED)
    getattr(session, end)()
    session.execute(text("SELECT 1"))
    session.commit()
    assert counter.wakes == 0


def test_a_rolled_back_savepoint_wakes_nobody(session: Session, counter: Counter) -> None:
    """Events of a savepoint that is rolled back wake nobody when the transaction around it commits."""
    savepoint = session.begin_nested()
    append(session, **PLACED)
    savepoint.rollback()
    session.commit()
    assert counter.wakes == 0


def test_a_released_savepoint_in_a_lost_one_wakes_nobody(session: Session, counter: Counter) -> None:
    """Events of a savepoint that was released are lost with the one around it, and wake nobody."""
    outer = session.begin_nested()
    with session.begin_nested():
        append(session, **PLACED)
    outer.rollback()
    session.commit()
    assert counter.wakes == 0


def test_a_lost_savepoint_takes_only_its_own_along(session: Session, counter: Counter) -> None:
    """An event appended before or after a savepoint that is rolled back still wakes the relay, once."""
    append(session, **PLACED)
    lost = session.begin_nested()
    append(session, **PLACED)
    lost.rollback()
    session.commit()
    assert counter.wakes == 1


def test_savepoints_all_the_way_down(session: Session, counter: Counter) -> None:
    """An event three released savepoints deep wakes the relay at the outermost commit and not before."""
    with session.begin():
        with session.begin_nested(), session.begin_nested(), session.begin_nested():
            append(session, **PLACED)
        assert counter.wakes == 0
    assert counter.wakes == 1


def test_commit_of_the_whole_from_within_a_savepoint(session: Session, counter: Counter) -> None:
    """`Session.commit` while a savepoint is open releases it and wakes the relay once."""
    session.begin_nested()
    append(session, **PLACED)
    session.commit()
    assert counter.wakes == 1


def test_an_event_that_was_there_wakes_nobody(session: Session, counter: Counter) -> None:
    """Appending an event that is there already writes nothing and wakes nobody."""
    event_id = uuid4()
    for _ in range(2):
        append(session, **PLACED, event_id=event_id)
        session.commit()
    assert counter.wakes == 1


def test_a_commit_that_fails_wakes_nobody(session: Session, counter: Counter) -> None:
    """A transaction that breaks a deferred constraint at its commit wakes nobody, then or later."""
    session.execute(text("CREATE TABLE once (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
    session.commit()
    session.execute(text("INSERT INTO once VALUES (1), (1)"))
    append(session, **PLACED)
    with pytest.raises(IntegrityError):
        session.commit()
    session.rollback()
    session.execute(text("SELECT 1"))
    session.commit()
    assert counter.wakes == 0


@pytest.mark.parametrize("nested", [False, True])
def test_an_event_appended_while_flushing(session: Session, counter: Counter, *, nested: bool) -> None:
    """An event that a flush hook appends wakes the relay when the transaction commits."""
    Base.metadata.create_all(session.connection())
    session.commit()
    event.listen(session, "after_flush", lambda *_: append(session, **PLACED))
    if nested:
        with session.begin_nested():
            session.add(Note(body="a"))
    else:
        session.add(Note(body="a"))
    session.commit()
    assert counter.wakes == 1


def test_a_savepoint_begun_while_flushing(session: Session, counter: Counter) -> None:
    """An event in a savepoint that a flush hook begins and releases wakes the relay too."""

    def hook(*_: object) -> None:
        with session.begin_nested():
            append(session, **PLACED)

    Base.metadata.create_all(session.connection())
    session.commit()
    event.listen(session, "after_flush", hook)
    session.add(Note(body="a"))
    session.commit()
    assert counter.wakes == 1


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "create_savepoint"])
def test_a_session_that_joined_a_transaction(engine: Engine, counter: Counter, mode: Any) -> None:
    """A session that joined its connection's transaction has committed nothing, and wakes nobody."""
    with engine.connect() as connection:
        transaction = connection.begin()
        with Session(connection, join_transaction_mode=mode) as session:
            append(session, **PLACED)
            session.commit()
        transaction.commit()
    assert counter.wakes == 0


def test_a_session_that_controls_the_transaction_it_joined(engine: Engine, counter: Counter) -> None:
    """A session in the mode `control_fully` commits its connection's transaction, and wakes the relay."""
    with engine.connect() as connection:
        connection.begin()
        with Session(connection, join_transaction_mode="control_fully") as session:
            append(session, **PLACED)
            session.commit()
    assert counter.wakes == 1


@pytest.mark.parametrize(("end", "wakes"), [("commit", 1), ("rollback", 0)])
def test_a_prepared_transaction(engine: Engine, counter: Counter, end: str, wakes: int) -> None:
    """A session in two phases wakes the relay at its commit, not when it is prepared."""
    with Session(engine, twophase=True) as session:
        append(session, **PLACED)
        session.prepare()
        assert counter.wakes == 0
        getattr(session, end)()
    assert counter.wakes == wakes


def test_sessionmakers_and_registries(engine: Engine, counter: Counter) -> None:
    """`sessionmaker.begin` and `scoped_session` wake the relay as a plain Session does."""
    maker = sessionmaker(engine)
    with maker.begin() as session:
        append(session, **PLACED)
    assert counter.wakes == 1
    registry = scoped_session(maker)
    append(registry, **PLACED)
    registry.commit()
    append(registry, **PLACED)
    registry.remove()
    assert counter.wakes == 2


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_asynchronous_sessions(database_url: str, counter: Counter, driver: str) -> None:
    """AsyncSession and async_scoped_session wake the relay at the outermost commit, and lost savepoints do not."""

    async def write() -> None:
        engine = create_async_engine(database_url.replace("postgresql:", f"postgresql+{driver}:"))
        async with AsyncSession(engine) as session, session.begin():
            async with session.begin_nested():
                await append(session, **PLACED)
            assert counter.wakes == 0
        assert counter.wakes == 1
        async with AsyncSession(engine) as session, session.begin():
            with suppress(LookupError):
                async with session.begin_nested():
                    await append(session, **PLACED)
                    raise LookupError
        assert counter.wakes == 1
        registry = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 0)
        await append(registry, **PLACED)
        await registry.commit()
        await registry.remove()
        await engine.dispose()

    asyncio.run(write())
    assert counter.wakes == 2


def test_nothing_keeps_a_session_alive(engine: Engine, counter: Counter) -> None:
    """A session that appended an event and was dropped without an end is not kept by what watches its commits."""
    session = Session(engine)
    append(session, **PLACED)
    watch = weakref.ref(session)
    session.close()
    del session
    gc.collect()
    assert watch() is None
    assert counter.wakes == 0


def test_without_an_app_nobody_is_woken(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process where no app was set up, appending and committing work as ever, and `wake` does nothing."""
    monkeypatch.setattr(waker, "_installed", None)
    append(session, **PLACED)
    session.commit()
    waker.wake()
    assert session.scalar(text("SELECT count(*) FROM outbox")) == 1
