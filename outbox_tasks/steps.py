"""What a worker's main process does besides: listens to PostgreSQL's notifications where `outbox_listen` is set."""

from typing import Any, ClassVar

from celery.bootsteps import StartStopStep

from outbox_tasks import worker
from outbox_tasks.waking import parts
from outbox_tasks.waking.listener import Listener


class ListenerStep(StartStopStep):
    """Starts the listener after the pool, so that no child is forked with it, and stops it with the worker."""

    requires: ClassVar = {"celery.worker.components:Pool"}

    def __init__(self, parent: Any, **_options: Any) -> None:
        super().__init__(parent)
        self._listener: Listener | None = None

    def include_if(self, parent: Any) -> bool:
        """Say whether to listen at all: not among green threads, which a listener in eventlet's would all hold up."""
        return worker.settings_of(parent.app).listen and not worker.is_green(parent)

    def start(self, parent: Any) -> None:
        """Begin to listen."""
        self._listener = parts.listener(parent.app, worker.settings_of(parent.app))
        self._listener.start()

    def stop(self, parent: Any) -> None:  # noqa: ARG002 - Celery passes it
        """Listen no more."""
        if self._listener is not None:
            self._listener.stop()

    terminate = stop
