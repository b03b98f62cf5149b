"""Adds the outbox to a Celery app: its tasks and its schedule."""

from functools import partial
from typing import Any

from celery import Celery

from outbox_tasks import settings, tasks, waker, worker  # noqa: F401 - importing the tasks registers them
from outbox_tasks.schedule import beat_schedule
from outbox_tasks.steps import ListenerStep
from outbox_tasks.waking.writer import Writer


def setup(app: Celery) -> Celery:
    """Add the outbox's tasks and beat schedule to an app, in one line; returns the app.

    From then on events appended over a Session in this process wake the relay when they are committed (`outbox_wake`).

    Settings are the app's `outbox_*`, and `OUTBOX_*` of the environment. They are read when the app is finalized,
    that is after your own configuration.

    Raises:
        SettingsError: when the app is finalized, if a setting is unknown or wrong.
    """
    worker.connect_signals()
    app.steps["worker"].add(ListenerStep)
    waker.install(Writer(app, partial(worker.settings_of, app)))
    app.on_after_finalize.connect(_install, weak=False)
    if app.finalized:
        _install(app)
    return app


def _install(sender: Celery, **_signal: Any) -> None:
    ours = worker.settings_of(sender)
    settings.use(ours)
    if not ours.wake:
        waker.install(None)
    sender.conf.beat_schedule = beat_schedule(ours) | sender.conf.beat_schedule
