"""A record that arrived in Kafka, as `outbox tail` shows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from outbox_tasks.publishing.routes import EVENT_ID_HEADER, EVENT_TYPE_HEADER


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A record that arrived: where, when, and which event it is. The payload is not looked at."""

    topic: str
    partition: int
    offset: int
    time: datetime
    key: str
    event_type: str
    event_id: str

    @classmethod
    def of(
        cls, place: tuple[str, int, int], *, milliseconds: int, key: bytes | None, headers: Iterable[tuple[str, bytes]]
    ) -> Arrival:
        """Make one of what a client tells: topic, partition and offset, the time since 1970, key and headers."""
        topic, partition, offset = place
        named = {name: value.decode(errors="replace") for name, value in headers}
        return cls(
            topic=topic,
            partition=partition,
            offset=offset,
            time=datetime.fromtimestamp(milliseconds / 1000, tz=UTC),
            key="-" if key is None else key.decode(errors="replace"),
            event_type=named.get(EVENT_TYPE_HEADER, "-"),
            event_id=named.get(EVENT_ID_HEADER, "-"),
        )

    def as_line(self) -> str:
        """Return one line for a terminal."""
        where = f"{self.topic}/{self.partition}@{self.offset}"
        return f"{self.time:%H:%M:%S.%f}  {where:<30} {self.key:<24} {self.event_type:<24} {self.event_id}"
