"""Nothing outlives its parent: each child has a guard that ends it when the parent is gone."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# The guard reads one pipe. The child writes its own process id there before it becomes the server, so there
# is no moment at which a killed parent leaves a child unknown to the guard. After that the parent alone
# holds the other end: a word from it means the server has ended, end-of-file means the parent died.
# (PR_SET_PDEATHSIG would end the server with the *thread* that started it, and spares its descendants.)
_GUARD = 'read -r server || exit 0; read -r _ && exit 0; kill -s "$1" "$server"; kill -s CONT "$server"'
_SERVER = 'echo $$ >&0; exec "$@" </dev/null'


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a server is started."""

    command: Sequence[str]
    directory: Path
    log: Path
    user: int | None = None
    """The user id it runs as; None keeps the parent's."""
    environment: Mapping[str, str] | None = None
    orphan_signal: signal.Signals = signal.SIGKILL
    """Sent by the guard when the parent is gone."""


class GuardedProcess:
    """A server process with its guard, both in sessions of their own: Ctrl-C reaches the parent alone."""

    def __init__(self, launch: Launch) -> None:
        reading, self._word = os.pipe()
        try:
            self._guard = _start_guard(reading, launch.orphan_signal)
            self.server = _start_server(self._word, launch)
        except BaseException:
            os.close(self._word)
            raise
        finally:
            os.close(reading)

    def dismiss(self) -> None:
        """Collect the ended server and let its guard go."""
        self.server.wait()
        try:
            os.write(self._word, b"ended\n")
        finally:
            os.close(self._word)
        self._guard.wait()


def _start_guard(reading: int, orphan_signal: signal.Signals) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        ["sh", "-c", _GUARD, "guard", orphan_signal.name.removeprefix("SIG")],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _start_server(word: int, launch: Launch) -> "subprocess.Popen[bytes]":
    with launch.log.open("ab") as log:
        return subprocess.Popen(
            ["sh", "-c", _SERVER, "server", *launch.command],
            stdin=word,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=launch.directory,
            env=launch.environment,
            user=launch.user,
            start_new_session=True,
        )
