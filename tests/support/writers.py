"""Concurrent writers: business transactions that lock their aggregate's row, write events, and now and then fail."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, LiteralString
from uuid import UUID

import psycopg
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from outbox_tasks import append

AGGREGATE_TYPE = "order"

EVENTS_A_ROUND = 10
"""Of which eight are committed, one is rolled back and one is in a rolled-back savepoint."""

_MAKE_BUSINESS = """
CREATE TABLE IF NOT EXISTS business (key text PRIMARY KEY, last integer NOT NULL DEFAULT 0);
"""
_FILL_BUSINESS = """
INSERT INTO business SELECT 'key-' || n FROM generate_series(1, %(keys)s) AS n ON CONFLICT DO NOTHING
"""
# Locks the aggregate's row first, as services do, and so puts the writers of a key one after the other.
_NEXT = "UPDATE business SET last = last + %(events)s WHERE key = %(key)s RETURNING last"


@dataclass(frozen=True, slots=True, order=True)
class Written:
    """A committed event: the `sequence`-th of its key."""

    key: str
    sequence: int
    event_id: UUID


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is to be written: `events` in all, a multiple of `10 * writers`; of these `committed` arrive."""

    topic: str
    events: int = 20_000
    keys: int = 500
    writers: int = 8

    @property
    def committed(self) -> int:
        """How many of the events are committed."""
        return self.events * 8 // EVENTS_A_ROUND


class RolledBackError(Exception):
    """Ends a transaction or a savepoint that is meant to fail."""


@dataclass(frozen=True, kw_only=True)
class Writer:
    """One connection of a service, by way of psycopg or of SQLAlchemy."""

    connection: psycopg.Connection[Any] | Session
    begin: Callable[[], AbstractContextManager[object]]
    savepoint: Callable[[], AbstractContextManager[object]]
    execute: Callable[[LiteralString, dict[str, object]], Any]
    topic: str

    def commit(self, key: str, *, doomed: int = 0) -> list[Written]:
        """Commit four events of a key, and in their midst try `doomed` more, in a savepoint that is rolled back."""
        with self.begin():
            last = self._lock(key, events=4)
            written = [self._append(key, sequence) for sequence in (last - 3, last - 2)]
            if doomed:
                self._append_in_vain(key, doomed)
            return written + [self._append(key, sequence) for sequence in (last - 1, last)]

    def roll_back(self, key: str) -> None:
        """Write one event of a key in a transaction that is rolled back."""
        with suppress(RolledBackError), self.begin():
            self._append(key, self._lock(key, events=1))
            raise RolledBackError

    def _append_in_vain(self, key: str, events: int) -> None:
        with suppress(RolledBackError), self.savepoint():
            for _ in range(events):
                self._append(key, -1)
            raise RolledBackError

    def _lock(self, key: str, *, events: int) -> int:
        return int(self.execute(_NEXT, {"key": key, "events": events})[0])

    def _append(self, key: str, sequence: int) -> Written:
        event_id = append(
            self.connection,
            aggregate_type=AGGREGATE_TYPE,
            aggregate_id=key,
            event_type="order_changed",
            topic=self.topic,
            payload={"key": key, "sequence": sequence},
        )
        return Written(key, sequence, UUID(int=event_id.int))


def prepare(database_url: str, *, keys: int) -> None:
    """Make the business table, with a row for each key."""
    with psycopg.connect(database_url) as connection:
        connection.execute(_MAKE_BUSINESS)
        connection.execute(_FILL_BUSINESS, {"keys": keys})


def write(database_url: str, load: Load, *, seed: int = 1) -> list[Written]:
    """Write a load from several threads at once; returns exactly what was committed."""
    prepare(database_url, keys=load.keys)
    with ThreadPoolExecutor(load.writers) as pool:
        parts = [pool.submit(_write_part, database_url, load, number, seed) for number in range(load.writers)]
        return [event for part in parts for event in part.result()]


def _write_part(database_url: str, load: Load, number: int, seed: int) -> list[Written]:
    chance = random.Random(f"{seed}/{number}")  # noqa: S311 - load, not secrets
    over = over_psycopg if number % 2 else over_sqlalchemy
    committed: list[Written] = []
    with over(database_url, load.topic) as writer:
        for _ in range(load.events // load.writers // EVENTS_A_ROUND):
            committed += writer.commit(_any_key(chance, load))
            committed += writer.commit(_any_key(chance, load), doomed=1)
            writer.roll_back(_any_key(chance, load))
    return committed


def _any_key(chance: random.Random, load: Load) -> str:
    return f"key-{chance.randint(1, load.keys)}"


@contextmanager
def over_psycopg(database_url: str, topic: str) -> Iterator[Writer]:
    """Give a writer over psycopg."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield Writer(
            connection=connection,
            begin=connection.transaction,
            savepoint=connection.transaction,
            execute=lambda statement, values: connection.execute(statement, values).fetchone(),
            topic=topic,
        )


@contextmanager
def over_sqlalchemy(database_url: str, topic: str) -> Iterator[Writer]:
    """Give a writer over a Session, whose commits wake the relay where an app is set up."""
    engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
    with ExitStack() as stack:
        stack.callback(engine.dispose)
        session = stack.enter_context(Session(engine))
        yield Writer(
            connection=session,
            begin=session.begin,
            savepoint=session.begin_nested,
            execute=lambda statement, values: session.connection().exec_driver_sql(statement, values).fetchone(),
            topic=topic,
        )
