"""Measures on fresh servers: `python -m bench [drain latency idle append decay] [--quick]`, or `report FILE.json`."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.append import append
from bench.attempt import attempt
from bench.decay import decay
from bench.drain import drain
from bench.idle import idle
from bench.latency import latency
from bench.report import markdown, print_on_terminal
from bench.results import LATEST, describe, load, save
from bench.rig import Rig, rig
from bench.sizes import FULL, QUICK, Sizes

MEASUREMENTS: dict[str, Callable[[Rig, Sizes], dict[str, Any]]] = {
    "drain": drain,
    "latency": latency,
    "idle": idle,
    "append": append,
    "decay": decay,
}

ALL = "all"
REPORT = "report"


def main() -> None:
    """Measure what is asked for, or show the results of an earlier run."""
    words = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    if words[:1] == [REPORT]:
        _report(words[1:])
        return
    parser = _parser()
    given = parser.parse_args(words)
    unknown = set(given.names) - MEASUREMENTS.keys() - {ALL}
    if unknown:
        parser.error(f"no such measurement: {', '.join(sorted(unknown))}; there are {', '.join(MEASUREMENTS)}")
    results = _measure(given)
    _show(results, given.pictures)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help="measurements; without any, all")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it works, not how fast it is")
    parser.add_argument("--events", type=int, help="size of the backlog to drain")
    parser.add_argument("--rounds", type=int, help="how often each contender drains it")
    parser.add_argument("--json", type=Path, default=LATEST, help="where the figures go (default: %(default)s)")
    parser.add_argument("--pictures", type=Path, help="directory where pictures go; needs matplotlib")
    return parser


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    """Run the measurements one after the other; what has been found is kept after each."""
    sizes = _sizes(given)
    chosen = [name for name in MEASUREMENTS if name in given.names or not given.names or ALL in given.names]
    with rig() as servers:
        results = describe(servers) | {"sizes": asdict(sizes)}
        for name in chosen:
            results[name] = MEASUREMENTS[name](servers, sizes)
            save(results, given.json)
    return results


def _sizes(given: argparse.Namespace) -> Sizes:
    sizes = QUICK if given.quick else FULL
    if given.events:
        sizes = replace(sizes, drain_events=given.events)
    if given.rounds:
        sizes = replace(sizes, rounds=given.rounds)
    return sizes


def _report(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m bench {REPORT}", description="Print results as Markdown.")
    parser.add_argument("file", type=Path, nargs="?", default=LATEST)
    parser.add_argument("--pictures", type=Path, help="directory where pictures go; needs matplotlib")
    given = parser.parse_args(words)
    results = load(given.file)
    sys.stdout.write(markdown(results) + "\n")
    _draw(results, given.pictures)


def _show(results: dict[str, Any], pictures: Path | None) -> None:
    print_on_terminal(results, Console(width=None if sys.stdout.isatty() else 200))
    _draw(results, pictures)


def _draw(results: dict[str, Any], directory: Path | None) -> None:
    if directory is not None:
        from bench.pictures import draw  # noqa: PLC0415 - matplotlib is only needed here

        attempt("pictures", lambda: {"files": draw(results, directory)})


if __name__ == "__main__":
    main()
