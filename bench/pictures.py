"""Pictures of a run: how latencies are distributed, and how backlogs go out over time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Results = Mapping[str, Any]

SIZE = (9, 5)

STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "outbox_tasks",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
"""Text stays text, and the same figures give the same file."""


def draw(results: Results, directory: Path) -> list[Path]:
    """Write a picture of what there is; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    with mpl.rc_context(STYLE):
        if any("sample_ms" in figures for figures in results.get("latency", {}).values()):
            drawn.append(_save(_latency(results["latency"]), directory / "latency.svg"))
        if any(figures.get("curve") for figures in results.get("drain", {}).get("contenders", {}).values()):
            drawn.append(_save(_drain(results["drain"]["contenders"]), directory / "drain.svg"))
    return drawn


def _latency(scenarios: Results) -> Figure:
    figure, axes = _axes("From commit to consumer", "milliseconds", "share of events that were faster")
    for name, figures in scenarios.items():
        if sample := figures.get("sample_ms"):
            # Clocks of one machine, read by two processes: nothing is faster than they can tell.
            ages = [max(0.1, age) for age in sample]
            axes.plot(ages, [place / (len(ages) - 1) for place in range(len(ages))], label=name, linewidth=1.3)
    axes.set_xscale("log")
    axes.axhline(0.5, color="grey", linewidth=0.6, linestyle=":")
    axes.axhline(0.99, color="grey", linewidth=0.6, linestyle=":")
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    return figure


def _drain(contenders: Results) -> Figure:
    figure, axes = _axes("A backlog going out", "seconds", "records in Kafka")
    for name, figures in contenders.items():
        if curve := _until_full(figures.get("curve", [])):
            ours = name.startswith("outbox_tasks")
            axes.plot(
                *zip(*curve, strict=True), label=name, linewidth=1.8 if ours else 1, linestyle="-" if ours else "--"
            )
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def _until_full(curve: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leave out the samples after the last record."""
    full = max((value for _, value in curve), default=0.0)
    end = next((place for place, (_, value) in enumerate(curve) if value == full), -1)
    return curve[: end + 1]


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, metadata={"Date": None})
    return path
