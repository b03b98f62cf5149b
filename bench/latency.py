"""How long an event takes from its commit to a consumer, at several rates."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from bench.attempt import attempt
from bench.available import publisher_settings
from bench.celery_processes import beat, worker
from bench.meters import Meter
from bench.rig import Rig
from bench.scenarios import WARM_SECONDS, Scenario, Woken, Writer, scenarios
from bench.script import Script, script
from bench.shop import create_tables
from bench.sizes import Sizes
from outbox_tasks.settings import Settings
from outbox_tasks.store.connection import connect
from outbox_tasks.upkeep.notifications import switch

CHILDREN = 2
SAMPLES = 500
"""Latencies kept for the picture, evenly from the sorted ones."""

Figures = dict[str, Any]


def latency(rig: Rig, sizes: Sizes) -> Figures:
    """Return the figures of every scenario, by its name."""
    return {
        scenario.name: attempt(f"latency: {scenario.name}", partial(measure, rig, scenario))
        for scenario in scenarios(sizes)
    }


def measure(rig: Rig, scenario: Scenario) -> Figures:
    """Return how old events were when a consumer had them."""
    with rig.database() as database_url:
        notified = scenario.woken is Woken.BY_NOTIFICATIONS
        _prepare(database_url, notified=notified)
        topic = rig.new_topic()
        environment = rig.environment(database_url, topic, listen=notified, **publisher_settings(scenario.publisher))
        with (
            worker(rig, environment, children=CHILDREN) as pid,
            beat(rig, environment),
            _consuming(rig, environment, topic) as consumer,
            _writing(rig, environment, database_url, scenario) as writers,
        ):
            meter = Meter(rig, database_url, pids=[pid])
            written, arrived = _run(consumer, writers, scenario)
            cost = meter.read()
    return _figures(scenario, written, arrived) | {
        "worker_cpu_seconds": cost.cpu_seconds,
        "database_cpu_seconds": cost.database_cpu_seconds,
    }


def _prepare(database_url: str, *, notified: bool) -> None:
    """Make the service's tables, and what `outbox notify on` makes."""
    create_tables(database_url)
    if notified:
        settings = Settings(database_url=database_url)
        with connect(settings) as connection:
            switch(connection, settings, on=True)


@contextmanager
def _consuming(rig: Rig, environment: dict[str, str], topic: str) -> Iterator[Script]:
    where = ["--bootstrap-servers", rig.broker.bootstrap_servers, "--topic", topic]
    with script("bench.consumer", where, environment=environment, directory=rig.directory) as consumer:
        consumer.await_ready()
        yield consumer


@contextmanager
def _writing(rig: Rig, environment: dict[str, str], database_url: str, scenario: Scenario) -> Iterator[list[Script]]:
    with ExitStack() as stack:
        writers = [
            stack.enter_context(script(module, arguments, environment=environment, directory=rig.directory))
            for module, arguments in _writers(rig, database_url, scenario)
        ]
        for writer in writers:
            writer.await_ready()
        yield writers


def _writers(rig: Rig, database_url: str, scenario: Scenario) -> Iterator[tuple[str, list[object]]]:
    """Yield the scripts that write, with their arguments."""
    if scenario.writer is Writer.PGBENCH:
        yield "bench.pgbench", _pgbench_arguments(rig, database_url, scenario)
        return
    for number in range(scenario.writers):
        yield "bench.writer", _session_arguments(database_url, scenario, number)


def _pgbench_arguments(rig: Rig, database_url: str, scenario: Scenario) -> list[object]:
    return [
        *("--program", rig.postgres.program("pgbench")),
        *("--database-url", database_url),
        *("--rate", scenario.rate),
        *("--clients", scenario.writers),
        *("--seconds", scenario.seconds),
        *("--warm-seconds", WARM_SECONDS),
    ]


def _session_arguments(database_url: str, scenario: Scenario, number: int) -> list[object]:
    return [
        *("--database-url", database_url),
        *("--name", f"w{number}"),
        *("--events", scenario.events),
        *("--rate", scenario.rate / scenario.writers),
        *("--warm", scenario.warm),
        *("--warm-rate", scenario.warm_rate),
        *("--per-transaction", scenario.per_transaction),
        *(["--wake"] if scenario.woken is Woken.BY_COMMITS else []),
    ]


def _run(consumer: Script, writers: Sequence[Script], scenario: Scenario) -> tuple[list[Figures], dict[str, float]]:
    for process in (consumer, *writers):
        process.go()
    written = [writer.result(seconds=2 * scenario.seconds + 60) for writer in writers]
    consumer.say(str(sum(writer["warm"] + len(writer["committed"]) for writer in written)))
    return written, consumer.result(seconds=120)


def _figures(scenario: Scenario, written: Iterable[Figures], arrived: dict[str, float]) -> Figures:
    committed: dict[str, float] = {}
    achieved = 0.0
    for writer in written:
        committed |= writer["committed"]
        achieved += writer["rate"]
    ages = sorted((arrived[event] - at) * 1000 for event, at in committed.items() if event in arrived)
    return _scenario_figures(scenario) | {
        "achieved_rate": achieved,
        "events": len(committed),
        "missing": len(committed) - len(ages),
        **{name: percentile(ages, share) for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99), ("max_ms", 1.0))},
        "sample_ms": [round(percentile(ages, place / SAMPLES), 2) for place in range(SAMPLES + 1)],
    }


def _scenario_figures(scenario: Scenario) -> Figures:
    return {
        "rate": scenario.rate,
        "seconds": scenario.seconds,
        "woken": scenario.woken,
        "publisher": scenario.publisher,
        "writer": scenario.writer,
        "writers": scenario.writers,
        "events_per_transaction": scenario.per_transaction,
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value that this share of sorted values does not exceed.

    Raises:
        ValueError: there are no values.
    """
    if not ordered:
        raise ValueError("no event that was committed came to the consumer")
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
