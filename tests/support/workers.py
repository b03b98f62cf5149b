"""Celery workers and beats as processes: started and ended as an operator would, or as an accident does."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Self

import psutil
import redis
from celery import Celery

from outbox_tasks.testing.services import RedisServer
from outbox_tasks.testing.services.guard import GuardedProcess, Launch
from support.families import family_of, survivors
from support.waiting import until

CHECKOUT = Path(__file__).parents[2]
"""Where the repository's own celeryconfig.py lies, which deployments of the tests use unchanged."""

_LOG_TAIL_LINES = 60
_REDIS_DATABASES = 16
_numbers = count()


def redis_url_of_its_own(server: RedisServer) -> str:
    """Return the URL of an empty database of the server, another one than at the last call."""
    number = next(_numbers) % _REDIS_DATABASES
    url = f"{server.url.rpartition('/')[0]}/{number}"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What the processes of one deployment have in common; `settings` are `OUTBOX_*`, without the prefix."""

    database_url: str
    bootstrap_servers: str
    redis_url: str
    scratch: Path
    settings: Mapping[str, object] = field(default_factory=dict)
    app: str = "outbox_tasks"
    directory: Path = CHECKOUT

    def but(self, **settings: object) -> Self:
        """Return this deployment with some settings changed."""
        return replace(self, settings={**self.settings, **settings})

    @property
    def environment(self) -> dict[str, str]:
        """The environment of its processes; nothing of ours or Celery's is inherited."""
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(("OUTBOX_", "CELERY_"))}
        places = {"database_url": self.database_url, "bootstrap_servers": self.bootstrap_servers}
        ours = {f"OUTBOX_{name.upper()}": str(value) for name, value in {**places, **self.settings}.items()}
        celery = {"CELERY_BROKER_URL": self.redis_url, "CELERY_RESULT_BACKEND": self.redis_url}
        # Wide enough for tables not to be folded.
        return {**inherited, **ours, **celery, "PYTHONUNBUFFERED": "1", "COLUMNS": "500"}

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a `celery` command to its end."""
        return subprocess.run(
            self.command(*arguments),
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of a `celery` command."""
        return [sys.executable, "-m", "celery", "-A", self.app, *arguments]


class CeleryProcess:
    """A worker or a beat in a process group of its own; its output is in `log`."""

    def __init__(self, name: str, launch: Launch, *, ready: str) -> None:
        self.name = name
        self.log = launch.log
        self._ready = ready
        self._guarded = GuardedProcess(launch)
        self._family = [self.main]
        self._ended_by_us = False
        self._dismissed = False

    @property
    def pid(self) -> int:
        """The process id of the main process."""
        return self._guarded.server.pid

    @property
    def main(self) -> psutil.Process:
        """The main process."""
        return psutil.Process(self.pid)

    @property
    def children(self) -> list[psutil.Process]:
        """The children of the pool, as they are now."""
        return self.main.children()

    @property
    def is_running(self) -> bool:
        """Whether the main process exists."""
        return self._guarded.server.poll() is None

    @property
    def output(self) -> str:
        """All that was logged so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def says(self, text: str) -> bool:
        """Whether a text was logged.

        Raises:
            ChildProcessError: not so, and the process has ended, so that it never will.
        """
        ended = not self.is_running
        if text in self.output:
            return True
        if ended:
            raise ChildProcessError(f"{self.name} ended with {self._guarded.server.returncode}, without {text!r}")
        return False

    def await_ready(self) -> Self:
        """Return when it is at work."""
        self.await_word(self._ready)
        return self

    def await_word(self, text: str, *, seconds: float = 120) -> None:
        """Return when a text was logged."""
        until(lambda: self.says(text), f"{self.name} says {text!r}", seconds=seconds)

    def check_alive(self) -> None:
        """Raise ChildProcessError if the process has ended though nobody asked it to."""
        if not self._ended_by_us and not self.is_running:
            raise ChildProcessError(f"{self.name} ended by itself with {self._guarded.server.returncode}")

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the main process, as an operator does."""
        self._ended_by_us = True
        self._family = family_of(self.pid)
        self._guarded.server.send_signal(signal.SIGTERM)

    def await_end(self, *, seconds: float = 60) -> int:
        """Return the exit code once the main process has ended, and all its children with it."""
        self._ended_by_us = True
        code = self._guarded.server.wait(seconds)
        left = survivors(self._family)
        if left:
            raise ChildProcessError(f"{self.name} has ended and left {left}")
        return code

    def stop(self) -> int:
        """Ask it to stop and return its exit code."""
        self.ask_to_stop()
        return self.await_end()

    def kill(self) -> None:
        """SIGKILL the main process and all its children, and return when they are gone."""
        self._ended_by_us = True
        if self.is_running:
            self._family = family_of(self.pid)
            # The main process first: it must not see its children die.
            self._guarded.server.send_signal(signal.SIGKILL)
            os.killpg(self.pid, signal.SIGKILL)
        survivors(self._family)
        self._dismiss()

    def tail(self) -> str:
        """Return the end of its log."""
        lines = self.output.splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join([f"--- the end of what {self.name} said", *lines])

    def _dismiss(self) -> None:
        if not self._dismissed:
            self._dismissed = True
            self._guarded.dismiss()


class Fleet:
    """The processes of a deployment; `fleet()` makes one, kills what is left of it, and shows logs on failure."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._processes: list[CeleryProcess] = []

    def worker(self, *options: str, children: int = 2, pool: str = "prefork") -> CeleryProcess:
        """Start a worker, without waiting for it."""
        number = len(self._processes)
        name = f"worker-{number}-{os.getpid()}"
        arguments = ["worker", "-n", f"{name}@%h", "-P", pool, "-c", str(children), "-l", "INFO", *options]
        return self._start(name, arguments, ready=" ready.")

    def beat(self) -> CeleryProcess:
        """Start a beat, without waiting for it."""
        name = f"beat-{len(self._processes)}-{os.getpid()}"
        schedule = self._deployment.scratch / f"{name}.schedule"
        return self._start(name, ["beat", "-s", str(schedule), "-l", "INFO"], ready="beat: Starting...")

    def await_ready(self) -> None:
        """Return when everything started so far is at work."""
        for process in self._processes:
            process.await_ready()

    def until(self, condition: Callable[[], object], what: str, *, seconds: float = 120) -> None:
        """Return when a condition is true.

        Raises:
            ChildProcessError: a process ended that nobody ended.
            TimeoutError: the condition was not true in time.
        """

        def look() -> object:
            for process in self._processes:
                process.check_alive()
            return condition()

        # Seldom: counting a table of many rows takes its share of the processors.
        until(look, what, seconds=seconds, every_seconds=0.1)

    def kill(self) -> None:
        """Kill everything that still runs."""
        for process in self._processes:
            process.kill()

    def tails(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(process.tail() for process in self._processes)

    def _start(self, name: str, arguments: list[str], *, ready: str) -> CeleryProcess:
        launch = Launch(
            command=self._deployment.command(*arguments),
            directory=self._deployment.directory,
            log=self._deployment.scratch / f"{name}.log",
            environment=self._deployment.environment,
        )
        process = CeleryProcess(name, launch, ready=ready)
        self._processes.append(process)
        return process


@contextmanager
def fleet(deployment: Deployment) -> Iterator[Fleet]:
    """Give the processes of a deployment; whatever is left of them at the end is killed."""
    ours = Fleet(deployment)
    try:
        yield ours
    except BaseException as error:
        error.add_note(ours.tails())
        raise
    finally:
        ours.kill()


@contextmanager
def client(deployment: Deployment) -> Iterator[Celery]:
    """Give a Celery app without tasks, to send them by name and wait for their results."""
    app = Celery("by-hand", broker=deployment.redis_url, backend=deployment.redis_url, set_as_current=False)
    try:
        yield app
    finally:
        app.close()
