"""A script: a service that commits orders and their events at a steady rate, `python -m bench.writer`.

It answers with the moment of each commit, by event id. With `--wake` it imports the Celery app, as a service would
whose commits wake the relay.
"""

import argparse
import time
from collections.abc import Iterator

from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from bench.script import answer, await_go
from bench.shop import PADDING, Order, engine_of
from bench.sizes import KEYS
from outbox_tasks import NewEvent, append_all

PAUSE_SECONDS = 1.0
"""Between warming up and what counts."""

LATE = 1.25
"""A writer that cannot keep up stops after so many times the time it should take."""


def main() -> None:
    """Warm up, write, and tell what was committed when."""
    given = _parser().parse_args()
    committed = _note_commits(wake=given.wake)
    engine = engine_of(given.database_url)
    with Session(engine) as session:  # connects
        session.connection()
    await_go()
    _write(engine, events=given.warm, rate=given.warm_rate, given=given)
    time.sleep(PAUSE_SECONDS)
    warm = len(committed)
    committed.clear()
    started = time.monotonic()
    _write(engine, events=given.events, rate=given.rate, given=given)
    answer({"warm": warm, "committed": committed, "rate": len(committed) / (time.monotonic() - started)})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.writer", description=__doc__)
    parser.add_argument("--database-url", required=True)
    parser.add_argument("--name", required=True, help="part of the keys, which writers do not share")
    for name in ("--events", "--warm"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--rate", "--warm-rate"):
        parser.add_argument(name, type=float, required=True, help="events a second")
    parser.add_argument("--per-transaction", type=int, default=1)
    parser.add_argument("--wake", action="store_true")
    return parser


def _note_commits(*, wake: bool) -> dict[str, float]:
    """Note the moment after each COMMIT, before any other listener: the one that wakes the relay comes later."""
    committed: dict[str, float] = {}
    if wake:
        from outbox_tasks.celery import app  # noqa: PLC0415 - without it nothing wakes anybody

        app.finalize()

    def note(session: Session) -> None:
        committed.update(dict.fromkeys(session.info.pop("event_ids", ()), time.time()))

    event.listen(Session, "after_commit", note, insert=True)
    return committed


def _write(engine: Engine, *, events: int, rate: float, given: argparse.Namespace) -> None:
    start = time.monotonic()
    for first in range(0, events, given.per_transaction):
        if time.monotonic() - start > LATE * events / rate:
            return
        time.sleep(max(0.0, start + first / rate - time.monotonic()))
        _commit(engine, given.name, range(first, min(events, first + given.per_transaction)))


def _commit(engine: Engine, name: str, numbers: range) -> None:
    with Session(engine) as session:
        session.add(Order(customer=name, total=numbers.start))
        session.info["event_ids"] = [str(event_id) for event_id in append_all(session, _events(name, numbers))]
        session.commit()


def _events(name: str, numbers: range) -> Iterator[NewEvent]:
    for number in numbers:
        yield NewEvent(
            aggregate_type="order",
            aggregate_id=f"{name}-{number % KEYS}",
            event_type="placed",
            payload={"i": number, "pad": PADDING},
        )


if __name__ == "__main__":
    main()
