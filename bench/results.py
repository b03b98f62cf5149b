"""The results of a run: what they were taken on, and where they are kept."""

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import psycopg

from bench.available import publishers
from bench.rig import Rig
from outbox_tasks.testing.services.kafka_jars import KAFKA_VERSION

LATEST = Path(__file__).parent / "results" / "latest.json"

PACKAGES = ("outbox-tasks", "celery", "kafka-python", "confluent-kafka", "psycopg", "SQLAlchemy")


def describe(rig: Rig) -> dict[str, Any]:
    """Return what the bench runs on: figures of two machines are not to be compared, ratios may be."""
    return {
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "CPU": f"{_cpu()}, {os.cpu_count()} cores",
            "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
            "Python": platform.python_version(),
            "PostgreSQL": _postgres_version(rig),
            "Apache Kafka": KAFKA_VERSION,
        }
        | {name: found for name in PACKAGES if (found := _version(name))},
        "publishers": publishers(),
    }


def save(results: Mapping[str, Any], path: Path) -> None:
    """Write the results, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(json.dumps(results, indent=1, default=str))
    draft.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Read the results of a run."""
    return dict(json.loads(path.read_text()))


def _cpu() -> str:
    """Return the name of the processor, where the system tells it."""
    source = Path("/proc/cpuinfo")
    lines = source.read_text().splitlines() if source.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _postgres_version(rig: Rig) -> str:
    with psycopg.connect(rig.postgres.url()) as connection:
        row = connection.execute("SHOW server_version").fetchone()
    return str(row[0]) if row else ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
