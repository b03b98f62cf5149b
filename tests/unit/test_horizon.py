"""The horizon: what may be concluded from snapshots and a sequence, whatever transactions do."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from outbox_tasks.store.horizon import Horizon, Seen

WRITERS = 4


@dataclass
class Database:
    """A model: transactions get their ids before they draw ids of events, as the column's default has it."""

    next_transaction: int = 100
    last_ended: int = 99
    drawn: int = 0
    running: dict[int, int] = field(default_factory=dict)
    drawn_by: dict[int, list[int]] = field(default_factory=dict)

    def begin(self) -> int:
        """Give out the id of a transaction."""
        self.next_transaction += 1
        return self.next_transaction - 1

    def draw(self, writer: int) -> None:
        """Have a writer draw an id, in a transaction of its own if it is in none."""
        if writer not in self.running:
            self.running[writer] = self.begin()
        self.drawn += 1
        self.drawn_by.setdefault(self.running[writer], []).append(self.drawn)

    def end(self, writer: int) -> None:
        """Have a writer commit or roll back."""
        if writer in self.running:
            self.last_ended = max(self.last_ended, self.running.pop(writer))

    @property
    def xmin(self) -> int:
        """The xmin of a snapshot, as PostgreSQL has it: of those running it looks at none after the last that ended."""
        xmax = self.last_ended + 1
        return min([xmax, *(transaction for transaction in self.running.values() if transaction < xmax)])

    def look(self, *, changes: bool, meanwhile: Callable[[], None] = lambda: None) -> Seen:
        """Do what a claim does, which changes something or finds nothing; others go on between its parts."""
        xmin = self.xmin
        transaction = self.begin() if changes else None
        meanwhile()
        seen = Seen(xmin, transaction, self.drawn)
        self.last_ended = max(self.last_ended, transaction or 0)
        return seen

    @property
    def to_come(self) -> set[int]:
        """The ids that are not visible, and may become so."""
        return {number for transaction in self.running.values() for number in self.drawn_by[transaction]}


ACTIONS = ["draw", "end", "claim", "claim nothing", "claim while one draws", "claim while one ends"]
steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, WRITERS - 1)), max_size=60)


@settings(max_examples=500)
@given(steps)
def test_no_event_is_still_to_come_at_or_below_the_horizon(taken: list[tuple[str, int]]) -> None:
    """Nothing that may still become visible has an id up to the horizon, whatever transactions come, draw and end."""
    database, horizon = Database(), Horizon()
    for action, writer in taken:
        others = {"claim while one draws": database.draw, "claim while one ends": database.end}
        if action in ("draw", "end"):
            {"draw": database.draw, "end": database.end}[action](writer)
            continue
        meanwhile = partial(others[action], writer) if action in others else lambda: None
        not_visible = database.to_come
        horizon.see(database.look(changes=action != "claim nothing", meanwhile=meanwhile))
        assert all(number > horizon.complete for number in not_visible | database.to_come)


def test_the_horizon_follows_once_old_transactions_have_ended() -> None:
    """As soon as everything has ended that ran at a claim, all ids drawn before that claim are complete."""
    database, horizon = Database(), Horizon()
    database.draw(0)
    database.draw(1)
    for _ in range(3):
        horizon.see(database.look(changes=True))
    assert horizon.complete == 0
    database.end(0)
    database.end(1)
    database.draw(2)
    horizon.see(database.look(changes=True))
    assert horizon.complete == 2
