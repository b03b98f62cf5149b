"""What contenders and figures are called, in results and in tables."""

from bench.available import CONFLUENT, KAFKA_PYTHON

FAULTS = ("missing", "violations", "duplicates", "kicks")
"""Figures of which the worst round counts."""

RAW = {
    KAFKA_PYTHON: "raw kafka-python",
    f"{KAFKA_PYTHON}-defaults": "raw kafka-python, defaults",
    CONFLUENT: "raw confluent-kafka",
}


def naive(processes: int) -> str:
    """Return the name of the relay that locks rows in batches."""
    return f"rows locked in batches, {_counted(processes, 'process', 'processes')}"


def one_by_one(processes: int) -> str:
    """Return the name of the relay that locks and sends one row at a time."""
    return f"rows locked one by one, {_counted(processes, 'process', 'processes')}"


def ours(publisher: str, children: int) -> str:
    """Return the name of our relay."""
    return f"outbox_tasks, {publisher}, {_counted(children, 'child', 'children')}"


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
