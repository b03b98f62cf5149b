"""Processes of a server, watched from outside until none is left."""

from collections.abc import Iterable
from time import monotonic

import psutil


def family_of(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def survivors(processes: Iterable[psutil.Process], *, within_seconds: float = 10) -> list[psutil.Process]:
    """Return those that are still alive after the time given, or none as soon as none is."""
    deadline = monotonic() + within_seconds
    alive = list(processes)
    while (alive := [process for process in alive if is_alive(process)]) and monotonic() < deadline:
        psutil.wait_procs(alive, timeout=0.05)
    return alive


def is_alive(process: psutil.Process) -> bool:
    """Say whether a process is there and has not ended."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
