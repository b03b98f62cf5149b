"""What a piece of work costs: CPU seconds, bytes of WAL, statements; and values sampled while it runs."""

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import psutil
import psycopg

from bench.rig import Rig, name_of

SAMPLE_SECONDS = 0.25


def cpu_seconds(pid: int) -> float:
    """Return what a process and its descendants have used so far, those that have ended included."""
    try:
        root = psutil.Process(pid)
        return sum(_spent(process) for process in [root, *root.children(recursive=True)])
    except psutil.NoSuchProcess:
        return 0.0


def _spent(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What was used between two moments."""

    cpu_seconds: float
    database_cpu_seconds: float
    wal_bytes: int
    statements: int


class Meter:
    """Counts from when it is made. Statements are counted in a database whose statements are logged."""

    def __init__(self, rig: Rig, database_url: str, *, pids: Sequence[int] = ()) -> None:
        self._rig = rig
        self._name = name_of(database_url)
        self._pids = pids
        self._log_start = rig.postgres.log.stat().st_size
        self._wal_start = self._wal()
        self._cpu_start, self._database_start = self._cpu()

    def read(self) -> Cost:
        """Return what was used so far."""
        cpu, database = self._cpu()
        return Cost(
            cpu_seconds=cpu - self._cpu_start,
            database_cpu_seconds=database - self._database_start,
            wal_bytes=self._wal() - self._wal_start,
            statements=self._statements(),
        )

    def _cpu(self) -> tuple[float, float]:
        return sum(map(cpu_seconds, self._pids)), cpu_seconds(self._rig.postgres.pid)

    def _wal(self) -> int:
        with psycopg.connect(self._rig.postgres.url(), autocommit=True) as connection:
            row = connection.execute("SELECT pg_current_wal_lsn() - '0/0'").fetchone()
        return int(row[0]) if row else 0

    def _statements(self) -> int:
        with self._rig.postgres.log.open("rb") as log:
            log.seek(self._log_start)
            return len(
                re.findall(rb"^%s\|LOG:  (?:statement:|execute )" % self._name.encode(), log.read(), re.MULTILINE)
            )


class Sampler:
    """Asks for a value every quarter of a second, in a thread, while it is entered."""

    def __init__(self, value: Callable[[], float]) -> None:
        self._value = value
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = 0.0
        self.samples: list[tuple[float, float]] = []

    @property
    def last(self) -> float:
        """The newest value."""
        return self.samples[-1][1] if self.samples else 0.0

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.samples.append((round(time.monotonic() - self._started, 3), self._value()))
            self._stop.wait(SAMPLE_SECONDS)
