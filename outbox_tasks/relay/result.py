"""What a run did, as it reads in Flower and in a log line."""

from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from outbox_tasks.store.settle import Settlement


class Status(StrEnum):
    """How a run ended."""

    IDLE = "nothing to do"
    DONE = "done"
    MORE = "more to do"
    STOPPED = "stopped"
    UNAVAILABLE = "broker unavailable"
    UNAUTHORIZED = "broker will not have us"
    DATABASE = "database unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run did: events published, refused and held, shards or keys worked on, seconds taken, and why it ended."""

    status: Status = Status.IDLE
    published: int = 0
    refused: int = 0
    held: int = 0
    reason: str | None = None

    def counting(self, *, published: int, refused: int) -> "Result":
        """Return this result with so many more events."""
        return replace(self, published=self.published + published, refused=self.refused + refused)

    def plus(self, written: Settlement) -> "Result":
        """Return this result with what was written down of one more batch."""
        return Result(
            status=Status.DONE,
            published=self.published + len(written.published),
            refused=self.refused + len(written.refused),
            held=self.held + len(written.followers),
            reason=self.reason,
        )

    def as_dict(self) -> dict[str, str | int]:
        """Return what is worth reading: the status, and everything that is not zero."""
        return {name: value for name, value in (asdict(self) | {"status": str(self.status)}).items() if value}
