"""The horizon: up to which id every event is visible, or never will be."""

from dataclasses import dataclass
from typing import NamedTuple


class Seen(NamedTuple):
    """What a statement showed: xmin of its snapshot, its own transaction, and the last event id drawn, read last.

    `transaction` is None where the statement changed nothing. `drawn` has to come from `pg_sequence_last_value`, which
    locks the sequence's page: a SELECT may see the value 32 ahead that `nextval` puts there for the log, for a moment.
    """

    oldest_running: int
    transaction: int | None
    drawn: int


@dataclass(slots=True)
class Horizon:
    """What one connection has seen of transactions that come and end.

    A transaction has its id before it draws that of an event (migration 0003). So all who have drawn by the end of a
    statement have lower ids than the next statement that changes something, and have ended once a snapshot shows none
    running that is lower: `complete` is the last event id drawn by then. (A snapshot's xmax would not do for the id of
    that statement: it is the one after the last that ended, and transactions with higher ids may be running.)
    """

    complete: int = 0
    _drawn: int = 0
    _candidate: tuple[int, int] | None = None

    def see(self, seen: Seen) -> None:
        """Take in what the newest statement showed."""
        if self._candidate is not None and seen.oldest_running >= self._candidate[1]:
            self.complete, self._candidate = self._candidate[0], None
        if self._candidate is None and seen.transaction is not None and self._drawn > self.complete:
            self._candidate = (self._drawn, seen.transaction)
        self._drawn = max(self._drawn, seen.drawn)
