"""How much is measured: the full run, and a quick one that only shows that everything works."""

from dataclasses import dataclass

KEYS = 1000
PAYLOAD_BYTES = 200
ROW_OVERHEAD_BYTES = 24
"""Of a payload's bytes, those that are not padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Numbers of events, seconds and rounds. The defaults are the full run's."""

    drain_events: int = 100_000
    single_events: int = 2_000
    rounds: int = 3

    latencies: tuple[tuple[int, int], ...] = ((1, 30), (200, 20), (2000, 15))
    """Events a second, and for how many seconds."""

    idle_seconds: int = 30
    append_transactions: int = 1500

    backlog_events: int = 1_000_000
    small_events: int = 10_000
    small_times: int = 5
    key_events: int = 50_000
    key_times: int = 2
    large_events: int = 2_000
    large_bytes: int = 900_000

    snapshot_events: int = 500_000
    snapshot_portion: int = 20_000
    snapshot_edge: int = 100_000
    """So many events at the start are compared with as many at the end."""
    idle_runs: int = 20

    days: int = 10
    day_rows: int = 1_000_000
    days_events: int = 50_000
    days_times: int = 3


FULL = Sizes()

QUICK = Sizes(
    drain_events=10_000,
    single_events=200,
    rounds=1,
    latencies=((1, 5), (200, 5), (2000, 5)),
    idle_seconds=5,
    append_transactions=200,
    backlog_events=40_000,
    small_events=5_000,
    small_times=1,
    key_events=5_000,
    key_times=1,
    large_events=60,
    snapshot_events=20_000,
    snapshot_portion=5_000,
    snapshot_edge=5_000,
    idle_runs=5,
    days=3,
    day_rows=20_000,
    days_events=5_000,
    days_times=1,
)
