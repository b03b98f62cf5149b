"""What an event is: its states, and the row as the relay reads it."""

from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

SHARDS = 64
"""Number of slices of the ordering keys. Fixed: it is part of a generated column."""


class State(StrEnum):
    """Where an event of the `outbox` table stands."""

    PENDING = "pending"
    HELD = "held"
    PUBLISHED = "published"


class Event(NamedTuple):
    """One unpublished row of `outbox`, as a loop of the relay reads it.

    `key` and `value` are the bytes that go to Kafka, or None: a missing key is a partition key of '',
    a missing value a tombstone. `blocked` says that the ordering key was blocked when the row was read.
    """

    event_id: UUID
    id: int
    shard: int
    ordering_key: str
    aggregate_type: str
    event_type: str
    topic: str | None
    key: bytes | None
    value: bytes | None
    headers: dict[str, str]
    attempts: int
    blocked: bool
