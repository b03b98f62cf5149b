"""Holds results against the goals: pure functions from the JSON of a run to lines of a table."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bench import names
from bench.available import CONFLUENT, KAFKA_PYTHON

Results = Mapping[str, Any]

MEMORY_MB = 250
ENOUGH = 0.95
"""Share of the wanted rate that writers have to reach."""
NEAR = 0.05
"""Two ratios that differ by no more are told as one."""
FLAT = 1.1
"""The last quarter's largest size against the second quarter's, at most."""


class Line(NamedTuple):
    """One line of the table of goals, as text."""

    what: str
    measured: str
    ratio: str
    goal: str
    verdict: str


def lines(results: Results) -> list[Line]:
    """Return every line that the results of a run have something to say about."""
    parts = {"drain": _drains, "latency": _latencies, "idle": _idle, "append": _appends, "decay": _decays}
    return [line for name, part in parts.items() if name in results for line in part(results[name])]


def _drains(drain: Results) -> Iterator[Line]:
    raw, naive = names.RAW[KAFKA_PYTHON], names.naive(2)
    one, two = (names.ours(KAFKA_PYTHON, children) for children in (1, 2))
    yield _against(drain, one, raw, at_least=0.7)
    yield _against(drain, two, raw, at_least=1.0)
    yield _against(drain, two, naive, at_least=1.0)
    if names.ours(CONFLUENT, 2) in drain["contenders"]:
        yield _against(drain, names.ours(CONFLUENT, 2), two, at_least=2.2)
    yield _complete(drain["contenders"])


def _against(drain: Results, what: str, other: str, *, at_least: float) -> Line:
    rate, base = (drain["contenders"].get(name, {}).get("rate") for name in (what, other))
    return _faster(f"drain: {what} : {other}", rate, base, at_least=at_least, errors=_errors(drain, what, other))


def _errors(drain: Results, *contenders: str) -> list[str]:
    return [error for name in contenders for error in drain["contenders"].get(name, {}).get("errors", [])]


def _complete(contenders: Results) -> Line:
    """Say whether ours lost or swapped anything, in any round."""
    ours = [figures for name, figures in contenders.items() if name.startswith("outbox_tasks")]
    missing, violations = (sum(figures.get(name, 0) for figures in ours) for name in ("missing", "violations"))
    measured = f"{missing:.0f} missing, {violations:.0f} out of order"
    unfinished = sum(len(figures.get("errors", [])) for figures in ours)
    if unfinished:
        measured += f", {unfinished} drains failed"
    fine = bool(ours) and not (missing or violations or unfinished)
    return Line("drain: all of outbox_tasks, compared with the table", measured, "", "0 and 0", _verdict(fine=fine))


def _latencies(latency: Results) -> Iterator[Line]:
    goals = {1: (("p50_ms", 10),), 200: (("p50_ms", 5), ("p99_ms", 15)), 2000: (("p50_ms", 15), ("p99_ms", 40))}
    for name, figures in latency.items():
        for figure, limit in goals.get(int(name.partition("/")[0]), (("p50_ms", None),)):
            bound = limit if _is_the_goal(name, latency) else None
            yield _milliseconds(f"latency: {name}, {figure[:3]}", figures, figure, at_most=bound)


def _is_the_goal(name: str, latency: Results) -> bool:
    """Say whether a goal is about a scenario: not where it is there for comparison."""
    return "tick only" not in name or name.replace("tick only", "wake") not in latency


def _milliseconds(what: str, figures: Results, name: str, *, at_most: float | None) -> Line:
    if name not in figures:
        return _absent(what, figures, "" if at_most is None else f"≤ {at_most:g} ms")
    value, missing, told = figures[name], figures.get("missing", 0), _achieved(figures)
    measured = f"{value:.1f} ms" + (f", {missing} missing" if missing else "") + told
    goal = "" if at_most is None else f"≤ {at_most:g} ms"
    if missing or at_most is None:  # an event that never came is worse than any that came late
        return Line(what, measured, "", goal, _verdict(fine=False) if missing else "")
    return Line(what, measured, "", goal, "rate not reached" if told else _verdict(fine=value <= at_most))


def _achieved(figures: Results) -> str:
    """Say what rate the writers reached, where it is less than it was to be."""
    rate = figures.get("achieved_rate", figures["rate"])
    return "" if rate >= ENOUGH * figures["rate"] else f", at {rate:,.0f}/s"


def _idle(idle: Results) -> Iterator[Line]:
    what, goal = "idle: worker and database together", "≤ 2 % of a core"
    if "together" not in idle:
        yield _absent(what, idle, goal)
        return
    yield Line(what, f"{idle['together']:.1f} %", "", goal, _verdict(fine=idle["together"] <= 2))
    for name in ("worker", "database", "database_alone", "beat", "redis"):
        yield Line(f"idle: {name.replace('_', ' ')}", f"{idle[name]:.1f} %", "", "", "")


def _appends(append: Results) -> Iterator[Line]:
    if "error" in append:
        yield _absent("append", append, "≤ 1.3 ×")
    for name, figures in append.items():
        if isinstance(figures, Mapping):
            measured = f"{figures['append_ms']:.2f} ms : {figures['by_hand_ms']:.2f} ms" + _means(figures)
            fine = figures["ratio"] <= 1.3
            yield Line(f"append: {name}", measured, f"{figures['ratio']:.2f}", "≤ 1.3 ×", _verdict(fine=fine))


def _means(figures: Results) -> str:
    """Tell the means, where their ratio is not that of the medians."""
    ratio = figures.get("mean_ratio", figures["ratio"])
    if abs(ratio - figures["ratio"]) <= NEAR:
        return ""
    return f" (means {figures['append_mean_ms']:.2f} ms : {figures['by_hand_mean_ms']:.2f} ms, {ratio:.2f})"


def _decays(decay: Results) -> Iterator[Line]:
    bounds = {
        "backlog": ("decay: large backlog : small", 0.9),
        "one key": ("decay: one key : many, 1 child", 0.6),
        "snapshot": ("decay: last events behind an open snapshot : first", 0.8),
        "full days": ("decay: behind full partitions : empty table", 0.9),
    }
    for name, (what, at_least) in bounds.items():
        yield _part(what, decay.get(name, {}), at_least=at_least)
    yield _idle_claim(decay.get("snapshot", {}))
    yield _memory("memory of a child: events of 200 bytes", decay.get("backlog", {}))
    yield _memory("memory of a child: large events", decay.get("large events", {}))


def _part(what: str, figures: Results, *, at_least: float) -> Line:
    if "error" in figures or "rate" not in figures:
        return _absent(what, figures, f"≥ {at_least:g} ×")
    line = _faster(what, figures["rate"], figures["against_rate"], at_least=at_least, errors=[])
    faults = {name: figures.get(name, 0) for name in ("missing", "violations")}
    if not any(faults.values()):
        return line
    told = ", ".join(f"{count} {name}" for name, count in faults.items())
    return line._replace(measured=f"{line.measured}, {told}", verdict=_verdict(fine=False))


def _idle_claim(figures: Results) -> Line:
    what, goal = "decay: idle run behind an open snapshot : before", "< 3 ×"
    if "idle_ratio" not in figures:
        return _absent(what, figures, goal)
    measured = f"{figures['idle_after_ms']:.1f} ms : {figures['idle_before_ms']:.1f} ms"
    return Line(what, measured, f"{figures['idle_ratio']:.2f}", goal, _verdict(fine=figures["idle_ratio"] < 3))


def _memory(what: str, figures: Results) -> Line:
    goal = f"flat, < {MEMORY_MB} MB"
    if "memory" not in figures:
        return _absent(what, figures, goal)
    memory = figures["memory"]
    fine = memory["max_mb"] < MEMORY_MB and memory["growth"] <= FLAT
    measured = f"{memory['max_mb']:.0f} MB, last quarter : second"
    return Line(what, measured, f"{memory['growth']:.2f}", goal, _verdict(fine=fine))


def _faster(what: str, rate: float | None, base: float | None, *, at_least: float, errors: list[str]) -> Line:
    goal = f"≥ {at_least:g} ×"
    if not rate or not base:
        return _absent(what, {"error": errors[0]} if errors else {}, goal)
    measured = f"{rate:,.0f}/s : {base:,.0f}/s" + (f", {len(errors)} failed" if errors else "")
    return Line(what, measured, f"{rate / base:.2f}", goal, _verdict(fine=rate / base >= at_least and not errors))


def _absent(what: str, figures: Results, goal: str) -> Line:
    return Line(
        what, str(figures.get("error", "–"))[:200], "", goal, "FAILED" if "error" in figures else "not measured"
    )


def _verdict(*, fine: bool) -> str:
    return "met" if fine else "MISSED"
