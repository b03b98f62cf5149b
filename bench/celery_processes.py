"""Celery workers and beats of a measurement. Nothing of them outlives the bench."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGTERM
from uuid import uuid4

import psutil
import redis
from celery import Celery

from bench.rig import Rig
from bench.script import CHECKOUT
from bench.waiting import UnfinishedError, until
from outbox_tasks.testing.services.guard import GuardedProcess, Launch

STOP_SECONDS = 30


@contextmanager
def celery(rig: Rig, environment: Mapping[str, str], *arguments: str) -> Iterator[int]:
    """Run a Celery process; yields its process id."""
    launch = Launch(
        command=[sys.executable, "-m", "celery", "-A", "outbox_tasks", *arguments],
        directory=CHECKOUT,
        log=rig.directory / f"{arguments[0]}-{uuid4().hex}.log",
        environment=environment,
        orphan_signal=SIGTERM,
    )
    guarded = GuardedProcess(launch)
    try:
        yield guarded.server.pid
    finally:
        _end(guarded)


@contextmanager
def worker(rig: Rig, environment: Mapping[str, str], *, children: int) -> Iterator[int]:
    """Run a worker that is at work; yields its process id."""
    with redis.Redis.from_url(rig.redis.url) as left_behind:
        left_behind.flushdb()
    name = f"bench-{uuid4().hex}@bench"
    with celery(rig, environment, "worker", "-c", str(children), "-l", "warning", "-n", name) as pid:
        app = app_of(rig)
        until(lambda: _answers(app, name, pid), "the worker")
        until(lambda: not busy(app), "the worker's first tasks")
        yield pid


@contextmanager
def beat(rig: Rig, environment: Mapping[str, str]) -> Iterator[int]:
    """Run a beat; yields its process id."""
    schedule = rig.directory / f"beat-{uuid4().hex}"
    with celery(rig, environment, "beat", "-l", "warning", "-s", str(schedule)) as pid:
        yield pid


def app_of(rig: Rig) -> Celery:
    """Return a Celery app to send tasks with."""
    app = Celery("bench", broker=rig.redis.url)
    app.conf.broker_url = rig.redis.url  # which CELERY_BROKER_URL would have the better of
    return app


def busy(app: Celery) -> bool:
    """Say whether the worker has a task, or does not answer."""
    inspect = app.control.inspect(timeout=2, limit=1)
    return any(tasks for ask in (inspect.active, inspect.reserved) for tasks in (ask() or {"nobody": [1]}).values())


def pool_of(pid: int) -> list[psutil.Process]:
    """Return the children of a worker."""
    return psutil.Process(pid).children()


def log_tail(directory: Path) -> str:
    """Return the last lines of the worker that wrote last, to explain a failure."""
    logs = sorted(directory.glob("worker-*.log"), key=lambda path: path.stat().st_mtime)
    return " | ".join(logs[-1].read_text(errors="replace").splitlines()[-5:]) if logs else ""


def _answers(app: Celery, name: str, pid: int) -> bool:
    if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
        raise UnfinishedError("the worker ended at start")
    return bool(app.control.ping(destination=[name], timeout=1, limit=1))


def _end(guarded: GuardedProcess) -> None:
    """Ask to stop, and kill what does not; children of the pool too."""
    family = _family(guarded.server.pid)
    guarded.server.terminate()
    try:
        guarded.server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        guarded.server.kill()
    for process in psutil.wait_procs(family, timeout=1)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    guarded.dismiss()


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
