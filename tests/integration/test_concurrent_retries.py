"""Dispatch and retries at once on the same keys: nobody publishes what is another's, and nothing falls in between."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from uuid import uuid4

import psycopg
import pytest
from support.judging import judge
from support.misfortune import Draft, put, rounds
from support.relaying import assert_consistent, relay, relay_settings, rows
from support.waiting import until
from support.writers import Written

from outbox_tasks.ports import Ports
from outbox_tasks.relay.dispatch import dispatch
from outbox_tasks.relay.result import Result
from outbox_tasks.relay.retry import retry
from outbox_tasks.settings import Settings
from outbox_tasks.testing.services import Broker

Loop = Callable[[Ports], Result]

KEYS, ROUNDS, EVENTS = 40, 4, 2000
CHUNK = 100
"""Events a transaction writes, so that there is always something new behind what is being retried."""
LIMIT = 5_000
EVERY_BAD = 37
"""One event in so many is too big: no divisor of the number of keys, so that every key has some."""

_BLOCKED = "SELECT count(*) AS number FROM outbox_blocked_key"
_UNPUBLISHED = "SELECT count(*) AS number FROM outbox WHERE state <> 'published'"
_BROKEN = "SELECT event_id FROM outbox WHERE state = 'held' AND headers ? 'padding'"
_STRAYS = """
SELECT o.id, o.ordering_key FROM outbox AS o
 WHERE o.state = 'held' AND NOT EXISTS (SELECT FROM outbox_blocked_key AS b WHERE b.ordering_key = o.ordering_key)
"""


@pytest.fixture(autouse=True)
def consistent_at_the_end(database_url: str) -> Iterator[None]:
    """Look, after every test, that what must always hold does: no event is held without a blocked key, say."""
    yield
    assert_consistent(database_url)


@pytest.fixture
def settings(database_url: str, broker: Broker) -> Settings:
    """Work in batches of a few events, and try blocked keys again at once, without end."""
    return relay_settings(
        database_url,
        broker,
        batch_size=64,
        shards_per_run=16,
        retry_base_seconds=0.01,
        retry_max_seconds=0.02,
        retry_attempts=1_000_000,
    )


def drafts_of(number: int) -> list[Draft]:
    """Return the drafts of a round."""
    each = EVENTS // KEYS
    return [
        replace(draft, padding=2 * LIMIT) if place % EVERY_BAD == 0 else draft
        for place, draft in enumerate(rounds(keys=KEYS, events=EVENTS, start=1 + number * each))
    ]


def write(database_url: str, topic: str, drafts: list[Draft]) -> list[Written]:
    """Write drafts chunk by chunk, each committed on its own."""
    chunks = [drafts[start : start + CHUNK] for start in range(0, len(drafts), CHUNK)]
    return [event for chunk in chunks for event in put(database_url, topic, chunk)]


def repair(database_url: str) -> None:
    """Make held events small enough, one after the other: who locked many at once might be in the relay's way."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        for (event_id,) in connection.execute(_BROKEN).fetchall():
            connection.execute("UPDATE outbox SET headers = '{}' WHERE event_id = %s", (event_id,))


def number_of(database_url: str, query: str) -> int:
    """Return what a query counts; on the way, see that at this moment no event is held without a blocked key."""
    assert rows(database_url, _STRAYS) == []
    return int(rows(database_url, query)[0]["number"])


def is_published_once_repaired(database_url: str) -> bool:
    """Repair what is held by now, and say whether everything is published."""
    repair(database_url)
    return number_of(database_url, _UNPUBLISHED) == 0


@contextmanager
def at_work(settings: Settings, *loops: Loop) -> Iterator[None]:
    """Run loops again and again, each in a thread with a connection and a publisher of its own, until the end."""
    stop = Event()

    def work(loop: Loop, owner: str) -> None:
        with relay(settings, owner=owner, stopping=stop.is_set) as ports:
            while not stop.wait(0.001):
                loop(ports)

    with ThreadPoolExecutor(len(loops)) as pool:
        workers = [pool.submit(work, loop, f"{loop.__name__}-{number}") for number, loop in enumerate(loops)]
        try:
            yield
        finally:
            stop.set()
    for worker in workers:
        worker.result()


def test_two_retries_and_a_dispatch_at_once(settings: Settings, broker: Broker) -> None:
    """Two retries and a dispatch at once publish each event once, in order, and never leave one without an owner."""
    database, topic = settings.database_url, f"topic-{uuid4().hex}"
    broker.create_topic(topic, config={"max.message.bytes": str(LIMIT)})
    committed: list[Written] = []
    with at_work(settings, dispatch, retry, retry):
        for number in range(ROUNDS):
            drafts = drafts_of(number)
            committed += write(database, topic, drafts[: EVENTS // 2])
            until(lambda: number_of(database, _BLOCKED) > KEYS // 2, "most keys are blocked")
            repair(database)
            committed += write(database, topic, drafts[EVENTS // 2 :])
            until(lambda: is_published_once_repaired(database), "the round is published")
    assert len(committed) == ROUNDS * EVENTS
    assert rows(database, "SELECT FROM outbox_blocked_key") == []
    refused = rows(database, "SELECT count(*) AS number FROM outbox WHERE attempts > 0")[0]["number"]
    assert refused >= ROUNDS * KEYS // 2
    judgement = judge(broker.bootstrap_servers, topic, committed)
    assert judgement.faults == {}
    assert judgement.duplicates == 0
