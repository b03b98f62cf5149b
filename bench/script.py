"""A measurement's own process: it gets ready, waits for the word, works, and answers with JSON."""

import json
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from bench.waiting import UnfinishedError

CHECKOUT = Path(__file__).parents[1]
READY_SECONDS = 120


def await_go() -> None:
    """Tell the parent that all is ready, and wait for its word. Called by the script."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if not sys.stdin.readline():
        raise SystemExit("the parent is gone")


def answer(figures: Mapping[str, Any]) -> None:
    """Give the parent the result. Called by the script, once."""
    sys.stdout.write(json.dumps(figures))
    sys.stdout.flush()


class Script:
    """The parent's side of such a process."""

    def __init__(self, process: "subprocess.Popen[str]", name: str, log: Path) -> None:
        self._process = process
        self._name = name
        self._log = log

    def await_ready(self) -> None:
        """Return when it waits for the word.

        Raises:
            UnfinishedError: it ended, or took too long.
        """
        assert self._process.stdout is not None
        heard, _, _ = select.select([self._process.stdout], [], [], READY_SECONDS)
        if not heard or self._process.stdout.readline() != "ready\n":
            raise self._failed("did not get ready")

    def go(self) -> None:
        """Give the word."""
        self.say("go")

    def say(self, word: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def result(self, *, seconds: float) -> dict[str, Any]:
        """Return what it answers.

        Raises:
            UnfinishedError: it failed, or did not end in so many seconds.
        """
        try:
            output, _ = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise self._failed(f"not at its end after {seconds:g} s") from None
        if self._process.returncode:
            raise self._failed(f"ended with {self._process.returncode}")
        return dict(json.loads(output))

    def _failed(self, how: str) -> UnfinishedError:
        lines = self._log.read_text(errors="replace").splitlines()
        return UnfinishedError(f"{self._name} {how}: {' | '.join(lines[-5:])}")


@contextmanager
def script(
    module: str, arguments: Sequence[object], *, environment: Mapping[str, str], directory: Path
) -> Iterator[Script]:
    """Start a script and yield it; it is killed if it is still there at the end."""
    log = directory / f"{module}-{uuid4().hex}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=CHECKOUT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        yield Script(process, module, log)
    finally:
        process.kill()
        process.communicate()
