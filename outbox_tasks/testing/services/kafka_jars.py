"""The jars of Apache Kafka, fetched by Maven once per user and kept in a cache."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outbox_tasks.testing.services.process import ServerError

KAFKA_VERSION = "4.4.0"
_POM = Path(__file__).with_name("kafka-pom.xml")


def kafka_jars() -> Path:
    """Return the directory of the jars, fetching them at the first call; other processes wait for it.

    Raises:
        ServerError: Maven is missing or could not fetch them.
    """
    jars = _cache_directory() / f"kafka-{KAFKA_VERSION}"
    jars.parent.mkdir(parents=True, exist_ok=True)
    with _locked(jars.with_name(f"{jars.name}.lock")):
        if not jars.exists():
            _fetch(jars)
    return jars


def missing_tools() -> list[str]:
    """Return which of the programs that Apache Kafka needs are not on PATH."""
    return [tool for tool in ("java", "mvn") if shutil.which(tool) is None]


def require_tools() -> None:
    """Raise `ServerError` naming the missing programs, if any."""
    if missing := missing_tools():
        raise ServerError(
            f"Apache Kafka needs {' and '.join(missing)} on PATH: install a Java 17 runtime and Maven "
            "(on Debian: default-jre-headless, maven), or use TansuBroker"
        )


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "outbox-tasks"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The system frees the lock when its holder dies, so that no stale lock can be left.
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(jars: Path) -> None:
    """Fill a temporary directory and rename it, so that a half-filled one never passes for the real one."""
    with tempfile.TemporaryDirectory(dir=jars.parent, ignore_cleanup_errors=True) as unfinished:
        _run_maven(Path(unfinished) / "jars")
        (Path(unfinished) / "jars").rename(jars)


def _run_maven(destination: Path) -> None:
    command = ["mvn", "--quiet", "--batch-mode", "--file", str(_POM), "dependency:copy-dependencies"]
    options = [f"-Dkafka.version={KAFKA_VERSION}", f"-DoutputDirectory={destination}"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServerError(
            f"Maven could not fetch Apache Kafka {KAFKA_VERSION}, check its settings.xml and the network: "
            f"{done.stdout}{done.stderr}"
        )
