"""Gathers what the on-call engineer wants to know first."""

from dataclasses import dataclass
from datetime import datetime

from outbox_tasks.schema import migrate
from outbox_tasks.store import partitions, runs, status
from outbox_tasks.store.connection import Connection

RATE_SECONDS = 60
"""Over how long the rate is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of the outbox at `now`, the database's time. Ages and rates are in seconds and events a second."""

    now: datetime
    server_version: int
    schema_version: str | None
    pending: int
    held: int
    dead: int
    oldest: datetime | None
    rate: float
    shards: list[status.Shard]
    blocked: list[status.Blocked]
    partitions: list[status.PartitionSize]
    runs: list[runs.Run]

    @property
    def oldest_age_seconds(self) -> float | None:
        """How long the oldest unpublished event has waited."""
        return None if self.oldest is None else (self.now - self.oldest).total_seconds()

    @property
    def leased(self) -> list[status.Shard]:
        """The shards that are leased now."""
        return [shard for shard in self.shards if shard.leased_until is not None and shard.leased_until > self.now]


def gather(connection: Connection) -> Status:
    """Look at everything; reads only, and only from indexes and the catalogue."""
    shards, blocked = status.shards(connection), status.blocked(connection)
    oldest = [shard.oldest for shard in shards] + [kind.oldest for kind in blocked]
    return Status(
        now=partitions.now(connection),
        server_version=connection.info.server_version,
        schema_version=migrate.current(connection),
        pending=sum(shard.pending for shard in shards),
        held=sum(kind.held for kind in blocked),
        dead=status.dead(connection),
        oldest=min((time for time in oldest if time is not None), default=None),
        rate=runs.published_lately(connection, seconds=RATE_SECONDS) / RATE_SECONDS,
        shards=shards,
        blocked=blocked,
        partitions=status.partitions(connection),
        runs=runs.last(connection),
    )
