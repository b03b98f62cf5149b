"""The beat schedule: what is triggered when, where it runs, and when a tick is too old to run."""

from typing import Any

from outbox_tasks.settings import Settings


def options(settings: Settings, *, expires: float) -> dict[str, Any]:
    """Return how a tick is sent: it expires when the next one is due, and is killed before its lease ends."""
    queue = {"queue": settings.queue} if settings.queue else {}
    return {"expires": expires, "time_limit": settings.time_limit_seconds} | queue


def beat_schedule(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the entries for Celery's `beat_schedule`."""
    ticks = {
        "outbox.dispatch": settings.dispatch_seconds,
        "outbox.retry": settings.retry_tick_seconds,
        "outbox.dead_letter": settings.retry_tick_seconds,
        "outbox.replay": settings.replay_tick_seconds,
        "outbox.maintain_partitions": settings.partitions_tick_seconds,
    }
    return {
        task: {"task": task, "schedule": seconds, "options": options(settings, expires=seconds)}
        for task, seconds in ticks.items()
    }
