"""The writers' side of the wake-up: rings after commits, at once or, in an event loop, from a thread."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery

from outbox_tasks.settings import Settings
from outbox_tasks.waking import parts
from outbox_tasks.waking.breaker import Breaker
from outbox_tasks.waking.rings import Rings

log = logging.getLogger(__name__)

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A thing that each process makes for itself when it first needs it, and never takes over from its parent."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: dict[int, T] = {}

    def __call__(self) -> T:
        """Return this process's own."""
        pid = os.getpid()
        if pid not in self._made:
            self._made.setdefault(pid, self._make())
        return self._made[pid]


class Writer:
    """What wakes the relay in a process with a Celery app: made at start, it reads settings when it is first used."""

    def __init__(self, app: Celery, read_settings: Callable[[], Settings]) -> None:
        self._rings = PerProcess(partial(_rings_of, app, read_settings))
        self._outage = PerProcess(partial(Breaker, "the wake-up", seconds=0, clock=time.monotonic))

    def wake(self) -> None:
        """Wake the relay; raises nothing but what is not to be caught, such as Celery's soft time limit."""
        self._outage().attempt(self._wake, otherwise=None)  # a thread may be refused, say

    def _wake(self) -> None:
        rings = self._rings()
        if rings is None:
            return
        if _in_event_loop():
            rings.ring_soon()
        else:
            rings.ring()


def _rings_of(app: Celery, read_settings: Callable[[], Settings]) -> Rings | None:
    """Return what rings; None where the wake-up is off, or has no Redis, or cannot be had, which is told once."""
    try:
        settings = read_settings()
        return parts.rings(app, settings) if parts.has_bell(app, settings) else None
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - the writer has committed: its request must not fail for this
        log.warning("no wake-up, events wait for beat's ticks: %s", error)
        return None


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
