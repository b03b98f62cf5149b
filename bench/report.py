"""Tables from the JSON of a run: on a terminal with rich, or as Markdown."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench import names
from bench.available import KAFKA_PYTHON
from bench.goals import lines

Results = Mapping[str, Any]


class Sheet(NamedTuple):
    """A table: the first column is text, the others are aligned to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def sheets(results: Results) -> list[Sheet]:
    """Return the tables of a run."""
    found = [Sheet("Goals", ("", "measured", "ratio", "goal", "verdict"), lines(results))]
    if "drain" in results:
        found.append(_drain(results["drain"]["contenders"]))
    if "latency" in results:
        found.append(_latency(results["latency"]))
    return found


def machine_line(results: Results) -> str:
    """Return what was measured on, in one line."""
    machine = results.get("machine", {})
    return "; ".join(f"{name} {value}" for name, value in machine.items())


def print_on_terminal(results: Results, console: Console) -> None:
    """Print all tables."""
    for sheet in sheets(results):
        table = Table(title=sheet.title, box=None, title_justify="left", pad_edge=False)
        for place, column in enumerate(sheet.columns):
            table.add_column(column, justify="right" if place else "left", overflow="fold")
        for row in sheet.rows:
            table.add_row(*row, style="bold red" if row[-1] in ("MISSED", "FAILED") else None)
        console.print(table)
        console.print()
    console.print(machine_line(results), style="dim", highlight=False)


def markdown(results: Results) -> str:
    """Return all tables as Markdown."""
    return "\n\n".join([*map(_markdown_of, sheets(results)), machine_line(results)])


def _markdown_of(sheet: Sheet) -> str:
    head = [sheet.columns, ["---", *("---:" for _ in sheet.columns[1:])]]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [*head, *sheet.rows]]
    return "\n".join([f"### {sheet.title}", "", *rows])


def _drain(contenders: Results) -> Sheet:
    base = contenders.get(names.RAW[KAFKA_PYTHON], {}).get("rate")
    columns = (
        *("", "events/s", "× raw kafka-python", "CPU s / 100,000", "database CPU s / 100,000", "WAL bytes / event"),
        *("statements / event", "out of order", "missing", "duplicates", "rounds failed"),
    )
    return Sheet("Drain", columns, [_contender(name, figures, base) for name, figures in contenders.items()])


def _contender(name: str, figures: Results, base: float | None) -> list[str]:
    rate = figures.get("rate")
    return [
        name,
        _number(rate, "{:,.0f}"),
        _number(rate / base if rate and base else None, "{:.2f}"),
        _number(figures.get("cpu_seconds_per_100000"), "{:.1f}"),
        _number(figures.get("database_cpu_seconds_per_100000"), "{:.1f}"),
        _number(figures.get("wal_bytes_per_event"), "{:,.0f}"),
        _number(figures.get("statements_per_event"), "{:.3f}"),
        *(_number(figures.get(fault), "{:,.0f}") for fault in ("violations", "missing", "duplicates")),
        str(len(figures.get("errors", []))),
    ]


_LATENCY: dict[str, Callable[[Results], str]] = {
    "p50 ms": lambda figures: _number(figures.get("p50_ms"), "{:.1f}"),
    "p99 ms": lambda figures: _number(figures.get("p99_ms"), "{:.1f}"),
    "max ms": lambda figures: _number(figures.get("max_ms"), "{:.0f}"),
    "events": lambda figures: _number(figures.get("events"), "{:,.0f}"),
    "missing": lambda figures: _number(figures.get("missing"), "{:,.0f}"),
    "written/s": lambda figures: _number(figures.get("achieved_rate"), "{:,.0f}"),
    "events / transaction": lambda figures: _number(figures.get("events_per_transaction"), "{:.0f}"),
    "worker CPU s": lambda figures: _number(figures.get("worker_cpu_seconds"), "{:.1f}"),
    "database CPU s": lambda figures: _number(figures.get("database_cpu_seconds"), "{:.1f}"),
}


def _latency(scenarios: Results) -> Sheet:
    rows = [[name, *(cell(figures) for cell in _LATENCY.values())] for name, figures in scenarios.items()]
    return Sheet("Commit to consumer", ("", *_LATENCY), rows)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
