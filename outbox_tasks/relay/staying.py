"""A run that has nothing left to do stays for a moment, since more may come."""

import threading
from dataclasses import dataclass

from outbox_tasks.deadline import Deadline
from outbox_tasks.ports import Ports, Stay

GATHER_SECONDS = 0.004
"""A run that keeps up looks at the table no more often than this: where events come faster, one look takes several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StayLimit:
    """How long a run that published something stays: `seconds` after it found nothing, at most `longest_seconds`."""

    seconds: float = 0
    longest_seconds: float = 0


class Patience:
    """Decides after each look at the table whether the run looks again, and when."""

    def __init__(self, ports: Ports, stay: Stay, limit: StayLimit, *, end: Deadline) -> None:
        self._ports = ports
        self._stay = stay
        self._seconds = limit.seconds
        self._end = end.within(limit.longest_seconds if limit.seconds else 0)
        self._gathered = ports.deadline(0)
        self._rung = False
        self._over = False

    def look_again(self, *, found: bool, more: bool, published: bool) -> bool:
        """Say whether to look again after a look that `found` something, and left `more` to others; waits if need be.

        Whoever gives shards back has somebody look after that: another may have heard of an event there, and could not
        claim it. So a run looks until it finds nothing. But once a ring was heard the next ring tells of what comes,
        and the last look is made on leaving; and where another run listens, that one looks.
        """
        if self._ports.stopping() or more:
            return found
        if found and not self._rung:
            self._gather()
            return not self._ports.bell.hand_over()
        self._rung = published and self._heard()
        return found or self._rung

    def _heard(self) -> bool:
        """Wait for a ring, and answer it; returns whether there was one. Once it was in vain the stay is over."""
        if self._over or self._end.passed or not self._stay.wait(min(self._seconds, self._end.left())):
            self._over = True
            return False
        self._gather()
        self._ports.bell.answer()
        return True

    def _gather(self) -> None:
        """Let events gather, so that looks come no more often than they should."""
        if not self._gathered.passed:
            threading.Event().wait(self._gathered.left())
        self._gathered = self._ports.deadline(GATHER_SECONDS)
