"""Leaves a service alone for a while that has just failed, and tells of it once."""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from billiard.exceptions import SoftTimeLimitExceeded

from outbox_tasks.deadline import Clock, Deadline

log = logging.getLogger(__name__)

T = TypeVar("T")


class Breaker:
    """Stands before a service that is good to have but not needed; any thread may use it.

    Args:
        service: its name for the log.
        seconds: how long it is left alone after a failure; then one caller tries it.
    """

    def __init__(self, service: str, *, seconds: float, clock: Clock) -> None:
        self._service = service
        self._seconds = seconds
        self._clock = clock
        self._rest: Deadline | None = None
        self._lock = threading.Lock()

    def attempt(self, action: Callable[[], T], *, otherwise: T) -> T:
        """Do something, and return its result; `otherwise` if it fails, or is not tried so soon after a failure."""
        if not self._allows():
            return otherwise
        try:
            result = action()
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, no commit and no run may fail for want of a wake
            self._on_failure(error)
            return otherwise
        if self._rest is not None:
            self._on_return()
        return result

    def _allows(self) -> bool:
        if self._rest is None:
            return True
        with self._lock:
            if self._rest is None or not self._rest.passed:
                return self._rest is None
            self._rest = Deadline.after(self._seconds, clock=self._clock)
            return True

    def _on_failure(self, error: Exception) -> None:
        with self._lock:
            first = self._rest is None
            self._rest = Deadline.after(self._seconds, clock=self._clock)
        if first:
            log.warning("%s: %s; until it works again events wait for beat's ticks", self._service, _told(error))

    def _on_return(self) -> None:
        with self._lock:
            back, self._rest = self._rest is not None, None
        if back:
            log.warning("%s works again", self._service)


def _told(error: Exception) -> str:
    return str(error) or type(error).__qualname__
