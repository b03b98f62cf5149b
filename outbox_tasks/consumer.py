"""The worker's consumer, which outlives a Redis that goes away while ticks wait in the worker."""

from typing import Any

from celery.worker.consumer import Consumer as CeleryConsumer


class Consumer(CeleryConsumer):
    """Celery's consumer. Set by `worker_consumer = "outbox_tasks.consumer:Consumer"`."""

    def on_connection_error_after_connected(self, exc: Exception) -> Any:
        """Let go of a lost connection; what is left of it does not matter, for a new one is made next.

        Celery 5.7 and kombu 5.7 forget the address of the connection before they give back what was fetched over
        it and not yet acknowledged, which needs the address: an AttributeError that nobody catches ends the worker.
        """
        try:
            return super().on_connection_error_after_connected(exc)
        except AttributeError:
            if self.connection is not None:
                raise
            return None
