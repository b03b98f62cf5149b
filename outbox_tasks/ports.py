"""What a loop works with: a connection, a publisher, settings, clocks, chance."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID, uuid4

from outbox_tasks.deadline import Clock, Deadline
from outbox_tasks.publishing.publisher import Publisher, Stopping
from outbox_tasks.settings import Settings
from outbox_tasks.store.connection import Connection
from outbox_tasks.store.horizon import Horizon


def never() -> bool:
    """Say that nobody asked to stop."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The world around a loop. `owner` names the run in the tables: the id of its Celery task.

    `horizon` is what `connection` has seen, in earlier runs too.
    """

    connection: Connection
    publisher: Publisher
    settings: Settings
    owner: str
    stopping: Stopping = never
    horizon: Horizon = field(default_factory=Horizon)
    clock: Clock = time.monotonic
    chance: random.Random = field(default_factory=random.Random)
    new_token: Callable[[], UUID] = uuid4

    def deadline(self, seconds: float) -> Deadline:
        """Return the moment `seconds` from now."""
        return Deadline.after(seconds, clock=self.clock)
