"""Keeps Python's garbage collector from looking through a batch over and over while it is being published."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 10_000
"""How many new objects there may be before the collector looks: five hundred events' worth. Python's own is 700."""

_lock = threading.Lock()
_runs = 0
_usual = gc.get_threshold()


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Have the collector look less often: what a batch makes lives until it is settled, and is no garbage till then.

    It is the process's, so the first of several threads changes it, and the last one puts it back.
    """
    _count(+1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    global _runs, _usual  # noqa: PLW0603 - the collector is a thing of the process
    with _lock:
        if not _runs:
            _usual = gc.get_threshold()
        _runs += change
        new, *older = _usual
        gc.set_threshold(NEW_OBJECTS if _runs and 0 < new < NEW_OBJECTS else new, *older)
