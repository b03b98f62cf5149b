"""Sends the message that makes a child run a dispatch, without waiting for a message broker that is away."""

import threading

from celery import Celery
from kombu.connection import Connection

from outbox_tasks import schedule
from outbox_tasks.settings import Settings


class Messenger:
    """Sends dispatches over a connection of its own, with short timeouts; any thread may use it.

    It belongs to the process that made it.
    """

    def __init__(self, app: Celery, settings: Settings) -> None:
        self._app = app
        self._seconds = settings.wake_timeout_seconds
        self._options = schedule.dispatch_options(settings)
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    def send(self) -> None:
        """Send one dispatch.

        Raises:
            TimeoutError: another thread has been sending for `outbox_wake_timeout_seconds`.
            kombu.exceptions.OperationalError: the broker is away, or does not answer within that time.
        """
        if not self._lock.acquire(timeout=self._seconds):
            raise TimeoutError(f"another message has been on its way for {self._seconds:g} s")
        try:
            self._publish()
        finally:
            self._lock.release()

    def _publish(self) -> None:
        if self._connection is None:
            self._connection = self._connect()
        try:
            self._app.send_task(
                schedule.DISPATCH,
                connection=self._connection,
                retry=False,
                ignore_result=True,
                add_to_parent=False,
                **self._options,
            )
        except BaseException:
            broken, self._connection = self._connection, None
            broken.collect()  # type: ignore[no-untyped-call]
            raise

    def _connect(self) -> Connection:
        timeouts = ("socket_timeout", "socket_connect_timeout", "read_timeout", "write_timeout")
        options = {"max_retries": 0} | dict.fromkeys(timeouts, self._seconds)
        connection: Connection = self._app.connection_for_write(
            connect_timeout=self._seconds, transport_options=options
        )
        return connection
