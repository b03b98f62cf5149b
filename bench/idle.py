"""What the relay costs while nothing happens: worker, beat and database, against the database alone."""

import time
from typing import Any

from bench.attempt import attempt
from bench.available import KAFKA_PYTHON, publisher_settings
from bench.celery_processes import beat, worker
from bench.meters import cpu_seconds
from bench.rig import Rig
from bench.sizes import Sizes

SETTLE_SECONDS = 5
"""From the start of beat until counting begins."""

CHILDREN = 2


def idle(rig: Rig, sizes: Sizes) -> dict[str, Any]:
    """Return CPU in percent of one core, with one tick a second."""
    return attempt("idle", lambda: _measure(rig, sizes.idle_seconds))


def _measure(rig: Rig, seconds: int) -> dict[str, Any]:
    with rig.database() as database_url:
        time.sleep(SETTLE_SECONDS)
        alone = _used({"database": rig.postgres.pid}, seconds)
        environment = rig.environment(database_url, rig.new_topic(), **publisher_settings(KAFKA_PYTHON))
        with worker(rig, environment, children=CHILDREN) as worker_pid, beat(rig, environment) as beat_pid:
            time.sleep(SETTLE_SECONDS)
            pids = {"worker": worker_pid, "beat": beat_pid, "database": rig.postgres.pid, "redis": rig.redis.pid}
            percent = _used(pids, seconds)
    return percent | {"database_alone": alone["database"], "together": percent["worker"] + percent["database"]}


def _used(pids: dict[str, int], seconds: int) -> dict[str, float]:
    """Return percent of a core that each process and its descendants used."""
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    started = time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - started
    return {name: 100 * (cpu_seconds(pid) - before[name]) / passed for name, pid in pids.items()}
