"""One server as a child process: started until it is ready, stopped, killed, frozen, restarted."""

import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import ClassVar, Self

import psutil

from outbox_tasks.errors import OutboxError
from outbox_tasks.testing.services.guard import GuardedProcess, Launch
from outbox_tasks.testing.services.places import free_port, is_free

_LOG_TAIL_LINES = 20
_POLL_SECONDS = 0.02


class ServerError(OutboxError):
    """A server of the demo or the tests cannot be started, or is not in the state the call needs."""


class ServerProcess(ABC):
    """A server that runs below one directory of its own, on one loopback port.

    The port is fixed when the object is made, and kept over `restart`. Used as a context manager it is
    started on entry and stopped on exit. Should the parent die by whatever means, the server dies with it.
    """

    name: ClassVar[str]
    start_timeout: ClassVar[timedelta] = timedelta(seconds=30)
    stop_timeout: ClassVar[timedelta] = timedelta(seconds=20)
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, directory: Path, *, port: int | None = None) -> None:
        self.directory = directory.absolute()
        self.port = free_port() if port is None else port
        self._guarded: GuardedProcess | None = None

    @property
    def log(self) -> Path:
        """The file all its output is appended to."""
        return self.directory / f"{self.name}.log"

    @property
    def pid(self) -> int:
        """The process id of the running server.

        Raises:
            ServerError: it was not started.
        """
        return self._running().pid

    @property
    def is_running(self) -> bool:
        """Whether the process exists; a frozen one does."""
        return self._guarded is not None and self._guarded.server.poll() is None

    def start(self) -> None:
        """Start the server and return when it answers.

        Raises:
            ServerError: it runs already, its port is taken, it ended at start, or it did not answer in
                time; the last two show the end of its log.
        """
        if self._guarded is not None:
            raise ServerError(f"{self.name} on port {self.port} was started before: stop() it first")
        if not is_free(self.port):
            # Asked first: whoever has it might answer the question whether this server is ready.
            raise ServerError(f"{self.name} cannot start, port {self.port} is taken: choose another")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._prepare()
        self._guarded = GuardedProcess(self._launch())
        try:
            self._await_ready()
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """End the server as its operator would, or kill it when that takes too long; ended is fine."""
        if self._guarded is None:
            return
        self.thaw()
        self._guarded.server.send_signal(self.stop_signal)
        try:
            self._guarded.server.wait(self.stop_timeout.total_seconds())
        except subprocess.TimeoutExpired:
            self.kill()
        else:
            self._dismiss()

    def kill(self) -> None:
        """SIGKILL the server and all its processes, and return when they are gone; ended already is fine."""
        if self._guarded is None:
            return
        family = self._family()
        _send(family, signal.SIGKILL)
        self._guarded.server.wait()
        self._await_none(family, _is_alive)
        self._dismiss()

    def freeze(self) -> None:
        """SIGSTOP the server and all its processes, and return when they stand still."""
        parent = psutil.Process(self._running().pid)
        # The parent first: once stopped it makes no more children.
        _send([parent], signal.SIGSTOP)
        self._await_none([parent], _is_going)
        children = parent.children(recursive=True)
        _send(children, signal.SIGSTOP)
        self._await_none(children, _is_going)

    def thaw(self) -> None:
        """SIGCONT everything that `freeze` stopped."""
        _send(reversed(self._family()), signal.SIGCONT)

    def restart(self) -> None:
        """Stop, then start again on the same port with the same directory."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @abstractmethod
    def _prepare(self) -> None:
        """Make what must exist before the first start; called before every start."""

    @abstractmethod
    def _launch(self) -> Launch:
        """Say how to start it."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """Ask the server once whether it serves clients."""

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._guarded is None:
            raise ServerError(f"{self.name} on port {self.port} is not running: start() it first")
        return self._guarded.server

    def _family(self) -> list[psutil.Process]:
        """Return the server and its descendants, parents before children; empty when it has ended."""
        try:
            parent = psutil.Process(self._running().pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _dismiss(self) -> None:
        guarded, self._guarded = self._guarded, None
        if guarded is not None:
            guarded.dismiss()

    def _await_ready(self) -> None:
        deadline = monotonic() + self.start_timeout.total_seconds()
        while not self._is_ready():
            if self._has_ended():
                raise ServerError(f"{self.name} ended at start with {self._running().returncode}: {self._tail()}")
            if monotonic() > deadline:
                raise ServerError(f"{self.name} did not answer within {self.start_timeout}: {self._tail()}")

    def _await_none(self, family: list[psutil.Process], still: Callable[[psutil.Process], bool]) -> None:
        deadline = monotonic() + self.stop_timeout.total_seconds()
        while left := [process for process in family if still(process)]:
            if monotonic() > deadline:
                raise ServerError(f"{self.name}: no effect of a signal after {self.stop_timeout} on {left}")
            psutil.wait_procs(left, timeout=_POLL_SECONDS)

    def _has_ended(self) -> bool:
        """Wait a moment for the end that should not come; this is what paces the polling."""
        try:
            self._running().wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join([f"the end of {self.log} says", *lines])


def _is_alive(process: psutil.Process) -> bool:
    """Whether it still holds anything; a zombie only waits for an init that may take its time."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_going(process: psutil.Process) -> bool:
    """Whether it has yet to take notice of its SIGSTOP."""
    try:
        return process.status() not in {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE}
    except psutil.NoSuchProcess:
        return False


def _send(processes: Iterable[psutil.Process], signal_: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(signal_)
        except psutil.NoSuchProcess:
            continue  # it ended by itself in between, which is what any of these signals may meet
