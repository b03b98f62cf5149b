"""Whether the relay gets slower or larger: with the backlog, one key, an old snapshot, full days, large events."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from bench import days, snapshot
from bench.attempt import attempt
from bench.available import KAFKA_PYTHON
from bench.relaying import Load, relay
from bench.rig import Rig
from bench.sizes import Sizes

Figures = dict[str, Any]
Part = Callable[[Rig, Sizes], Figures]


def decay(rig: Rig, sizes: Sizes) -> Figures:
    """Return the figures of every part, by its name."""
    return {name: attempt(f"decay: {name}", partial(part, rig, sizes)) for name, part in PARTS.items()}


def _backlog(rig: Rig, sizes: Sizes) -> Figures:
    """Compare a large backlog with small ones, and watch a child's memory over the large one."""
    with relay(rig, children=2, publisher=KAFKA_PYTHON) as at_work:
        small = [at_work.drain(Load(events=sizes.small_events)) for _ in range(sizes.small_times)]
        large = at_work.drain(Load(events=sizes.backlog_events))
        memory = memory_figures(at_work.memory)
        judged = at_work.judge()
    return judged | compared([large], small) | {"memory": memory, "curve": large["curve"]}


def _one_key(rig: Rig, sizes: Sizes) -> Figures:
    loads = Load(events=sizes.key_events), Load(events=sizes.key_events, keys=1)
    with relay(rig, children=1, publisher=KAFKA_PYTHON) as at_work:
        rounds = [[at_work.drain(load) for load in loads] for _ in range(sizes.key_times)]
        judged = at_work.judge()
    many, one = ([both[place] for both in rounds] for place in (0, 1))
    return judged | compared(one, many)


def _large_events(rig: Rig, sizes: Sizes) -> Figures:
    with relay(rig, children=2, publisher=KAFKA_PYTHON) as at_work:
        figures = at_work.drain(Load(events=sizes.large_events, payload_bytes=sizes.large_bytes))
        memory = memory_figures(at_work.memory)
        judged = at_work.judge()
    return judged | {"rate": figures["rate"], "kicks": figures["kicks"], "memory": memory}


PARTS: dict[str, Part] = {
    "backlog": _backlog,
    "one key": _one_key,
    "snapshot": snapshot.snapshot,
    "full days": days.full_days,
    "large events": _large_events,
}


def memory_figures(samples: list[tuple[float, float]]) -> Figures:
    """Return the largest size of a child in megabytes, and that of the last quarter against that of the second."""
    megabytes = [value / 1_000_000 for _, value in samples]
    quarter = max(1, len(megabytes) // 4)
    second, last = max(megabytes[quarter : 2 * quarter] or megabytes), max(megabytes[-quarter:])
    return {"max_mb": max(megabytes), "second_quarter_mb": second, "last_quarter_mb": last, "growth": last / second}


def compared(drains: list[Figures], against: list[Figures]) -> Figures:
    """Return the median rate of some drains, that of others, and their ratio."""
    rate, usual = (statistics.median(one["rate"] for one in side) for side in (drains, against))
    return {"rate": rate, "against_rate": usual, "ratio": rate / usual} | {
        "kicks": sum(one["kicks"] for one in [*drains, *against])
    }
