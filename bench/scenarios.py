"""What latency is measured of: how much is written, by whom, and what wakes the relay."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from bench.available import KAFKA_PYTHON, publishers
from bench.sizes import Sizes

MANY = 1000
"""Events a second from which on several write at once."""
MANY_PROCESSES = 4
MANY_CLIENTS = 8
EVENTS_PER_TRANSACTION = 5
"""Of Sessions that are to write many: with one they would need more of the cores than there is."""
COMPARED_RATE = 200
"""Where relays that wait for a tick are measured too."""
WARM_SECONDS = 3
WARM_RATE = 50


class Writer(StrEnum):
    """Who writes."""

    SESSIONS = "Sessions"
    PGBENCH = "pgbench"


class Woken(StrEnum):
    """What wakes the relay, besides ticks."""

    BY_COMMITS = "wake"
    BY_NOTIFICATIONS = "NOTIFY"
    BY_NOTHING = "tick only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is written how fast, and what publishes it."""

    rate: int
    seconds: int
    publisher: str = KAFKA_PYTHON
    woken: Woken
    writer: Writer

    @property
    def name(self) -> str:
        """What tables call it."""
        parts = [f"{self.rate}/s", str(self.woken)]
        if self.rate >= MANY:
            size = "a transaction each" if self.per_transaction == 1 else f"{self.per_transaction} events a transaction"
            parts.append(f"{self.writer}, {size}")
        if self.publisher != KAFKA_PYTHON:
            parts.append(self.publisher)
        return ", ".join(parts)

    @property
    def per_transaction(self) -> int:
        """How many events a transaction writes."""
        return EVENTS_PER_TRANSACTION if self.writer is Writer.SESSIONS and self.rate >= MANY else 1

    @property
    def writers(self) -> int:
        """How many write at once: processes with a Session each, or clients of one pgbench."""
        if self.writer is Writer.PGBENCH:
            return MANY_CLIENTS
        return MANY_PROCESSES if self.rate >= MANY else 1

    @property
    def events(self) -> int:
        """How many events count, of each writer."""
        return self.rate * self.seconds // self.writers

    @property
    def warm_rate(self) -> int:
        """How many events a second are written before, by each writer."""
        return max(self.rate, WARM_RATE) // self.writers

    @property
    def warm(self) -> int:
        """How many events are written before, by each writer."""
        return self.warm_rate * WARM_SECONDS


def scenarios(sizes: Sizes) -> Iterator[Scenario]:
    """Yield what is to be measured, in the order of the table."""
    for publisher in publishers():
        for rate, seconds in sizes.latencies:
            for woken, writer in _kinds(rate, publisher):
                yield Scenario(rate=rate, seconds=seconds, publisher=publisher, woken=woken, writer=writer)


def _kinds(rate: int, publisher: str) -> Iterator[tuple[Woken, Writer]]:
    if rate > 1 or publisher == KAFKA_PYTHON:
        yield Woken.BY_COMMITS, Writer.SESSIONS
    if rate == COMPARED_RATE and publisher == KAFKA_PYTHON:
        yield Woken.BY_NOTHING, Writer.SESSIONS
    if rate >= MANY:
        yield Woken.BY_NOTIFICATIONS, Writer.PGBENCH
