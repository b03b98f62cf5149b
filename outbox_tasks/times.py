"""Times that people give."""

from datetime import UTC, datetime


def in_utc(time: datetime | None) -> datetime | None:
    """Return a time with a zone: UTC where it had none, for that is what every time of ours is shown in."""
    return time.replace(tzinfo=UTC) if time is not None and time.tzinfo is None else time
