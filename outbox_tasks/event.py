"""What an event is: its id, and the row as the relay reads it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from uuid import UUID

SHARDS = 64
"""Number of slices of the ordering keys. Fixed: it is part of a generated column."""


class Event(NamedTuple):
    """One unpublished row of `outbox`, as a loop of the relay reads it.

    `key` and `value` are the bytes that go to Kafka, or None: a missing key is a partition key of '',
    a missing value a tombstone; `headers` is None where the event has none of its own. `blocked` says that
    the ordering key was blocked when the row was read, `cut` that the read ended with this event for its size:
    there may be more of its shard.
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
    headers: dict[str, str] | None
    attempts: int
    blocked: bool
    cut: bool = False


class EventId(UUID):
    """The id of an appended event: a UUID that also says whether the event is new.

    `is_new` is False where an event with this id was there already: nothing was written, it stays one event.
    """

    __slots__ = ("is_new",)
    is_new: bool

    def __init__(self, value: str, *, is_new: bool) -> None:
        super().__init__(value)
        object.__setattr__(self, "is_new", is_new)  # UUIDs refuse plain assignment, as this one from here on

    def __reduce__(self) -> tuple[Callable[[str], EventId], tuple[str]]:
        return partial(EventId, is_new=self.is_new), (str(self),)
