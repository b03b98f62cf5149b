"""Waits for a condition, but not for ever."""

import time
from collections.abc import Callable

POLL_SECONDS = 0.05


class UnfinishedError(Exception):
    """Something did not come to its end in time."""


def until(condition: Callable[[], bool], what: str, *, seconds: float = 120) -> None:
    """Return when a condition holds.

    Raises:
        UnfinishedError: it does not after so many seconds.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise UnfinishedError(f"waited {seconds:g} s for {what}")
        time.sleep(POLL_SECONDS)
