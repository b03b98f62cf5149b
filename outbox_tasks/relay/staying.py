"""A run that has nothing left to do stays for a moment, since more may come."""

import threading
from dataclasses import dataclass

from outbox_tasks.deadline import Deadline
from outbox_tasks.ports import Ports, Stay

GATHER_SECONDS = 0.004
"""A run that stays looks at the table no more often than this: where events come faster, one look takes several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StayLimit:
    """How long a run that published something stays: `seconds` after it found nothing, at most `longest_seconds`."""

    seconds: float = 0
    longest_seconds: float = 0


class Patience:
    """What is left of a run's stay."""

    def __init__(self, ports: Ports, stay: Stay, limit: StayLimit, *, end: Deadline) -> None:
        self._ports = ports
        self._stay = stay
        self._seconds = limit.seconds
        self._end = end.within(limit.longest_seconds if limit.seconds else 0)
        self._gathered = ports.deadline(0)
        self._over = False

    def more_came(self) -> bool:
        """Wait for more to come; returns whether to look at the table again. The bell is answered then.

        Once it was in vain the stay is over.
        """
        if self._over or self._end.passed or not self._stay.wait(min(self._seconds, self._end.left())):
            self._over = True
            return False
        if not self._gathered.passed:
            threading.Event().wait(self._gathered.left())
        self._gathered = self._ports.deadline(GATHER_SECONDS)
        self._ports.bell.answer()
        return True
