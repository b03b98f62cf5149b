"""Rings the bell, and sends a message where nobody hears it."""

import time

from outbox_tasks.waking.bell import Ringer
from outbox_tasks.waking.breaker import Breaker
from outbox_tasks.waking.errand import Errand
from outbox_tasks.waking.message import Messenger


class Rings:
    """What one process needs to ring; any thread may use it.

    Args:
        ringer: the bell. None: there is none, and every ring sends a message.
        messenger: sends the message that makes a child run a dispatch.
        rest_seconds: how long Redis or the message broker is left alone after a failure.
    """

    def __init__(self, ringer: Ringer | None, messenger: Messenger, *, rest_seconds: float) -> None:
        self._ringer = ringer
        self._messenger = messenger
        self._redis = Breaker("the wake-up's Redis", seconds=rest_seconds, clock=time.monotonic)
        self._broker = Breaker("the wake-up's message broker", seconds=rest_seconds, clock=time.monotonic)
        self._errand = Errand(self.ring, name="outbox-wake")

    def ring(self) -> None:
        """Ring, and send a message where no run listens and none is on its way. Raises nothing."""
        if self._ringer is None or self._redis.attempt(self._ringer.ring, otherwise=False):
            self._broker.attempt(self._messenger.send, otherwise=None)

    def ring_soon(self) -> None:
        """Have a thread ring; returns at once."""
        self._errand.ask()
