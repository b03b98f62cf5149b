"""How fast a backlog goes out: bare producers, naive relays, and ours, in turn, several times."""

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import psycopg

from bench import naive, names
from bench.attempt import attempt
from bench.available import CONFLUENT, KAFKA_PYTHON, has_confluent, publishers
from bench.backlog import write_backlog
from bench.judge import judge
from bench.meters import Meter, Sampler
from bench.relaying import Load, drain_once
from bench.rig import Rig
from bench.script import Script, script
from bench.sizes import Sizes
from bench.topics import end_of
from bench.waiting import UnfinishedError

BATCH = 500
"""Rows a naive relay locks at a time."""

FINISHED_SECONDS = 600
"""After so long a drain counts as never finished."""

Figures = dict[str, Any]
Contender = Callable[[Rig], Figures]


def drain(rig: Rig, sizes: Sizes) -> Figures:
    """Return the figures of every contender: of each figure the median over the rounds."""
    found: dict[str, list[Figures]] = {}
    for number in range(sizes.rounds):
        for name, contender in _contenders(sizes, first=number == 0).items():
            what = f"drain, round {number + 1}: {name}"
            found.setdefault(name, []).append(attempt(what, partial(contender, rig)))
    return {"contenders": {name: median_of(rounds) for name, rounds in found.items()}}


def median_of(rounds: list[Figures]) -> Figures:
    """Return the median of each number; of faults the worst; the last curve; all rates and errors."""
    done = [figures for figures in rounds if "error" not in figures]
    numbers = {name for figures in done for name, value in figures.items() if isinstance(value, int | float)}
    medians: Figures = {name: statistics.median(figures[name] for figures in done) for name in sorted(numbers)}
    worst = {name: max(figures[name] for figures in done) for name in names.FAULTS if name in numbers}
    return medians | worst | {
        "rates": [figures["rate"] for figures in done],
        "curve": done[-1]["curve"] if done else [],
        "errors": [figures["error"] for figures in rounds if "error" in figures],
    }  # fmt: skip


def _contenders(sizes: Sizes, *, first: bool) -> dict[str, Contender]:
    events = sizes.drain_events
    return (
        {names.RAW[client]: partial(_raw, events=events, client=client) for client in _clients()}
        | {names.naive(n): partial(_naive, events=events, processes=n, batch=BATCH) for n in (1, 2)}
        | (_slow(sizes.single_events) if first else {})
        | {
            names.ours(publisher, children): partial(_ours, events=events, publisher=publisher, children=children)
            for publisher in publishers()
            for children in (1, 2)
        }
    )


def _slow(events: int) -> dict[str, Contender]:
    return {names.one_by_one(n): partial(_naive, events=events, processes=n, batch=1) for n in (1, 2)}


def _clients() -> list[str]:
    return [KAFKA_PYTHON, f"{KAFKA_PYTHON}-defaults", *([CONFLUENT] if has_confluent() else [])]


def _ours(rig: Rig, *, events: int, publisher: str, children: int) -> Figures:
    return per_event(drain_once(rig, Load(events=events), children=children, publisher=publisher), events)


def _raw(rig: Rig, *, events: int, client: str) -> Figures:
    with rig.database() as database_url:
        write_backlog(database_url, events)
        topic = rig.new_topic()
        figures = _scripted(rig, "bench.raw", 1, [*_where(rig, database_url, topic), "--client", client])
        seen = asdict(judge(database_url, rig.broker.bootstrap_servers, topic))
    own = {name: figures[name] for name in ("seconds", "cpu_seconds", "curve")}
    return per_event(_rated(own, events) | seen, events)


def _naive(rig: Rig, *, events: int, processes: int, batch: int) -> Figures:
    with rig.database() as database_url:
        rig.log_statements_of(database_url)
        write_backlog(database_url, events)
        with psycopg.connect(database_url) as connection:
            connection.execute(naive.PREPARE)
        topic = rig.new_topic()
        rig.checkpoint()
        figures = _scripted(rig, "bench.naive", processes, [*_where(rig, database_url, topic), "--batch", batch])
        seen = asdict(judge(database_url, rig.broker.bootstrap_servers, topic))
    if figures["events"] < events:
        raise UnfinishedError(f"it stopped after {figures['events']} of {events} events")
    return per_event(_rated(figures, events) | seen, events)


def _where(rig: Rig, database_url: str, topic: str) -> list[object]:
    return [
        *("--database-url", database_url),
        *("--bootstrap-servers", rig.broker.bootstrap_servers),
        *("--topic", topic),
        *("--warm-topic", rig.new_topic()),
    ]


def _scripted(rig: Rig, module: str, processes: int, arguments: list[object]) -> Figures:
    """Start scripts, let them go at once, and add up what they say."""
    topic, database_url = str(arguments[5]), str(arguments[1])
    environment = rig.environment(database_url, topic)
    with ExitStack() as stack:
        started = [
            stack.enter_context(script(module, arguments, environment=environment, directory=rig.directory))
            for _ in range(processes)
        ]
        for child in started:
            child.await_ready()
        return _measured(rig, database_url, topic, started)


def _measured(rig: Rig, database_url: str, topic: str, scripts: list[Script]) -> Figures:
    with end_of(rig.broker.bootstrap_servers, topic) as end, Sampler(end) as sent:
        meter = Meter(rig, database_url)
        for child in scripts:
            child.go()
        answers = [child.result(seconds=FINISHED_SECONDS) for child in scripts]
        cost = asdict(meter.read())
    return cost | {
        "cpu_seconds": sum(one["cpu_seconds"] for one in answers),
        "seconds": max(one["ended"] for one in answers) - min(one["started"] for one in answers),
        "events": sum(one.get("published", 0) for one in answers),
        "curve": sent.samples,
    }


def _rated(figures: Figures, events: int) -> Figures:
    return figures | {"events": events, "rate": events / figures["seconds"]}


def per_event(figures: Figures, events: int) -> Figures:
    """Add the costs by event: CPU seconds for 100,000 of them, WAL bytes and statements for each."""
    by_event = {
        "cpu_seconds_per_100000": ("cpu_seconds", 100_000),
        "database_cpu_seconds_per_100000": ("database_cpu_seconds", 100_000),
        "wal_bytes_per_event": ("wal_bytes", 1),
        "statements_per_event": ("statements", 1),
    }
    return figures | {name: figures[of] * scale / events for name, (of, scale) in by_event.items() if of in figures}
