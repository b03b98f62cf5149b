"""Measures the time from a commit to the consumer, matched by event id, whichever of the two is heard of first."""

import threading
from array import array
from dataclasses import dataclass
from uuid import UUID

_RECENT = 1000
"""How many events the running figure is made of."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds; the median, and what one in a hundred exceeds."""

    p50: float
    p99: float


class Lags:
    """Collects lags; told of commits and of arrivals by different threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._committed: dict[UUID, float] = {}
        self._consumed: dict[UUID, float] = {}
        self._lags = array("d")

    def committed(self, event_id: UUID, *, at: float) -> None:
        """Note when a transaction had committed, by the system's clock."""
        with self._lock:
            self._committed[event_id] = at
            self._match(event_id)

    def consumed(self, event_id: UUID, *, at: float) -> None:
        """Note when an event was seen first, by the system's clock."""
        with self._lock:
            self._consumed[event_id] = at
            self._match(event_id)

    def recent(self) -> Percentiles | None:
        """Return the figures of the latest events, or None before the first."""
        with self._lock:
            return _percentiles(self._lags[-_RECENT:])

    def all(self) -> Percentiles | None:
        """Return the figures of all events, or None before the first."""
        with self._lock:
            return _percentiles(self._lags)

    def _match(self, event_id: UUID) -> None:
        if event_id in self._committed and event_id in self._consumed:
            self._lags.append(self._consumed.pop(event_id) - self._committed.pop(event_id))


def _percentiles(lags: "array[float]") -> Percentiles | None:
    if not lags:
        return None
    ranked = sorted(lags)
    return Percentiles(ranked[len(ranked) // 2], ranked[len(ranked) * 99 // 100])
