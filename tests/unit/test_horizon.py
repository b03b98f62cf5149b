"""The horizon: what may be concluded from snapshots and a sequence, whatever transactions do."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from outbox_tasks.store.horizon import Horizon, Seen

WRITERS = 4


@dataclass
class Database:
    """A model: transactions get their ids before they draw ids of events, as the column's default has it."""

    next_transaction: int = 100
    drawn: int = 0
    running: dict[int, int] = field(default_factory=dict)
    drawn_by: dict[int, list[int]] = field(default_factory=dict)

    def draw(self, writer: int) -> None:
        """Have a writer draw an id, in a transaction of its own if it is in none."""
        if writer not in self.running:
            self.running[writer] = self.next_transaction
            self.next_transaction += 1
        self.drawn += 1
        self.drawn_by.setdefault(self.running[writer], []).append(self.drawn)

    def end(self, writer: int) -> None:
        """Have a writer commit or roll back."""
        self.running.pop(writer, None)

    def snapshot(self) -> tuple[int, int]:
        """Return xmin and xmax."""
        return min(self.running.values(), default=self.next_transaction), self.next_transaction

    @property
    def to_come(self) -> set[int]:
        """The ids that are not visible, and may become so."""
        return {number for transaction in self.running.values() for number in self.drawn_by[transaction]}


steps = st.lists(st.tuples(st.sampled_from(["draw", "end", "look", "draw while looking"]), st.integers(0, WRITERS - 1)))


@given(steps)
def test_no_event_is_still_to_come_at_or_below_the_horizon(taken: list[tuple[str, int]]) -> None:
    """Nothing that may still become visible has an id up to the horizon, whatever transactions come, draw and end."""
    database, horizon = Database(), Horizon()
    for step, writer in taken:
        if step == "draw":
            database.draw(writer)
        elif step == "end":
            database.end(writer)
        else:
            snapshot, to_come = database.snapshot(), database.to_come
            if step == "draw while looking":
                database.draw(writer)
            horizon.see(Seen(*snapshot, database.drawn))
            assert all(number > horizon.complete for number in to_come | database.to_come)


def test_the_horizon_follows_once_old_transactions_have_ended() -> None:
    """As soon as everything has ended that ran at a look, all ids drawn before that look are complete."""
    database, horizon = Database(), Horizon()
    database.draw(0)
    database.draw(1)
    for _ in range(3):
        horizon.see(Seen(*database.snapshot(), database.drawn))
    assert horizon.complete == 0
    database.end(0)
    database.end(1)
    database.draw(2)
    horizon.see(Seen(*database.snapshot(), database.drawn))
    assert horizon.complete == 2
