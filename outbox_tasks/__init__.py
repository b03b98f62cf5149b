"""Transactional outbox for PostgreSQL and Kafka, built from Celery tasks."""

from typing import TYPE_CHECKING, Any

from outbox_tasks.append import EventId, NewEvent, append, append_all
from outbox_tasks.waker import wake

if TYPE_CHECKING:
    from outbox_tasks.embed import setup

__all__ = ["EventId", "NewEvent", "append", "append_all", "setup", "wake"]


def __getattr__(name: str) -> Any:
    """Import `setup`, and Celery with it, only where it is used: writers of events need neither."""
    if name == "setup":
        from outbox_tasks.embed import setup  # noqa: PLC0415

        return setup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
