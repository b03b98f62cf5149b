"""Moments on the monotonic clock."""

from hypothesis import given
from hypothesis import strategies as st
from support.relaying import Steps

from outbox_tasks.deadline import Deadline

seconds = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False)


@given(ahead=seconds, passing=st.floats(min_value=0, max_value=1e6))
def test_time_left_is_never_negative(ahead: float, passing: float) -> None:
    """What is left shrinks as the clock moves, and ends at zero, where the moment has passed."""
    clock = Steps([100.0])
    deadline = Deadline.after(ahead, clock=clock)
    clock.move(passing)
    assert deadline.left() == max(0.0, deadline.at - clock())
    assert deadline.passed == (deadline.left() == 0)


@given(ahead=seconds, limit=seconds)
def test_within_is_the_sooner_of_two(ahead: float, limit: float) -> None:
    """`within` never gives more time than the deadline it comes from, nor more than was asked for."""
    clock = Steps([100.0])
    deadline = Deadline.after(ahead, clock=clock)
    assert deadline.within(limit).at == min(100.0 + ahead, 100.0 + limit)


def test_the_clock_is_the_systems_by_default() -> None:
    """Without a clock of its own a deadline goes by the monotonic clock of the system."""
    assert not Deadline.after(60).passed
    assert 59 < Deadline.after(60).left() <= 60
    assert Deadline.after(0).passed
