"""What a process keeps between tasks: connections, publishers, and whether it has been asked to stop."""

import logging
import mmap
import platform
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import psycopg

from outbox_tasks.deadline import Deadline
from outbox_tasks.ports import SILENCE, Bell, Ports
from outbox_tasks.publishing.factory import new_publisher
from outbox_tasks.publishing.publisher import Publisher
from outbox_tasks.relay.result import Status
from outbox_tasks.settings import Settings
from outbox_tasks.store import leases, runs
from outbox_tasks.store.connection import Connection, connect
from outbox_tasks.store.horizon import Horizon
from outbox_tasks.store.runs import Ended

log = logging.getLogger(__name__)

Report = dict[str, Any]
"""What a task returns."""

DATABASE_AWAY = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.errors.ReadOnlySqlTransaction)
"""Errors that mean the database is gone for now, or is a standby, and no event is to blame."""

TICKS = ("outbox.dispatch", "outbox.retry", "outbox.replay")
"""Tasks that come every moment: for a moment after one found no broker, the others take its word for it, so that
ticks that waited meanwhile do not keep the child from other tasks."""

IDLE_SECONDS = 10.0
"""How often a run that finds nothing to do is written down all the same: a sign of life for `outbox check`."""


class Reportable(Protocol):
    """What a loop returns."""

    def as_dict(self) -> Report:
        """Return what reads well in Flower."""


class StopFlag:
    """A flag the worker's main process sets and its forked children see: one byte of shared memory, no lock."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    def __call__(self) -> bool:
        """Say whether runs shall end."""
        return self._memory[0] != 0

    def set(self) -> None:
        """Ask every run to end."""
        self._memory[0] = 1

    def clear(self) -> None:
        """Let runs go on."""
        self._memory[0] = 0


class Runtime:
    """One thread's connection to PostgreSQL and to Kafka: opened when first needed, opened again when lost."""

    def __init__(self, settings: Settings, *, stopping: StopFlag, bell: Bell = SILENCE) -> None:
        self._settings = settings
        self._stopping = stopping
        self._bell = bell
        self._connection: Connection | None = None
        self._horizon = Horizon()
        self._publisher: Publisher = new_publisher(settings)
        self._abandoned: dict[str, Callable[..., object]] = {}
        self._idle_until: dict[str, Deadline] = {}
        self._outage: Report | None = None
        self._outage_end = Deadline.after(0)

    def run(self, loop: Callable[[Ports], Reportable], *, task: str, owner: str) -> Report:
        """Run a loop, and write down what it did. Returns its report, or that of a moment ago that found no broker.

        Whatever breaks it, what it had leased is free as soon as the database can be reached. A lost connection is
        nobody's fault. Anything else may be an event's: it counts as a death.
        """
        if task in TICKS and self._outage is not None and not self._outage_end.passed:
            return self._outage
        started = time.monotonic()
        try:
            ports = self._ports(owner)
            report = loop(ports).as_dict()
            self._record(ports, task, report, seconds=time.monotonic() - started)
        except psycopg.errors.ProgramLimitExceeded:
            self._abandon(owner, leases.expire)
            raise
        except DATABASE_AWAY:
            self._abandon(owner, leases.give_back)
            raise
        except BaseException:
            self._abandon(owner, leases.expire)
            raise
        if report.get("status") == Status.UNAVAILABLE:
            self._outage = {name: report[name] for name in ("status", "reason") if name in report}
            self._outage_end = Deadline.after(self._settings.dispatch_seconds)
        return report

    def _record(self, ports: Ports, task: str, report: Report, *, seconds: float) -> None:
        """Write a run down, unless it had nothing to do and one like it was written down a moment ago."""
        idle = report.get("status") == Status.IDLE
        if idle and task in self._idle_until and not self._idle_until[task].passed:
            return
        self._idle_until[task] = Deadline.after(IDLE_SECONDS if idle else 0)
        runs.record(ports.connection, Ended(task, ports.owner, platform.node(), seconds, report))

    def _abandon(self, owner: str, free: Callable[..., object]) -> None:
        self._abandoned[owner] = free
        self.close()

    def close(self) -> None:
        """Close what is open; the next run opens it again."""
        self._publisher.discard()
        self._bell.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _ports(self, owner: str) -> Ports:
        return Ports(
            connection=self._open_connection(),
            publisher=self._publisher,
            settings=self._settings,
            owner=owner,
            stopping=self._stopping,
            horizon=self._horizon,
            bell=self._bell,
        )

    def _open_connection(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection, self._horizon = connect(self._settings), Horizon()
        for owner, free in list(self._abandoned.items()):
            free(self._connection, owner=owner)
            del self._abandoned[owner]
        return self._connection


class Runtimes:
    """The runtimes of a process, one a thread; `new_bell` makes the bell of each."""

    def __init__(
        self, settings: Settings, *, stopping: StopFlag, new_bell: Callable[[], Bell] = lambda: SILENCE
    ) -> None:
        self._settings = settings
        self._stopping = stopping
        self._new_bell = new_bell
        self._local = threading.local()
        self._all: list[Runtime] = []

    def here(self) -> Runtime:
        """Return this thread's runtime."""
        runtime: Runtime | None = getattr(self._local, "runtime", None)
        if runtime is None:
            runtime = self._local.runtime = Runtime(self._settings, stopping=self._stopping, bell=self._new_bell())
            self._all.append(runtime)
        return runtime

    def close(self) -> None:
        """Close every runtime; called when no task runs any more."""
        for runtime in self._all:
            runtime.close()


RESCUE_SECONDS = 2
"""How long the worker's main process waits for a connection to free a dead child's leases."""


def free_leases_of(owner: str, settings: Settings) -> int:
    """Free what a run that died had leased, over a connection of its own; returns how many leases there were.

    Raises:
        psycopg.OperationalError: the database could not be reached in time; the leases end by themselves.
    """
    # What the dead child's session was doing may hold the leases' rows until its own statement timeout ends it.
    options = f"-c statement_timeout={round(settings.statement_seconds * 1000) + 1000}"
    with psycopg.connect(
        settings.conninfo,
        autocommit=True,
        connect_timeout=RESCUE_SECONDS,
        options=options,
        application_name=f"{settings.client_id} rescue",
    ) as connection:
        return leases.expire(connection, owner=owner)
