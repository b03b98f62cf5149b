"""A script: times transactions with `append` and with a hand-written INSERT, in blocks, `python -m bench.appending`."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from bench.script import answer, await_go
from bench.shop import PADDING, Order, engine_of
from outbox_tasks import append

BUSINESS = "INSERT INTO bench_order (customer, total) VALUES (%s, %s)"

BY_HAND = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', %s, 'placed', %s)
"""

BY_HAND_IN_A_SESSION = text("""
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', :key, 'placed', :payload)
""")

BLOCK = 50
"""Transactions of one side in a row: what a commit leaves to be done beside meets the same side, not the other."""

SLOWEST = 0.01
"""Share of the transactions that is left out of a mean."""

Transaction = Callable[[int], None]


def main() -> None:
    """Take turns block by block, so that whatever else the machine does meets all alike."""
    parser = argparse.ArgumentParser(prog="python -m bench.appending", description=__doc__)
    parser.add_argument("--database-url", required=True)
    parser.add_argument("--transactions", type=int, required=True)
    parser.add_argument("--wake", action="store_true", help="as a service whose commits wake the relay")
    given = parser.parse_args()
    if given.wake:
        from outbox_tasks.celery import app  # noqa: PLC0415 - without it nothing wakes anybody

        app.finalize()
    with psycopg.connect(given.database_url) as connection:
        pairs = _pairs(connection, engine_of(given.database_url), wake=given.wake)
        for pair in pairs.values():
            _time(pair, times=BLOCK)
        await_go()
        answer({name: _time(pair, times=given.transactions) for name, pair in pairs.items()})


def _time(pair: tuple[Transaction, Transaction], *, times: int) -> dict[str, float]:
    """Return what transactions of each side take: medians and means in milliseconds, and the ratios of both."""
    taken: tuple[list[float], list[float]] = ([], [])
    for first in range(0, times, BLOCK):
        for transaction, milliseconds in zip(pair, taken, strict=True):
            milliseconds += [_milliseconds(transaction, number) for number in range(first, min(times, first + BLOCK))]
    appended, by_hand = map(statistics.median, taken)
    mean_appended, mean_by_hand = map(_trimmed_mean, taken)
    return {
        "append_ms": appended,
        "by_hand_ms": by_hand,
        "ratio": appended / by_hand,
        "append_mean_ms": mean_appended,
        "by_hand_mean_ms": mean_by_hand,
        "mean_ratio": mean_appended / mean_by_hand,
    }


def _milliseconds(transaction: Transaction, number: int) -> float:
    start = time.perf_counter()
    transaction(number)
    return (time.perf_counter() - start) * 1000


def _trimmed_mean(values: Sequence[float]) -> float:
    return statistics.fmean(sorted(values)[: len(values) - int(SLOWEST * len(values))])


def _pairs(
    connection: psycopg.Connection[Any], engine: Engine, *, wake: bool
) -> dict[str, tuple[Transaction, Transaction]]:
    session = (lambda number: _session_append(engine, number), lambda number: _session_by_hand(engine, number))
    if wake:
        return {"Session, wake-up on": session}
    psycopg_ = (lambda number: _append(connection, number), lambda number: _by_hand(connection, number))
    return {"psycopg": psycopg_, "Session": session}


def _payload(number: int) -> dict[str, object]:
    return {"i": number, "pad": PADDING}


def _append(connection: psycopg.Connection[Any], number: int) -> None:
    with connection.transaction():
        connection.execute(BUSINESS, (str(number), number))
        append(
            connection,
            aggregate_type="order",
            aggregate_id=str(number),
            event_type="placed",
            payload=_payload(number),
        )


def _by_hand(connection: psycopg.Connection[Any], number: int) -> None:
    with connection.transaction():
        connection.execute(BUSINESS, (str(number), number))
        connection.execute(BY_HAND, (str(number), json.dumps(_payload(number))))


def _session_append(engine: Engine, number: int) -> None:
    with Session(engine) as session, session.begin():
        session.add(Order(customer=str(number), total=number))
        append(session, aggregate_type="order", aggregate_id=str(number), event_type="placed", payload=_payload(number))


def _session_by_hand(engine: Engine, number: int) -> None:
    with Session(engine) as session, session.begin():
        session.add(Order(customer=str(number), total=number))
        session.flush()
        session.execute(BY_HAND_IN_A_SESSION, {"key": str(number), "payload": json.dumps(_payload(number))})


if __name__ == "__main__":
    main()
