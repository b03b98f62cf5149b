"""Which events a person means: what all selections have in common."""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import ClassVar
from uuid import UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which events are meant; what is None does not matter. Times without a zone are UTC, as every time of ours."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    since: datetime | None = None
    until: datetime | None = None
    topic: str | None = None
    ids: list[UUID] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "since", _in_utc(self.since))
        object.__setattr__(self, "until", _in_utc(self.until))

    @property
    def is_empty(self) -> bool:
        """Whether everything is meant."""
        return not any(asdict(self).values())


def _in_utc(time: datetime | None) -> datetime | None:
    return time.replace(tzinfo=UTC) if time is not None and time.tzinfo is None else time
