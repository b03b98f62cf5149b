"""Makes partitions for the days to come."""

import logging
from dataclasses import dataclass

import psycopg

from outbox_tasks.ports import Ports
from outbox_tasks.store import partitions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Maintained:
    """How many partitions were made, and which days (counted from today) have to stay in the DEFAULT partition."""

    made: int
    in_default: tuple[int, ...]

    def as_dict(self) -> dict[str, int | list[int]]:
        """Return what is worth reading."""
        return {"made": self.made} | ({"days_in_default": list(self.in_default)} if self.in_default else {})


def maintain_partitions(ports: Ports) -> Maintained:
    """Make the partitions of today and of `outbox_partitions_ahead_days` more days, where they are missing."""
    days = range(ports.settings.partitions_ahead_days + 1)
    outcomes = {day: _make(ports, day) for day in days}
    in_default = tuple(day for day, made in outcomes.items() if made is None)
    return Maintained(made=sum(made is True for made in outcomes.values()), in_default=in_default)


def _make(ports: Ports, day: int) -> bool | None:
    """Make a day's partition; None where the DEFAULT partition already has events of that day."""
    try:
        return partitions.make_partition(ports.connection, ahead_days=day)
    except psycopg.errors.CheckViolation:
        log.warning("the DEFAULT partition has events of the day %s from today: they stay there", day)
        return None
