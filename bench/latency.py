"""How long an event takes from its commit to a consumer, at several rates."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.attempt import attempt
from bench.available import KAFKA_PYTHON, has_wake, publisher_settings, publishers
from bench.celery_processes import beat, worker
from bench.goals import ENOUGH
from bench.meters import Meter
from bench.rig import Rig
from bench.script import Script, script
from bench.shop import create_tables
from bench.sizes import Sizes

CHILDREN = 2
WRITERS_FROM = 1000
"""Events a second from which on four processes write."""
MANY_WRITERS = 4
EVENTS_PER_TRANSACTION = 5
"""Where the machine cannot commit as often as it should."""
SAMPLES = 500
"""Latencies kept for the picture, evenly from the sorted ones."""
WARM_SECONDS = 3
WARM_RATE = 50

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is written how fast, and what publishes it."""

    rate: int
    seconds: int
    publisher: str = KAFKA_PYTHON
    wake: bool
    per_transaction: int = 1

    @property
    def name(self) -> str:
        """What tables call it."""
        publisher = "" if self.publisher == KAFKA_PYTHON else f", {self.publisher}"
        return f"{self.rate}/s, {'wake' if self.wake else 'tick only'}{publisher}"

    @property
    def writers(self) -> int:
        """How many processes write."""
        return MANY_WRITERS if self.rate >= WRITERS_FROM else 1

    @property
    def events(self) -> int:
        """How many events count, of each writer."""
        return self.rate * self.seconds // self.writers

    @property
    def warm_rate(self) -> int:
        """How many events a second are written before, by each writer."""
        return max(self.rate, WARM_RATE) // self.writers

    @property
    def warm(self) -> int:
        """How many events are written before, by each writer."""
        return self.warm_rate * WARM_SECONDS


def latency(rig: Rig, sizes: Sizes) -> Figures:
    """Return the figures of every scenario, by its name."""
    found: Figures = {}
    for scenario in _scenarios(sizes):
        figures = attempt(f"latency: {scenario.name}", partial(measure, rig, scenario))
        achieved = figures.get("achieved_rate", scenario.rate)
        if scenario.rate >= WRITERS_FROM and achieved < ENOUGH * scenario.rate:
            found[f"{scenario.name}, a transaction each"] = figures
            fewer = replace(scenario, per_transaction=EVENTS_PER_TRANSACTION)
            what = f"latency: {scenario.name}, {EVENTS_PER_TRANSACTION} events a transaction"
            figures = attempt(what, partial(measure, rig, fewer))
        found[scenario.name] = figures
    return found


def _scenarios(sizes: Sizes) -> Iterator[Scenario]:
    for rate, seconds in sizes.latencies:
        yield Scenario(rate=rate, seconds=seconds, wake=has_wake())
        if rate == 200 and has_wake():
            yield Scenario(rate=rate, seconds=seconds, wake=False)
    for publisher in publishers():
        if publisher != KAFKA_PYTHON:
            yield from (
                Scenario(rate=rate, seconds=seconds, wake=has_wake(), publisher=publisher)
                for rate, seconds in sizes.latencies
                if rate > 1
            )


def measure(rig: Rig, scenario: Scenario) -> Figures:
    """Return how old events were when a consumer had them."""
    with rig.database() as database_url:
        create_tables(database_url)
        topic = rig.new_topic()
        environment = rig.environment(database_url, topic, **publisher_settings(scenario.publisher))
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
            stack.enter_context(
                script(
                    "bench.writer",
                    _writer_arguments(database_url, scenario, number),
                    environment=environment,
                    directory=rig.directory,
                )
            )
            for number in range(scenario.writers)
        ]
        for writer in writers:
            writer.await_ready()
        yield writers


def _writer_arguments(database_url: str, scenario: Scenario, number: int) -> list[object]:
    return [
        *("--database-url", database_url),
        *("--name", f"w{number}"),
        *("--events", scenario.events),
        *("--rate", scenario.rate / scenario.writers),
        *("--warm", scenario.warm),
        *("--warm-rate", scenario.warm_rate),
        *("--per-transaction", scenario.per_transaction),
        *(["--wake"] if scenario.wake else []),
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
        "wake": scenario.wake,
        "publisher": scenario.publisher,
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
