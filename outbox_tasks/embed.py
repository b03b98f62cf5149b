"""Adds the outbox to a Celery app: its tasks and its schedule."""

from typing import Any

from celery import Celery

from outbox_tasks import settings, tasks, worker  # noqa: F401 - importing the tasks registers them with every app
from outbox_tasks.schedule import beat_schedule


def setup(app: Celery) -> Celery:
    """Add the outbox's tasks and beat schedule to an app, in one line; returns the app.

    Settings are the app's `outbox_*`, and `OUTBOX_*` of the environment. They are read when the app is finalized,
    that is after your own configuration.

    Raises:
        SettingsError: when the app is finalized, if a setting is unknown or wrong.
    """
    worker.connect_signals()
    app.on_after_finalize.connect(_install, weak=False)
    if app.finalized:
        _install(app)
    return app


def _install(sender: Celery, **_signal: Any) -> None:
    ours = worker.settings_of(sender)
    settings.use(ours)
    sender.conf.beat_schedule = beat_schedule(ours) | sender.conf.beat_schedule
