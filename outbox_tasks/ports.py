"""What a loop works with: a connection, a publisher, settings, a bell, clocks, chance."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self
from uuid import UUID, uuid4

from outbox_tasks.deadline import Clock, Deadline
from outbox_tasks.publishing.publisher import Publisher, Stopping
from outbox_tasks.settings import Settings
from outbox_tasks.store.connection import Connection
from outbox_tasks.store.horizon import Horizon


def never() -> bool:
    """Say that nobody asked to stop."""
    return False


class Stay(Protocol):
    """A run that has nothing left to do stays for a moment to hear the bell: `with bell.stay() as stay`.

    Nothing is connected or said before the first `wait`. After the `with` block `missed` tells whether the bell rang
    and nobody has looked at the table since: another run has to.
    """

    missed: bool

    def wait(self, seconds: float) -> bool:
        """Wait for the bell, `seconds` or a second if that is less; returns whether to look at the table again.

        False: the stay is over, and nothing was missed. So it is at once where another run stays, or nothing can ring.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Bell(Protocol):
    """What writers ring after their commits. Nothing here raises, or takes longer than a short timeout."""

    def answer(self) -> bool:
        """Answer the bell. A run does so before it looks at the table: what is committed after that rings anew.

        Returns whether another run listens, whose rings are left to it.
        """

    def hand_over(self) -> bool:
        """Have another run that listens look at the table, after this one gave its shards back; False: none does."""

    def stay(self) -> Stay:
        """Return a stay, for a run that found nothing more to claim."""

    def close(self) -> None:
        """Close what is open; the next use opens it again."""


class _Silence:
    """The bell that nobody rings, and a stay that is over at once: events wait for the next tick."""

    missed = False

    def answer(self) -> bool:
        return False

    def hand_over(self) -> bool:
        return False

    def stay(self) -> Self:
        return self

    def close(self) -> None:
        pass

    def wait(self, seconds: float) -> bool:  # noqa: ARG002 - nobody rings, however long
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


SILENCE: Bell = _Silence()


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
    bell: Bell = SILENCE
    clock: Clock = time.monotonic
    chance: random.Random = field(default_factory=random.Random)
    new_token: Callable[[], UUID] = uuid4

    def deadline(self, seconds: float) -> Deadline:
        """Return the moment `seconds` from now."""
        return Deadline.after(seconds, clock=self.clock)
