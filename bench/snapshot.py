"""What a snapshot that is held open costs, while events pass: no dead row or index entry can be cleaned up."""

import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg

from bench.available import KAFKA_PYTHON, publisher_settings
from bench.relaying import Load, Relay, relay
from bench.rig import Rig
from bench.sizes import Sizes
from outbox_tasks.relay.dispatch import dispatch
from outbox_tasks.runtime import Runtime, StopFlag
from outbox_tasks.settings import Settings

CHILDREN = 2


def snapshot(rig: Rig, sizes: Sizes) -> dict[str, Any]:
    """Return the rates of the first and the last events, and the times of an idle run before and after."""
    with relay(rig, children=CHILDREN, publisher=KAFKA_PYTHON) as at_work, _held(at_work.database_url):
        idle_before = _idle_ms(at_work, sizes.idle_runs)
        portions = [at_work.drain(Load(events=sizes.snapshot_portion)) for _ in range(_portions(sizes))]
        idle_after = _idle_ms(at_work, sizes.idle_runs)
        judged = at_work.judge()
    rates = [portion["rate"] for portion in portions]
    edge = max(1, sizes.snapshot_edge // sizes.snapshot_portion)
    first, last = statistics.harmonic_mean(rates[:edge]), statistics.harmonic_mean(rates[-edge:])
    return judged | {
        "rate": last,
        "against_rate": first,
        "ratio": last / first,
        "rates": rates,
        "kicks": sum(portion["kicks"] for portion in portions),
        "idle_before_ms": idle_before,
        "idle_after_ms": idle_after,
        "idle_ratio": idle_after / idle_before,
    }


def _portions(sizes: Sizes) -> int:
    return sizes.snapshot_events // sizes.snapshot_portion


@contextmanager
def _held(database_url: str) -> Iterator[None]:
    """Hold a snapshot, as pg_dump or an analyst does."""
    with psycopg.connect(database_url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM outbox")
        yield
        connection.rollback()


def _idle_ms(at_work: Relay, times: int) -> float:
    """Return the median milliseconds of a dispatch run that finds nothing."""
    settings = Settings(
        database_url=at_work.database_url,
        bootstrap_servers=at_work.rig.broker.bootstrap_servers,
        routes={"order": at_work.topic},
        **publisher_settings(KAFKA_PYTHON),
    )
    with closing(Runtime(settings, stopping=StopFlag())) as runtime:
        runtime.run(dispatch, task="outbox.dispatch", owner="bench")  # connects
        return statistics.median(_run_ms(runtime) for _ in range(times))


def _run_ms(runtime: Runtime) -> float:
    started = time.perf_counter()
    runtime.run(dispatch, task="outbox.dispatch", owner="bench")
    return (time.perf_counter() - started) * 1000
