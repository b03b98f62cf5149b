"""A service that goes on writing whatever happens to its database, and cannot always know what it has committed."""

import random
from contextlib import suppress
from threading import Event, Thread
from types import TracebackType
from typing import Self

import psycopg
from sqlalchemy.exc import InterfaceError, OperationalError

from support.writers import Writer, over_psycopg, over_sqlalchemy, prepare

PACE_SECONDS = 0.03
"""How long each writer waits between two transactions."""

LOST = (OperationalError, InterfaceError, psycopg.OperationalError, psycopg.InterfaceError)
"""What ends a connection of a writer: it takes a new one. A commit that was under way may have happened or not."""


class PatientWriters:
    """Writers that connect again for as long as their context is open; what they have committed is in the table."""

    def __init__(self, database_url: str, topic: str, *, writers: int, keys: int, seed: int) -> None:
        prepare(database_url, keys=keys)
        self._database_url = database_url
        self._topic = topic
        self._keys = keys
        self._stop = Event()
        self._threads = [Thread(target=self._write, args=(number, seed)) for number in range(writers)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _write(self, number: int, seed: int) -> None:
        chance = random.Random(f"{seed}/{number}")  # noqa: S311 - load, not secrets
        over = over_psycopg if number % 2 else over_sqlalchemy
        while not self._stop.wait(PACE_SECONDS):
            with suppress(*LOST), over(self._database_url, self._topic) as writer:
                self._write_over(writer, chance)

    def _write_over(self, writer: Writer, chance: random.Random) -> None:
        while not self._stop.wait(PACE_SECONDS):
            key = f"key-{chance.randint(1, self._keys)}"
            if chance.random() < 0.2:
                writer.roll_back(key)
            else:
                writer.commit(key, doomed=chance.randint(0, 1))
