"""Retry runs on a real database and real brokers: blocked keys tried again, freed, or blocked anew."""

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import psycopg
import pytest
from support.consuming import consume_all
from support.relaying import (
    Interrupted,
    Row,
    Steps,
    assert_consistent,
    block,
    blocked,
    dice,
    execute,
    make_due,
    numbered,
    put,
    relay,
    relay_settings,
    rows,
    states,
    table,
)

from outbox_tasks.relay.dispatch import dispatch
from outbox_tasks.relay.result import Status
from outbox_tasks.relay.retry import KEYS_PER_CLAIM, retry
from outbox_tasks.testing.services import ApacheKafka, Broker


@pytest.fixture(autouse=True)
def consistent(database_url: str) -> Iterator[None]:
    """Look, after each test, at what must always hold."""
    yield
    assert_consistent(database_url)


def numbers_of(broker: Broker, topic: str) -> dict[str, list[int]]:
    """Return the numbers of each key in the order in which they came."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for record in consume_all(broker.bootstrap_servers, topic):
        payload = json.loads(record.value or b"null")
        found[payload["key"]].append(payload["number"])
    return dict(found)


def new_topic(broker: Broker) -> str:
    """Create a topic for one test."""
    name = f"topic-{uuid4().hex}"
    broker.create_topic(name)
    return name


def oversize(name: str, number: int) -> Row:
    """Return an event larger than the producers of these tests send."""
    return {
        "aggregate_id": name,
        "payload": {"key": name, "number": number},
        "headers": {"padding": "x" * 60_000},
    }


SMALL = {"max_request_size": 50_000}


def test_due_keys_go_out_in_order_and_are_free(database_url: str, broker: Broker, topic: str) -> None:
    """What due keys hold is published in order, the keys are freed, and dispatch goes on with what came later."""
    settings = relay_settings(database_url, broker, routes={"order": topic}, batch_size=8)
    put(database_url, *numbered(["1", "2", "3"], each=10))
    block(database_url, "order/1")
    block(database_url, "order/2")
    with relay(settings) as ports:
        assert dispatch(ports).published == 10
        put(database_url, *numbered(["1"], each=2, start=10))
        assert dispatch(ports).held == 2
        result = retry(ports)
        assert (result.status, result.published, result.refused) == (Status.DONE, 22, 0)
        assert blocked(database_url) == {}
        put(database_url, *numbered(["1"], each=2, start=12))
        assert dispatch(ports).published == 2
    assert numbers_of(broker, topic) == {"1": list(range(14)), "2": list(range(10)), "3": list(range(10))}


def test_nothing_due_is_nothing_to_do_even_without_a_broker(database_url: str) -> None:
    """Where no key is due a retry is idle, and does not even look for a broker."""
    put(database_url, *numbered(["1"], each=1))
    block(database_url, "order/1")
    execute(database_url, "UPDATE outbox_blocked_key SET retry_at = clock_timestamp() + interval '1 hour'")
    with relay(relay_settings(database_url)) as ports:
        assert retry(ports).status is Status.IDLE


def test_an_event_refused_again_waits_longer(database_url: str, tansu: Broker) -> None:
    """An event refused again costs another attempt, is retried within its bounds later, and says why."""
    settings = relay_settings(
        database_url, tansu, routes={"order": new_topic(tansu)}, kafka=SMALL, retry_base_seconds=100,
        retry_max_seconds=250, retry_attempts=9,
    )  # fmt: skip
    put(database_url, oversize("1", 0), *numbered(["1"], each=1, start=1))
    waits: list[timedelta] = []
    with relay(settings) as given:
        ports = replace(given, chance=dice(7))
        assert dispatch(ports).refused == 1
        for attempts in (2, 3, 4):
            waits.append(blocked(database_url)["order/1"]["wait"])
            execute(database_url, "UPDATE outbox_blocked_key SET retry_at = clock_timestamp()")
            result = retry(ports)
            assert (result.published, result.refused) == (0, 1)
            assert [row["attempts"] for row in table(database_url)] == [attempts, 0]
        waits.append(blocked(database_url)["order/1"]["wait"])
    for wait, most in zip(waits, (100, 200, 250, 250), strict=True):
        assert timedelta(0) < wait <= timedelta(seconds=most)
    assert "max_request_size" in str(table(database_url)[0]["last_error"])
    assert states(database_url) == ["held", "held"]


def test_an_event_that_used_up_its_attempts_is_tried_no_more(database_url: str, tansu: Broker) -> None:
    """The refusal that uses up an event's attempts leaves its key exhausted: no retry touches it."""
    settings = relay_settings(database_url, tansu, routes={"order": new_topic(tansu)}, kafka=SMALL, retry_attempts=2)
    put(database_url, oversize("1", 0))
    with relay(settings) as ports:
        dispatch(ports)
        make_due(database_url)
        assert retry(ports).refused == 1
        key = blocked(database_url)["order/1"]
        assert (key["kind"], key["retry_at"]) == ("exhausted", None)
        assert retry(ports).status is Status.IDLE
    assert table(database_url)[0]["attempts"] == 2


def test_a_retry_stops_at_the_first_refusal_of_a_key(database_url: str, tansu: Broker) -> None:
    """Of what a key holds a retry publishes up to the refused event, and holds on to the rest."""
    topic = new_topic(tansu)
    settings = relay_settings(database_url, tansu, routes={"order": topic}, kafka=SMALL, retry_base_seconds=100)
    put(database_url, *numbered(["1"], each=3), oversize("1", 3), *numbered(["1"], each=2, start=4))
    block(database_url, "order/1")
    with relay(settings) as ports:
        result = retry(replace(ports, chance=dice(7)))
    assert (result.published, result.refused) == (3, 1)
    assert states(database_url) == ["published"] * 3 + ["held"] * 3
    assert numbers_of(tansu, topic) == {"1": [0, 1, 2]}
    refused = table(database_url)[3]["event_id"]
    assert blocked(database_url)["order/1"]["event_id"] == refused


def test_more_keys_than_one_claim_are_all_tried(database_url: str, tansu: Broker) -> None:
    """A retry goes on claiming until no key is due."""
    topic = new_topic(tansu)
    names = [str(number) for number in range(KEYS_PER_CLAIM * 2 + 5)]
    put(database_url, *numbered(names, each=2))
    execute(
        database_url,
        "INSERT INTO outbox_blocked_key (ordering_key, event_id, kind, reason, retry_at)"
        " SELECT ordering_key, gen_random_uuid(), 'refused', 'test', now() FROM outbox GROUP BY ordering_key",
    )
    execute(database_url, "UPDATE outbox SET state = 'held'")
    with relay(relay_settings(database_url, tansu, routes={"order": topic})) as ports:
        assert retry(ports).published == 2 * len(names)
    assert blocked(database_url) == {}


def test_a_missing_topic_made_later_sets_all_its_keys_going(database_url: str, broker: Broker) -> None:
    """Keys that wait for a topic spend no attempt, and all go on, in order, with the first retry after it was made."""
    topic = f"later-{uuid4().hex}"
    settings = relay_settings(database_url, broker, routes={"order": topic})
    names = [str(number) for number in range(5)]
    put(database_url, *numbered(names, each=3))
    with relay(settings) as ports:
        assert dispatch(ports).refused == 5
        execute(
            database_url,
            "UPDATE outbox_blocked_key SET retry_at = clock_timestamp()"
            " WHERE retry_at < clock_timestamp() + interval '60 seconds'",
        )
        assert retry(ports).refused == 1
        broker.create_topic(topic)
        execute(
            database_url,
            "UPDATE outbox_blocked_key SET retry_at = clock_timestamp()"
            " WHERE ordering_key = (SELECT ordering_key FROM outbox_blocked_key ORDER BY retry_at LIMIT 1)",
        )
        assert retry(ports).published == 15
    assert numbers_of(broker, topic) == {name: [0, 1, 2] for name in names}
    assert {row["attempts"] for row in table(database_url)} == {0}


def test_a_key_whose_event_was_mended_goes_on(database_url: str, kafka: ApacheKafka) -> None:
    """Once the topic takes larger records, what was refused goes out, before what was held behind it."""
    topic = new_topic(kafka)
    kafka.alter_topic(topic, {"max.message.bytes": "20000"})
    settings = relay_settings(database_url, kafka, routes={"order": topic}, topic_facts_seconds=0.001)
    put(database_url, *numbered(["1"], each=1), oversize("1", 1), *numbered(["1"], each=2, start=2))
    with relay(settings) as ports:
        assert dispatch(ports).refused == 1
        kafka.alter_topic(topic, {"max.message.bytes": "200000"})
        make_due(database_url)
        assert retry(ports).published == 3
    assert numbers_of(kafka, topic) == {"1": [0, 1, 2, 3]}


def test_a_retry_without_a_broker_claims_nothing(database_url: str) -> None:
    """While no broker answers a retry leaves due keys as they are, unclaimed and with no attempt spent."""
    put(database_url, *numbered(["1"], each=1))
    block(database_url, "order/1")
    before = rows(database_url, "SELECT * FROM outbox_blocked_key")
    with relay(relay_settings(database_url, probe_seconds=0.3)) as ports:
        assert retry(ports).status is Status.UNAVAILABLE
    assert rows(database_url, "SELECT * FROM outbox_blocked_key") == before
    assert table(database_url)[0]["attempts"] == 0


def test_a_retry_asked_to_stop_gives_its_keys_back(database_url: str, tansu: Broker) -> None:
    """Asked to stop in its midst, a retry settles what was acknowledged and gives its keys back, still due."""
    topic = new_topic(tansu)
    settings = relay_settings(database_url, tansu, routes={"order": topic}, batch_size=2)
    put(database_url, *numbered(["1"], each=6))
    block(database_url, "order/1")
    stop = threading.Event()
    publisher = Interrupted(settings, after=stop.set)
    with relay(settings, publisher=publisher, stopping=stop.is_set) as ports:
        result = retry(ports)
        assert (result.status, result.published) == (Status.STOPPED, 2)
        key = blocked(database_url)["order/1"]
        assert key["lease_token"] is None
        assert key["wait"] <= timedelta(0)
        stop.clear()
        assert retry(ports).published == 4
    publisher.close()
    assert numbers_of(tansu, topic) == {"1": list(range(6))}


def test_a_retry_out_of_time_gives_its_keys_back(database_url: str, tansu: Broker) -> None:
    """A retry whose time is up gives its keys back, and says that there is more."""
    topic = new_topic(tansu)
    settings = relay_settings(database_url, tansu, routes={"order": topic}, batch_size=2)
    put(database_url, *numbered(["1"], each=6))
    block(database_url, "order/1")
    clock = Steps([0.0])
    publisher = Interrupted(settings, after=lambda: clock.move(settings.run_seconds))
    with relay(settings, publisher=publisher) as ports:
        result = retry(replace(ports, clock=clock))
    publisher.close()
    assert (result.status, result.published) == (Status.MORE, 2)
    assert blocked(database_url)["order/1"]["lease_token"] is None


def test_a_key_taken_over_in_the_midst_is_left_alone(database_url: str, tansu: Broker) -> None:
    """Where its key is another's once it has published, a retry writes nothing and gives nothing back."""
    topic, taker = new_topic(tansu), uuid4()
    settings = relay_settings(database_url, tansu, routes={"order": topic})
    put(database_url, *numbered(["1"], each=2))
    block(database_url, "order/1")
    take = "UPDATE outbox_blocked_key SET lease_token = %s"
    publisher = Interrupted(settings, after=lambda: execute(database_url, take, taker))
    with relay(settings, publisher=publisher) as ports:
        assert retry(ports).published == 0
    publisher.close()
    assert states(database_url) == ["held", "held"]
    assert blocked(database_url)["order/1"]["lease_token"] == taker


def test_retries_and_a_dispatch_at_once_publish_nothing_twice(database_url: str, broker: Broker) -> None:
    """Two retries and a dispatch on the same keys at once: every event arrives once, every key in its order."""
    topic = new_topic(broker)
    settings = relay_settings(
        database_url, broker, routes={"order": topic}, batch_size=40, shards_per_run=6, retry_base_seconds=0.001,
        retry_max_seconds=0.001,
    )  # fmt: skip
    names, rounds, each = [str(number) for number in range(12)], 12, 3
    written = threading.Event()

    def write() -> None:
        for turn in range(rounds):
            put(database_url, *numbered(names, each=each, start=turn * each))
            # Somebody's refusal, so that there is always something to retry: whatever waits of a third of the keys.
            for name in names[turn % 3 :: 3]:
                _refuse(database_url, f"order/{name}")
        written.set()

    def work(run: object, owner: str) -> None:
        with relay(settings, owner=owner) as ports:
            while True:
                last = written.is_set()
                dispatch(ports) if run is dispatch else retry(ports)
                if last and not _waiting(database_url):
                    return

    with ThreadPoolExecutor(4) as pool:
        threads = [pool.submit(write)]
        threads += [pool.submit(work, run, owner) for run, owner in ((dispatch, "d"), (retry, "r1"), (retry, "r2"))]
        for thread in threads:
            thread.result(timeout=120)
    assert set(states(database_url)) == {"published"}
    found = numbers_of(broker, topic)
    assert {name: Counter(numbers) for name, numbers in found.items()} == {
        name: Counter(range(rounds * each)) for name in names
    }
    assert found == {name: list(range(rounds * each)) for name in names}


_LEASE = """
SELECT FROM outbox_shard WHERE lease_token IS NULL AND shard = hashtextextended(%(key)s, 0) & 63
   FOR UPDATE SKIP LOCKED
"""
_REFUSE = """
WITH waiting AS MATERIALIZED (
    SELECT event_id FROM outbox WHERE ordering_key = %(key)s AND state = 'pending'
), refused AS (
    INSERT INTO outbox_blocked_key (ordering_key, event_id, kind, reason, retry_at)
    SELECT %(key)s, min(event_id::text)::uuid, 'refused', 'refused by the test', clock_timestamp()
      FROM waiting HAVING count(*) > 0
        ON CONFLICT DO NOTHING
    RETURNING ordering_key
)
UPDATE outbox AS o SET state = 'held'
  FROM waiting, refused WHERE o.event_id = waiting.event_id
"""


def _refuse(database_url: str, key: str) -> None:
    """Hold what is pending of a key nobody publishes now, as a refusal by its shard's holder would."""
    with psycopg.connect(database_url) as connection:
        # Two statements: what is pending is looked at once nobody else can change it.
        if connection.execute(_LEASE, {"key": key}).fetchone() is not None:
            connection.execute(_REFUSE, {"key": key})


def _waiting(database_url: str) -> bool:
    return bool(rows(database_url, "SELECT 1 AS one FROM outbox WHERE state <> 'published' LIMIT 1"))
