"""A moment on the monotonic clock after which something is given up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], float]
"""Seconds that never jump, such as `time.monotonic`."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time; `left()` says how many seconds there are until it, never less than 0."""

    at: float
    clock: Clock = field(default=time.monotonic, repr=False)

    @classmethod
    def after(cls, seconds: float, *, clock: Clock = time.monotonic) -> Deadline:
        """Return the moment `seconds` from now."""
        return cls(clock() + seconds, clock)

    def left(self) -> float:
        """Return the seconds until this moment, 0 once it has passed."""
        return max(0.0, self.at - self.clock())

    @property
    def passed(self) -> bool:
        """Whether the moment has come."""
        return self.clock() >= self.at

    def within(self, seconds: float) -> Deadline:
        """Return this moment, or the one `seconds` from now if that is sooner."""
        return Deadline(min(self.at, self.clock() + seconds), self.clock)
