"""Waiting for something to become true, and no longer than a deadline."""

from collections.abc import Callable
from threading import Event
from time import monotonic
from typing import TypeVar

LOOK_AGAIN_SECONDS = 0.02

T = TypeVar("T")


def until(
    condition: Callable[[], T], what: str, *, seconds: float = 60, every_seconds: float = LOOK_AGAIN_SECONDS
) -> T:
    """Return the first true value of a condition.

    Raises:
        TimeoutError: it had none in time; the message says what was waited for.
    """
    deadline = monotonic() + seconds
    while not (value := condition()):
        if monotonic() > deadline:
            raise TimeoutError(f"after {seconds:g} s still not so: {what}")
        Event().wait(every_seconds)
    return value
