"""What ten full partitions cost the relay, against an empty table."""

import statistics
from typing import Any

from bench.available import KAFKA_PYTHON
from bench.backlog import fill_past_days
from bench.names import FAULTS
from bench.relaying import Load, drain_once, relay_on
from bench.rig import Rig
from bench.sizes import Sizes

CHILDREN = 2


def full_days(rig: Rig, sizes: Sizes) -> dict[str, Any]:
    """Return the rates with full days behind, and with none; taken in turn."""
    load = Load(events=sizes.days_events)
    with rig.database() as full:
        fill_past_days(full, days=sizes.days, rows=sizes.day_rows)
        rig.log_statements_of(full)
        rounds = [(_on_empty(rig, load), _on_full(rig, full, load, days=sizes.days)) for _ in range(sizes.days_times)]
    empty, behind = (statistics.median(one["rate"] for one in side) for side in zip(*rounds, strict=True))
    faults = {name: max(one[name] for pair in rounds for one in pair) for name in FAULTS}
    return {"rate": behind, "against_rate": empty, "ratio": behind / empty} | faults


def _on_empty(rig: Rig, load: Load) -> dict[str, Any]:
    return drain_once(rig, load, children=CHILDREN, publisher=KAFKA_PYTHON)


def _on_full(rig: Rig, database_url: str, load: Load, *, days: int) -> dict[str, Any]:
    """Drain where published days lie, which are kept for longer than they are old."""
    keep = {"retention_days": days + 30}
    with relay_on(rig, database_url, children=CHILDREN, publisher=KAFKA_PYTHON, **keep) as at_work:
        return at_work.drain(load) | at_work.judge()
