"""Ties a Celery worker's processes to the loops: settings, runtimes, stopping, and the leases of a dead child."""

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
from billiard.exceptions import WorkerLostError
from celery import Celery, Task, signals
from celery.worker.request import Request

from outbox_tasks import schedule
from outbox_tasks import settings as outbox_settings
from outbox_tasks.errors import PoolError, SettingsError
from outbox_tasks.publishing.factory import new_publisher
from outbox_tasks.runtime import Runtimes, StopFlag, free_leases_of
from outbox_tasks.settings import Settings
from outbox_tasks.waking import parts

log = logging.getLogger(__name__)

PREFIX = "outbox."
"""What the names of our tasks begin with."""

stopping = StopFlag()
"""Set in the main process before the pool is asked to stop; made before children are forked, so they share it."""

_settings: weakref.WeakKeyDictionary[Celery, Settings] = weakref.WeakKeyDictionary()
_runtimes: weakref.WeakKeyDictionary[Celery, Runtimes] = weakref.WeakKeyDictionary()
_at_once: weakref.WeakKeyDictionary[Celery, int] = weakref.WeakKeyDictionary()
_green: weakref.WeakKeyDictionary[Celery, str] = weakref.WeakKeyDictionary()


def settings_of(app: Celery) -> Settings:
    """Return the settings in an app's configuration and the environment, read once.

    Raises:
        SettingsError: they are wrong.
    """
    if app not in _settings:
        _settings[app] = outbox_settings.load(app.conf)
    return _settings[app]


def longest_stay_of(app: Celery) -> float:
    """Return for how many seconds a run may stay for more: a tick, or half of one where nothing else can run then."""
    tick = settings_of(app).dispatch_seconds
    return tick if _at_once.get(app, 1) > 1 else tick / 2


def queue_of(app: Celery) -> str:
    """Return the queue of the tasks: `outbox_queue`, else what the app's routes say of a dispatch, else its default."""
    ours = settings_of(app).queue
    if ours is not None:
        return ours
    # Not `route`: that would make a queue that is missing.
    route = app.amqp.router.lookup_route(schedule.DISPATCH, (), {}, {}) or {}
    queue = route if isinstance(route, str) else route.get("queue") or app.conf.task_default_queue
    return str(getattr(queue, "name", queue))


def is_green(instance: Any) -> bool:
    """Say whether a worker's pool has green threads, as gevent's and eventlet's have."""
    return bool(getattr(instance.pool_cls, "is_green", False))


def runtimes_of(app: Celery) -> Runtimes:
    """Return this process's runtimes for an app. Nothing is opened yet.

    Raises:
        PoolError: this worker's pool has green threads.
    """
    if app in _green:
        raise PoolError(_green[app])
    if app not in _runtimes:
        settings = settings_of(app)
        _runtimes[app] = Runtimes(settings, stopping=stopping, new_bell=partial(parts.bell, app, settings))
    return _runtimes[app]


def connect_signals() -> None:
    """Listen to the worker's life. Listening twice is listening once."""
    signals.worker_init.connect(_on_start)
    signals.celeryd_after_setup.connect(_on_setup)
    signals.beat_init.connect(_check_settings)
    signals.worker_ready.connect(_on_ready)
    signals.worker_shutting_down.connect(_on_stopping)
    signals.worker_process_shutdown.connect(_on_end)
    signals.worker_shutdown.connect(_on_end)
    signals.task_failure.connect(_on_failure)
    signals.task_revoked.connect(_on_revoked)


def _on_start(sender: Any, **_signal: Any) -> None:
    """See that there is a Kafka client that knows its settings, and a Redis to be named; nothing is opened."""
    stopping.clear()
    with _ending_where_settings_are_wrong():
        settings = settings_of(sender.app)
        new_publisher(settings).close()
        parts.bell(sender.app, settings).close()


def _on_setup(instance: Any, **_signal: Any) -> None:
    """Note how many tasks run at once, and look at the pool; in the main process, before children are forked."""
    _at_once[instance.app] = instance.concurrency or 1
    _check_pool(instance)


def _check_pool(instance: Any) -> None:
    """End a worker with green threads that takes our tasks; one that merely knows them has other work to do."""
    if not is_green(instance):
        return
    app, pool = instance.app, instance.pool_cls.__module__.rpartition(".")[2]
    _green[app] = (
        f"this worker's pool is {pool}, in which the outbox's tasks do not run: they need prefork, threads or solo"
    )
    queue = queue_of(app)
    if queue in app.amqp.queues.consume_from:
        raise SystemExit(
            f"outbox_tasks: {_green[app]}. It would take them from queue {queue!r}: start it with another pool, or "
            "give them a queue of their own (outbox_queue) and this worker its queues (-Q)"
        )


def _check_settings(sender: Any, **_signal: Any) -> None:
    with _ending_where_settings_are_wrong():
        settings_of(sender.app)


@contextmanager
def _ending_where_settings_are_wrong() -> Iterator[None]:
    """End the worker or beat. Signals swallow errors, but not this one."""
    try:
        yield
    except SettingsError as error:
        raise SystemExit(f"outbox_tasks: {error}") from None


def _on_ready(sender: Any, **_signal: Any) -> None:
    """Have a child look at the topics and at the partitions, so that what is wrong stands in the log from the start."""
    for task in ("outbox.check", "outbox.maintain_partitions"):
        sender.app.send_task(task, expires=60, retry=False, queue=settings_of(sender.app).queue)


def _on_stopping(**_signal: Any) -> None:
    stopping.set()


def _on_end(**_signal: Any) -> None:
    for runtimes in _runtimes.values():
        runtimes.close()


def _on_failure(sender: Task, task_id: str, exception: BaseException, **_signal: Any) -> None:
    """Free the leases of a run whose child died, in the main process, which alone is told so."""
    if isinstance(exception, WorkerLostError):  # at a time limit the child still lives, and its leases end soon
        _free(sender, task_id)


def _on_revoked(sender: Task, request: Request, *, terminated: bool, **_signal: Any) -> None:
    if terminated:
        _free(sender, request.id)


def _free(task: Task, task_id: str) -> None:
    if not task.name.startswith(PREFIX):
        return
    try:
        freed = free_leases_of(task_id, settings_of(task.app))
    except psycopg.OperationalError as error:
        log.warning("the leases of lost run %s end by themselves: %s", task_id, error)
    else:
        log.warning("freed %s leases of lost run %s", freed, task_id)
