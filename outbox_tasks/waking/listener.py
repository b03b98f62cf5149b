"""Listens to PostgreSQL's notifications in the worker's main process, and rings for writers that cannot."""

import logging
import threading
from collections.abc import Callable

import psycopg
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_when_event_set,
    wait_random_exponential,
)

from outbox_tasks.settings import Settings
from outbox_tasks.store import notifications
from outbox_tasks.store.connection import Connection

log = logging.getLogger(__name__)

LOOK_UP_SECONDS = 0.5
"""How often the thread looks whether it shall stop, while nothing is heard."""

LONGEST_PAUSE_SECONDS = 5.0

STOP_SECONDS = 2.0


class Listener:
    """A thread with a connection of its own; whatever breaks the connection, or the database refuses, it makes another.

    Args:
        settings: where the database is.
        ring: what to do once for all notifications that have come, and after every new connection.
        pause_seconds: how long to let notifications gather after each ring.
    """

    def __init__(self, settings: Settings, ring: Callable[[], None], *, pause_seconds: float = 0) -> None:
        self._settings = settings
        self._ring = ring
        self._pause_seconds = pause_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outbox-listener", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> None:
        """Listen no more; returns when the connection is closed, or after 2 s."""
        self._stopped.set()
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        attempts = Retrying(
            retry=retry_if_exception_type(psycopg.Error),
            wait=wait_random_exponential(multiplier=0.1, max=LONGEST_PAUSE_SECONDS),
            sleep=sleep_using_event(self._stopped),
            stop=stop_when_event_set(self._stopped),
            before_sleep=_tell_once,
            retry_error_callback=_nothing,
        )
        while not self._stopped.is_set():
            connection = attempts(notifications.listen, self._settings)
            if connection is not None:
                self._listen(connection)

    def _listen(self, connection: Connection) -> None:
        """Ring for all that is heard, until the connection is lost or the worker stops."""
        log.info("listening to notifications")
        self._ring()
        try:
            with connection:
                while not self._stopped.is_set():
                    if notifications.hear(connection, seconds=LOOK_UP_SECONDS):
                        self._ring()
                        self._stopped.wait(self._pause_seconds)
        except psycopg.Error as error:
            log.warning("the connection that listens to notifications is lost: %s", str(error).strip())


def _tell_once(attempt: RetryCallState) -> None:
    if attempt.attempt_number == 1 and attempt.outcome is not None:
        log.warning("cannot listen to notifications, trying again: %s", str(attempt.outcome.exception()).strip())


def _nothing(_attempt: RetryCallState) -> None:
    """Return nothing in place of a connection: the worker stops."""
