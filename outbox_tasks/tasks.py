"""The Celery tasks: each a few lines over a plain function."""

import logging
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

from celery import Task, shared_task
from kombu.exceptions import OperationalError

from outbox_tasks import schedule, worker
from outbox_tasks.ports import Ports
from outbox_tasks.publishing.factory import new_publisher
from outbox_tasks.relay.dead_letter import dead_letter as dead_letter_run
from outbox_tasks.relay.dispatch import dispatch as dispatch_run
from outbox_tasks.relay.flush import flush as flush_run
from outbox_tasks.relay.redrive import read_filter
from outbox_tasks.relay.redrive import redrive as redrive_run
from outbox_tasks.relay.replay import Started, read_order, start
from outbox_tasks.relay.replay import replay as replay_run
from outbox_tasks.relay.result import Result, Status
from outbox_tasks.relay.retry import retry as retry_run
from outbox_tasks.relay.staying import StayLimit
from outbox_tasks.runtime import DATABASE_AWAY, Report, Reportable
from outbox_tasks.settings import Settings
from outbox_tasks.upkeep.check import check as check_deployment
from outbox_tasks.upkeep.partitions import maintain_partitions as maintain
from outbox_tasks.waking.check import check_wake

log = logging.getLogger(__name__)

RUNS_ONCE = {"acks_late": False, "reject_on_worker_lost": False}
"""A run whose child died is not delivered again, whatever the app's other tasks do: the next tick takes over."""


@shared_task(bind=True, **RUNS_ONCE, name="outbox.dispatch", ignore_result=True)
def dispatch(self: Task) -> Report:
    """Publish what is pending, in order per key. Sent by beat, by writers, and by itself while there is more."""
    limit = StayLimit(
        seconds=worker.settings_of(self.app).stay_seconds, longest_seconds=worker.longest_stay_of(self.app)
    )
    return _run(self, partial(dispatch_run, wake_another=partial(_send_again, self), limit=limit))


@shared_task(bind=True, **RUNS_ONCE, name="outbox.retry", ignore_result=True)
def retry(self: Task) -> Report:
    """Try keys again whose oldest event was refused. Sent by beat."""
    return _run(self, retry_run)


@shared_task(bind=True, **RUNS_ONCE, name="outbox.dead_letter", ignore_result=True)
def dead_letter(self: Task) -> Report:
    """Make dead letters of events that used up their attempts. Sent by beat."""
    return _run(self, dead_letter_run)


@shared_task(bind=True, **RUNS_ONCE, name="outbox.redrive", ignore_result=False)
def redrive(self: Task, *, reason: str, **which: Any) -> Report:
    """Put dead letters back in their old place. Sent by hand: reason, and at least one of the filters.

    Filters: ids (a list), key, topic, error (part of its text), since, until (ISO 8601, when it died).
    """
    wanted = read_filter(which)
    return _run(self, partial(redrive_run, wanted=wanted, reason=reason))


@shared_task(bind=True, **RUNS_ONCE, name="outbox.replay", ignore_result=False)
def replay(self: Task, **order: Any) -> Report:
    """Send published events again. Sent by beat to go on; by hand, with what is wanted, to begin.

    Wanted: since, until (ISO 8601), topic, aggregate_type, aggregate_id, event_type, ids (a list); to_topic, rate.
    """
    if not order:
        return _run(self, replay_run)
    read = read_order(order)
    return _run(self, lambda ports: Started(start(ports, read)))


@shared_task(bind=True, **RUNS_ONCE, name="outbox.flush", ignore_result=False)
def flush(self: Task, seconds: float | None = None) -> Report:
    """Publish everything pending now and tell what is left. Sent by hand; waits `seconds`, or outbox_flush_seconds."""
    wait = worker.settings_of(self.app).flush_seconds if seconds is None else seconds
    return _run(self, partial(flush_run, seconds=wait))


@shared_task(bind=True, **RUNS_ONCE, name="outbox.maintain_partitions", ignore_result=True)
def maintain_partitions(self: Task) -> Report:
    """Make the partitions of the days to come. Sent by beat."""
    return _run(self, maintain)


@shared_task(bind=True, **RUNS_ONCE, name="outbox.check", ignore_result=False)
def check(self: Task) -> Report:
    """Look at the database, the brokers, the topics and the wake-up; logs a warning for each thing that is wrong."""
    settings = worker.settings_of(self.app)
    with closing(new_publisher(settings)) as publisher:
        findings = [*check_deployment(settings, publisher), check_wake(self.app, settings)]
    for finding in findings:
        if not finding.right:
            log.warning("%s: %s", finding.subject, finding.detail)
    return {finding.subject: finding.detail for finding in findings}


def _run(task: Task, loop: Callable[[Ports], Reportable]) -> Report:
    """Run a loop with this thread's runtime. A database that is away is a result, like a broker that is away."""
    runtime = worker.runtimes_of(task.app).here()
    try:
        report = runtime.run(loop, task=task.name, owner=task.request.id)
    except DATABASE_AWAY as error:
        log.warning("%s: %s: %s", task.name, Status.DATABASE, error)
        return Result(status=Status.DATABASE, reason=str(error).strip()).as_dict()
    if report.get("published") or report.get("refused"):
        log.info("%s: %s", task.name, report)
    return report


def _send_again(task: Task) -> None:
    """Send this task once more, without waiting for a message broker that is away: beat is the floor."""
    settings: Settings = worker.settings_of(task.app)
    try:
        task.apply_async(retry=False, **schedule.dispatch_options(settings))
    except OperationalError as error:
        log.warning("%s: could not send another: %s", task.name, error)
