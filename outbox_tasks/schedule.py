"""The beat schedule: what is triggered when, where it runs, and when a tick is too old to run."""

from typing import Any

from outbox_tasks.settings import Settings

DISPATCH = "outbox.dispatch"

DISPATCH_EXPIRES_SECONDS = 5.0
"""A dispatch tick is not thrown away sooner: Celery compares the clocks of two machines to tell its age."""


def options(settings: Settings, *, every: float) -> dict[str, Any]:
    """Return how a tick is sent that comes every so many seconds.

    One that is too old is thrown away, so that they never pile up; but not before the children have had time to
    end what they were doing. A run is killed before its lease ends.
    """
    queue = {"queue": settings.queue} if settings.queue else {}
    expires = max(every, 2 * settings.run_seconds)
    return {"expires": expires, "time_limit": settings.time_limit_seconds} | queue


def beat_schedule(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the entries for Celery's `beat_schedule`."""
    ticks = {
        "outbox.retry": settings.retry_tick_seconds,
        "outbox.dead_letter": settings.retry_tick_seconds,
        "outbox.replay": settings.replay_tick_seconds,
        "outbox.maintain_partitions": settings.partitions_tick_seconds,
    }
    return {
        task: {"task": task, "schedule": seconds, "options": options(settings, every=seconds)}
        for task, seconds in ticks.items()
    } | {DISPATCH: {"task": DISPATCH, "schedule": settings.dispatch_seconds, "options": dispatch_options(settings)}}


def dispatch_options(settings: Settings) -> dict[str, Any]:
    """Return how a dispatch is sent: it expires soon, for there is always a next one."""
    expires = max(settings.dispatch_seconds, DISPATCH_EXPIRES_SECONDS)
    return options(settings, every=settings.dispatch_seconds) | {"expires": expires}
