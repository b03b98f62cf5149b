"""The horizon: up to which id every event is visible, or never will be."""

from dataclasses import dataclass
from typing import NamedTuple


class Seen(NamedTuple):
    """What a statement showed: xmin and xmax of its snapshot, and the last event id drawn, read just after that."""

    oldest_running: int
    next_to_come: int
    drawn: int


@dataclass(slots=True)
class Horizon:
    """What one connection has seen of transactions that come and end.

    A transaction has its id before it draws that of an event (migration 0003). So the events with the ids drawn
    before a snapshot are of transactions that had ended by then, or that are among those running in it: once a later
    snapshot shows that all these have ended, `complete` is the last of these ids.
    """

    complete: int = 0
    _drawn: int = 0
    _candidate: tuple[int, int] | None = None

    def see(self, seen: Seen) -> None:
        """Take in what the newest statement showed."""
        if self._candidate is None and self._drawn > self.complete:
            self._candidate = (self._drawn, seen.next_to_come)
        if self._candidate is not None and seen.oldest_running >= self._candidate[1]:
            self.complete, self._candidate = self._candidate[0], None
        self._drawn = max(self._drawn, seen.drawn)
