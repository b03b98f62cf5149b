"""The demo, run as a person runs it: it ends with a verdict and leaves nothing behind."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest
from support.families import family_of, survivors

# Lines of the demo's output.
STARTING = re.compile(r"^starting the order service")
RUNNING = re.compile(r" s  written \d+  published [1-9]")
FLOWER = re.compile(r"^Flower +(?P<url>\S+) +user (?P<user>\S+) +password (?P<password>\S+)$", re.MULTILINE)
DATABASE = re.compile(r"^look +psql (?P<url>\S+) ", re.MULTILINE)
LOGS = re.compile(r"^logs +(?P<path>\S+)$", re.MULTILINE)

# Makes a record of the topic one that no table knows.
DELETE_ONE = """
DELETE FROM outbox WHERE id = (SELECT min(id) FROM outbox WHERE state = 'published') RETURNING event_id
"""


class Demo:
    """A demo under way, with what it has printed so far."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.output = ""

    def read_until(self, pattern: re.Pattern[str]) -> None:
        """Read on until a line matches; the test's time limit ends a wait for what never comes."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if pattern.search(line):
                return
        pytest.fail(f"no {pattern.pattern!r} in:\n{self.output}")

    def end(self) -> int:
        """Read the rest and return the exit code."""
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        return self.process.wait()

    def find(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Return what a line of the output says."""
        found = pattern.search(self.output)
        assert found is not None, self.output
        return found


@contextmanager
def demo(*options: str) -> Iterator[Demo]:
    """Run a demo; one that a failed test leaves is killed, and its guards end the rest."""
    command = [sys.executable, "-m", "outbox_tasks.demo", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield Demo(process)
        finally:
            process.kill()


def names_of(family: list[psutil.Process]) -> str:
    """Return the command lines of processes, as far as they are still there."""
    return "\n".join(" ".join(process.cmdline()) for process in family if process.is_running())


def test_demo_ends_by_itself() -> None:
    """With --seconds the demo ends with a summary and 0, and none of its processes or files is left."""
    with demo("--seconds", "6") as running:
        running.read_until(RUNNING)
        family = family_of(running.process.pid)
        names = names_of(family)
        assert running.end() == 0, running.output
    assert all(part in names for part in ("postgres", "redis", "uvicorn", "worker", "beat", "flower"))
    assert survivors(family) == []
    assert "summary after " in running.output
    assert "everything committed is in the topic, in order per order, and nothing else" in running.output
    written, consumed = (
        int(running.find(re.compile(rf"^  {what} +(\d+)", re.MULTILINE))[1]) for what in ("written", "consumed")
    )
    assert written == consumed > 50
    assert not Path(running.find(LOGS)["path"]).parent.exists()


def test_ctrl_c() -> None:
    """Ctrl-C ends a demo without --seconds with the verdict on what it did; until then Flower wants the password."""
    with demo() as running:
        running.read_until(RUNNING)
        family = family_of(running.process.pid)
        flower = running.find(FLOWER)
        assert httpx.get(flower["url"]).status_code == httpx.codes.UNAUTHORIZED
        assert httpx.get(flower["url"], auth=(flower["user"], "guess")).status_code == httpx.codes.UNAUTHORIZED
        shown = httpx.get(f"{flower['url']}/tasks", auth=(flower["user"], flower["password"]))
        assert shown.status_code == httpx.codes.OK
        running.process.send_signal(signal.SIGINT)
        assert running.end() == 0, running.output
    assert survivors(family) == []
    assert "everything committed is in the topic" in running.output


def test_something_wrong() -> None:
    """A record in the topic that the tables know nothing of ends the demo with 1 and what is wrong."""
    with demo() as running:
        running.read_until(RUNNING)
        with psycopg.connect(running.find(DATABASE)["url"]) as connection:
            deleted = connection.execute(DELETE_ONE).fetchone()
        assert deleted is not None
        running.process.send_signal(signal.SIGINT)
        assert running.end() == 1
    assert "\nWRONG\n" in running.output
    assert f"1 in the topic but never committed: {deleted[0]}" in running.output
    assert "1 orders that do not match their events" in running.output


def test_terminated_while_it_starts() -> None:
    """SIGTERM before everything runs ends the demo with 1, without a verdict, and leaves nothing behind."""
    with demo() as running:
        running.read_until(STARTING)
        family = family_of(running.process.pid)
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 1
    assert "postgres" in running.output.lower()
    assert running.output.endswith("Error: interrupted before the end: nothing was judged\n")
    assert survivors(family) == []
