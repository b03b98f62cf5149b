"""Runs the measurements on fresh servers and prints them as ratios: `python -m bench [--events N] [--broker …]`."""

import argparse
import json
import os

from rich.console import Console
from rich.table import Table

from bench.drain import bare_producer, relay
from bench.latency import latency
from bench.rig import rig


def main() -> None:
    """Measure, print, and write JSON if a file is named."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--events", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--broker", choices=("kafka", "tansu"), default="kafka")
    parser.add_argument("--json", dest="path", help="write the figures to this file")
    given = parser.parse_args()
    os.environ.pop("CELERY_BROKER_URL", None)  # Celery puts it before what the rig says
    with rig(kafka=given.broker == "kafka") as servers:
        drains = [
            {
                "bare kafka-python producer": bare_producer(servers, given.events),
                "relay, 1 child": relay(servers, given.events, children=1),
                "relay, 2 children": relay(servers, given.events, children=2),
            }
            for _ in range(given.rounds)
        ]
        p50, p99 = latency(servers, rate=100, seconds=15)
    figures = {name: sorted(drain[name] for drain in drains)[len(drains) // 2] for name in drains[0]}
    table = Table("drain", "events/s", "ratio", box=None)
    for name, figure in figures.items():
        table.add_row(name, f"{figure:,.0f}", f"{figure / figures['bare kafka-python producer']:.2f}")
    Console().print(table)
    Console().print(f"commit to consumer at 100/s: p50 {p50:.0f} ms, p99 {p99:.0f} ms")
    if given.path:
        with open(given.path, "w") as file:  # noqa: PTH123
            json.dump({"drain": drains, "latency_ms": {"p50": p50, "p99": p99}}, file, indent=2)


if __name__ == "__main__":
    main()
