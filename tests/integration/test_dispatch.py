"""Dispatch runs on a real database and real brokers: what arrives where, in what order, and what a bad event costs."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from functools import partial
from itertools import count
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from support.consuming import consume_all, payloads
from support.relaying import (
    Interrupted,
    Row,
    Steps,
    assert_consistent,
    block,
    blocked,
    end_leases,
    execute,
    insert,
    key_by_shard,
    keys_of_one_shard,
    leased_shards,
    make_due,
    new_topic,
    numbered,
    put,
    relay,
    relay_settings,
    results_of,
    rows,
    states,
    table,
)

from outbox_tasks.relay.dispatch import dispatch
from outbox_tasks.relay.result import Status
from outbox_tasks.relay.retry import retry
from outbox_tasks.runtime import Runtime, StopFlag
from outbox_tasks.store import events, leases
from outbox_tasks.store.horizon import Horizon
from outbox_tasks.testing.services import ApacheKafka, Broker


@pytest.fixture(autouse=True)
def consistent(database_url: str) -> Iterator[None]:
    """Look, after each test, at what must always hold."""
    yield
    assert_consistent(database_url)


def compacted_topic(kafka: ApacheKafka) -> str:
    """Create a topic that keeps the last record of each key."""
    name = f"topic-{uuid4().hex}"
    kafka.create_topic(name, config={"cleanup.policy": "compact"})
    return name


def fifty_keys_with_a_bad_event(bad: Row, *, topic: str) -> tuple[list[Row], str]:
    """Return 500 events over 50 keys, one of them in the middle of its key bad; and that key."""
    drafts = numbered([str(key) for key in range(50)], each=10, topic=topic)
    victim = drafts[255]
    drafts[255] = victim | bad
    return drafts, str(victim["aggregate_id"])


def assert_only_the_bad_key_waits(database_url: str, key: str) -> None:
    """Assert that of 500 events over 50 keys just one key's latter half is held, the first of it refused."""
    found = Counter((row["aggregate_id"] == key, row["state"]) for row in table(database_url))
    assert found == {(False, "published"): 490, (True, "published"): 5, (True, "held"): 5}
    of_key = [row["state"] for row in table(database_url) if row["aggregate_id"] == key]
    assert of_key == ["published"] * 5 + ["held"] * 5


# good events


def test_a_run_drains_everything_in_order(database_url: str, broker: Broker, topic: str) -> None:
    """One run publishes all that is pending, each event once, each key in its order, and gives its leases back."""
    put(database_url, *numbered([str(key) for key in range(40)], each=25, topic=topic))
    with relay(relay_settings(database_url, broker)) as ports:
        result = dispatch(ports)
    assert (result.status, result.published, result.refused, result.held) == (Status.DONE, 1000, 0, 0)
    assert set(states(database_url)) == {"published"}
    found = payloads(consume_all(broker.bootstrap_servers, topic))
    assert found == {str(key): list(range(25)) for key in range(40)}
    assert leased_shards(database_url) == []


def test_a_run_with_nothing_to_do_says_so(database_url: str, tansu: Broker) -> None:
    """Where nothing is pending a run is idle, and wakes nobody."""
    woken: list[bool] = []
    with relay(relay_settings(database_url, tansu)) as ports:
        assert dispatch(ports, wake_another=lambda: woken.append(True)).as_dict() == {"status": "nothing to do"}
    assert woken == []


def test_records_carry_what_was_written(database_url: str, broker: Broker, topic: str) -> None:
    """Key, value and headers arrive as written: JSON equal, bytes and tombstones exact, our two headers added."""
    hostile = {
        "quotes": "\"'`\\ \\u0000-not-a-nul %s %(x)s",
        "controls": "".join(chr(code) for code in range(1, 32)) + "\x7f\u2028",
        "text": "ß 漢字 𝄞 🏴‍☠️ \u202e",
        "numbers": [0, -1, 1.5, 1e300, 2**80, 0.1],
        "": {"": [None, True, False, [], {}]},
        "deep": json.loads("[" * 150 + "]" * 150),
    }
    raw = bytes(range(256)) * 3
    ids = put(
        database_url,
        {"topic": topic, "aggregate_id": "json", "payload": hostile, "headers": {"trace": "größe 🦕", "": ""}},
        {"topic": topic, "aggregate_id": "bytes", "payload_bytes": raw},
        {"topic": topic, "aggregate_id": "empty", "payload_bytes": b""},
        {"topic": topic, "aggregate_id": "tombstone"},
        {"topic": topic, "aggregate_id": "x", "partition_key": "ключ 🗝", "payload": None},
    )
    with relay(relay_settings(database_url, broker)) as ports:
        assert dispatch(ports).published == 5
    found = {record.headers["event_id"].decode(): record for record in consume_all(broker.bootstrap_servers, topic)}
    json_, bytes_, empty, tombstone, null = (found[str(event_id)] for event_id in ids)
    # As decimals: PostgreSQL writes 1e300 out in full, which is the same number but not the same float.
    read = partial(json.loads, parse_int=Decimal, parse_float=Decimal)
    assert read(json_.value or b"") == read(json.dumps(hostile))
    assert json_.headers == {
        "event_id": str(ids[0]).encode(),
        "event_type": b"order_placed",
        "trace": "größe 🦕".encode(),
        "": b"",
    }
    assert (bytes_.value, bytes_.key) == (raw, b"bytes")
    assert (empty.value, tombstone.value) == (b"", None)
    assert (null.key, null.value) == ("ключ 🗝".encode(), b"null")


def test_an_event_with_an_empty_partition_key_has_none(database_url: str, broker: Broker, topic: str) -> None:
    """A partition key of '' means no key: Kafka gets null, not empty bytes."""
    put(database_url, *numbered(["1", "2"], each=3, topic=topic, partition_key=""))
    with relay(relay_settings(database_url, broker)) as ports:
        assert dispatch(ports).published == 6
    assert [record.key for record in consume_all(broker.bootstrap_servers, topic)] == [None] * 6


def test_large_payloads_are_read_in_parts(database_url: str, tansu: Broker) -> None:
    """Payloads of almost a megabyte each are read a few at a time, and still go out whole and in order."""
    topic = new_topic(tansu)
    # Random, so that neither PostgreSQL nor anybody else makes them small.
    execute(
        database_url,
        """
        INSERT INTO outbox (aggregate_type, aggregate_id, event_type, topic, payload)
        SELECT 'order', '1', 'order_placed', %s, jsonb_build_object('key', '1', 'number', n, 'x', (
               SELECT string_agg(md5(n || '/' || i), '') FROM generate_series(1, 28000) AS i))
          FROM generate_series(0, 29) AS n
        """,
        topic,
    )
    reads: list[int] = []
    with relay(relay_settings(database_url, tansu), publisher=None) as ports:
        read = events.read_pending

        def counting(*given: Any, **options: Any) -> list[Any]:
            batch = read(*given, **options)
            reads.append(sum(len(event.value or b"") for event in batch))
            return batch

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(events, "read_pending", counting)
            assert dispatch(ports).published == 30
    assert max(reads) <= events.READ_BYTES + 2_000_000
    assert len(reads) > 3
    assert payloads(consume_all(tansu.bootstrap_servers, topic)) == {"1": list(range(30))}


def test_compressible_payloads_do_not_burst_the_budget(database_url: str, tansu: Broker) -> None:
    """What a read brings is bounded by the size of what arrives, not by how small PostgreSQL could make it."""
    topic = new_topic(tansu)
    execute(
        database_url,
        """
        INSERT INTO outbox (aggregate_type, aggregate_id, event_type, topic, payload)
        SELECT 'order', '1', 'order_placed', %s,
               jsonb_build_object('key', '1', 'number', n, 'x', repeat('all the same ', 70000))
          FROM generate_series(0, 59) AS n
        """,
        topic,
    )
    with relay(relay_settings(database_url, tansu)) as ports:
        shard = rows(database_url, "SELECT min(shard)::int AS shard FROM outbox")[0]["shard"]
        batch = events.read_pending(ports.connection, after={shard: 0}, limit=1000)
    assert sum(len(event.value or b"") for event in batch) <= 4 * events.READ_BYTES


def test_a_late_commit_of_a_lower_id_is_not_passed_over(database_url: str, broker: Broker, topic: str) -> None:
    """An event whose transaction commits after higher ids were published is published all the same."""
    with psycopg.connect(database_url) as late, relay(relay_settings(database_url, broker)) as ports:
        insert(late, {"aggregate_id": "1", "topic": topic, "payload": {"key": "late", "number": 0}})
        put(database_url, *numbered(keys_of_one_shard(database_url, 5), each=3, topic=topic))
        assert dispatch(ports).published == 15
        late.commit()
        assert dispatch(ports).published == 1
    assert payloads(consume_all(broker.bootstrap_servers, topic))["late"] == [0]


def test_a_late_commit_within_a_run_goes_along(database_url: str, broker: Broker, topic: str) -> None:
    """A lower id that commits while a run is between two reads of its shard goes out in the same run."""
    settings = relay_settings(database_url, broker, batch_size=2, shards_per_run=1)
    names = keys_of_one_shard(database_url, 4)
    with psycopg.connect(database_url) as late:
        row = {"aggregate_id": names[3], "topic": topic, "payload": {"key": "late", "number": 0}}
        insert(late, row)
        put(database_url, *numbered(names[:3], each=3, topic=topic))
        publisher = Interrupted(settings, after=late.commit)
        with relay(settings, publisher=publisher) as ports:
            assert dispatch(ports).published == 10
        publisher.close()
    assert set(states(database_url)) == {"published"}


# bad events


def test_a_missing_topic_costs_only_its_own_keys(database_url: str, broker: Broker, topic: str) -> None:
    """Of three topics one is missing: its keys are blocked and name it, all others are published in the same run."""
    second, missing = new_topic(broker), f"missing-{uuid4().hex}"
    routes = {"order": topic, "bill": second, "lost": missing}
    for kind in routes:
        put(database_url, *numbered(["1", "2"], each=3, aggregate_type=kind))
    with relay(relay_settings(database_url, broker, routes=routes)) as ports:
        result = dispatch(ports)
    assert (result.status, result.published, result.refused, result.held) == (Status.DONE, 12, 2, 4)
    found = blocked(database_url)
    assert found.keys() == {"lost/1", "lost/2"}
    assert all(missing in key["reason"] and key["kind"] == "misconfigured" for key in found.values())
    assert all(key["topic"] == missing for key in found.values())
    assert {row["attempts"] for row in table(database_url)} == {0}
    assert payloads(consume_all(broker.bootstrap_servers, topic)) == {"1": [0, 1, 2], "2": [0, 1, 2]}


def test_an_event_without_a_route_blocks_its_key_alone(database_url: str, broker: Broker, topic: str) -> None:
    """An event that no route leads anywhere blocks its key with a reason that names its type."""
    put(database_url, *numbered(["1"], each=2), *numbered(["2"], each=1, aggregate_type="stray", event_type="strayed"))
    with relay(relay_settings(database_url, broker, routes={"order": topic})) as ports:
        assert dispatch(ports).published == 2
    key = blocked(database_url)["stray/2"]
    assert key["kind"] == "misconfigured"
    assert "'strayed'" in key["reason"]
    assert "'stray'" in key["reason"]


@pytest.mark.parametrize("name", ["not a topic!", "x" * 249, ".", "größe", "a/b"])
def test_a_name_no_topic_may_have_blocks_its_key_alone(
    database_url: str, broker: Broker, topic: str, name: str
) -> None:
    """Whatever stands in an event's topic, a run survives it, and other keys are published."""
    put(database_url, {"aggregate_id": "bad", "topic": name}, *numbered(["1"], each=2, topic=topic))
    with relay(relay_settings(database_url, broker)) as ports:
        result = dispatch(ports)
    assert (result.status, result.published, result.refused) == (Status.DONE, 2, 1)
    assert blocked(database_url).keys() == {f"{name}/bad"}


def test_an_oversize_event_holds_only_its_key(database_url: str, kafka: ApacheKafka) -> None:
    """One event over the topic's limit amid 500: the other 49 keys are published in the same run, its own waits."""
    topic = new_topic(kafka, max_message_bytes="20000")
    drafts, key = fifty_keys_with_a_bad_event({"headers": {"padding": "x" * 20_000}}, topic=topic)
    put(database_url, *drafts)
    with relay(relay_settings(database_url, kafka)) as ports:
        result = dispatch(ports)
    assert (result.published, result.refused, result.held) == (495, 1, 4)
    assert_only_the_bad_key_waits(database_url, key)
    reason = blocked(database_url)[f"{topic}/{key}"]["reason"]
    assert "max.message.bytes" in reason
    assert "20000" in reason
    found = payloads(consume_all(kafka.bootstrap_servers, topic))
    assert found.pop(key) == list(range(5))
    assert all(numbers == list(range(10)) for numbers in found.values())


def test_an_event_over_the_producers_limit_holds_only_its_key(database_url: str, broker: Broker, topic: str) -> None:
    """One event larger than the producer sends amid 500 costs its own key alone."""
    drafts, key = fifty_keys_with_a_bad_event({"headers": {"padding": "x" * 60_000}}, topic=topic)
    put(database_url, *drafts)
    with relay(relay_settings(database_url, broker, kafka={"max_request_size": 50_000})) as ports:
        assert dispatch(ports).published == 495
    assert_only_the_bad_key_waits(database_url, key)
    assert "max_request_size" in blocked(database_url)[f"{topic}/{key}"]["reason"]


def test_a_record_only_the_broker_refuses_holds_only_its_key(database_url: str, kafka: ApacheKafka) -> None:
    """A record refused by the broker alone, amid 500: the guilty is found, and all its innocent mates are published."""
    topic = new_topic(kafka)
    drafts, key = fifty_keys_with_a_bad_event({"headers": {"padding": "x" * 20_000}}, topic=topic)
    put(database_url, *drafts)
    with relay(relay_settings(database_url, kafka, shards_per_run=64)) as ports:
        assert ports.publisher.topics.facts([topic])[topic]
        kafka.alter_topic(topic, {"max.message.bytes": "10000"})
        result = dispatch(ports)
    assert (result.published, result.refused, result.held) == (495, 1, 4)
    assert_only_the_bad_key_waits(database_url, key)
    assert "MessageSizeTooLargeError" in blocked(database_url)[f"{topic}/{key}"]["reason"]
    firsts = {name: list(dict.fromkeys(numbers)) for name, numbers in _payloads_of(kafka, topic).items()}
    assert firsts.pop(key) == list(range(5))
    assert all(numbers == list(range(10)) for numbers in firsts.values())


def _payloads_of(broker: Broker, topic: str) -> dict[str, list[int]]:
    return payloads(consume_all(broker.bootstrap_servers, topic))


def test_a_keyless_event_for_a_compacted_topic_holds_only_its_key(database_url: str, kafka: ApacheKafka) -> None:
    """A record without a key amid 500 for a compacted topic is found out by the check and holds no other key."""
    topic = compacted_topic(kafka)
    drafts = numbered([str(key) for key in range(50)], each=10, topic=topic)
    put(database_url, *drafts[:250], drafts[250] | {"partition_key": ""}, *drafts[250:])
    with relay(relay_settings(database_url, kafka)) as ports:
        result = dispatch(ports)
    assert (result.published, result.refused) == (500, 1)
    assert "compacted" in blocked(database_url)[f"{topic}/"]["reason"]


def test_a_blocked_key_holds_what_comes_later(database_url: str, broker: Broker, topic: str) -> None:
    """What is written to a blocked key later is held unsent, and the rest of its shard goes on."""
    names = keys_of_one_shard(database_url, 3)
    settings = relay_settings(database_url, broker, routes={"order": topic})
    put(database_url, *numbered(names, each=1))
    block(database_url, f"order/{names[0]}")
    put(database_url, *numbered(names, each=4, start=1))
    with relay(settings) as ports:
        result = dispatch(ports)
    assert (result.published, result.held, result.refused) == (10, 4, 0)
    assert names[0] not in payloads(consume_all(broker.bootstrap_servers, topic))


def test_a_key_freed_in_the_midst_of_a_run_keeps_its_order(database_url: str, tansu: Broker) -> None:
    """Events read as followers of a key that a retry frees before they are settled stay first in their key."""
    topic = new_topic(tansu)
    settings = relay_settings(database_url, tansu, routes={"order": topic}, batch_size=2, shards_per_run=1)
    put(database_url, *numbered(["7"], each=1))
    block(database_url, "order/7")
    put(database_url, *numbered(["7"], each=5, start=1))
    with relay(settings, owner="retry") as retrying:
        publisher = Interrupted(settings, before=lambda: retry(retrying))
        with relay(settings, publisher=publisher) as ports:
            dispatch(ports)
        publisher.close()
    assert payloads(consume_all(tansu.bootstrap_servers, topic)) == {"7": list(range(6))}


# how much a look takes


def test_where_little_waits_a_look_takes_all_shards(
    database_url: str, tansu: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a look whose shards one batch emptied the next takes every shard in which something is pending."""
    topic = new_topic(tansu)
    keys = list(key_by_shard(database_url, 20).values())
    put(database_url, *numbered(keys, each=1))
    claims = results_of(monkeypatch, leases, "claim")
    with relay(relay_settings(database_url, tansu, shards_per_run=4, routes={"order": topic})) as ports:
        assert dispatch(ports).published == 20
    assert [len(claim.floors) for claim in claims] == [4, 16, 0]


def test_a_backlog_is_shared_though_a_run_took_all_shards(
    database_url: str, tansu: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a look that took every shard finds a backlog, it takes one batch and gives them back: others may help."""
    topic = new_topic(tansu)
    keys = list(key_by_shard(database_url, 3).values())
    settings = relay_settings(database_url, tansu, shards_per_run=1, batch_size=10, routes={"order": topic})
    put(database_url, *numbered(keys[:1], each=1))
    backlogs = iter([numbered(keys, each=20, start=1)])
    publisher = Interrupted(settings, before=lambda: put(database_url, *next(backlogs, ())))
    claims = results_of(monkeypatch, leases, "claim")
    with relay(settings, publisher=publisher) as ports:
        assert dispatch(ports).published == 61
    publisher.close()
    assert [len(claim.floors) for claim in claims] == [1, 3, 1, 1, 1, 0]
    assert claims[1].more is False
    found = payloads(consume_all(tansu.bootstrap_servers, topic))
    assert found == {key: list(range(0 if key == keys[0] else 1, 21)) for key in keys}


# ends


def test_more_than_one_run_takes_wakes_another_before_the_work(database_url: str, tansu: Broker) -> None:
    """A run that leaves shards to others calls for another before it sends anything, and only once."""
    topic = new_topic(tansu)
    put(database_url, *numbered([str(key) for key in range(60)], each=1, topic=topic))
    pending_then: list[int] = []

    def wake() -> None:
        pending_then.append(states(database_url).count("pending"))

    with relay(relay_settings(database_url, tansu, shards_per_run=4)) as ports:
        assert dispatch(ports, wake_another=wake).status is Status.DONE
    assert pending_then == [60]


def test_a_run_that_takes_all_wakes_nobody(database_url: str, tansu: Broker) -> None:
    """A run that leaves nothing to others calls for nobody."""
    topic = new_topic(tansu)
    put(database_url, *numbered(["1", "2"], each=1, topic=topic))
    woken: list[bool] = []
    with relay(relay_settings(database_url, tansu)) as ports:
        dispatch(ports, wake_another=lambda: woken.append(True))
    assert woken == []


def test_a_run_asked_to_stop_gives_everything_back(database_url: str, broker: Broker, topic: str) -> None:
    """Asked to stop in its midst, a run settles what was acknowledged, frees its leases, and the next goes on."""
    put(database_url, *numbered([str(key) for key in range(30)], each=20, topic=topic))
    settings = relay_settings(database_url, broker, batch_size=50)
    stop = threading.Event()
    publisher = Interrupted(settings, after=stop.set)
    with relay(settings, publisher=publisher, stopping=stop.is_set) as ports:
        result = dispatch(ports)
        assert result.status is Status.STOPPED
        assert 0 < result.published < 600
        assert leased_shards(database_url) == []
        stop.clear()
        assert dispatch(ports).published == 600 - result.published
    publisher.close()
    found = payloads(consume_all(broker.bootstrap_servers, topic))
    assert found == {str(key): list(range(20)) for key in range(30)}


def test_a_run_asked_to_stop_while_it_waits_is_no_outage(database_url: str, tansu: Broker) -> None:
    """Asked to stop before its batch is acknowledged, a run ends as stopped, not as having no broker."""
    topic = new_topic(tansu)
    put(database_url, *numbered(["1"], each=3, topic=topic))
    looks = iter([False, False])
    with relay(relay_settings(database_url, tansu), stopping=lambda: next(looks, True)) as ports:
        result = dispatch(ports)
    assert result.status is Status.STOPPED
    assert leased_shards(database_url) == []
    with relay(relay_settings(database_url, tansu)) as ports:
        dispatch(ports)
    assert list(dict.fromkeys(payloads(consume_all(tansu.bootstrap_servers, topic))["1"])) == [0, 1, 2]


def test_a_run_out_of_time_gives_back_and_wakes_another(database_url: str, tansu: Broker) -> None:
    """A run whose time is up in its midst frees its leases and calls for another."""
    topic = new_topic(tansu)
    put(database_url, *numbered([str(key) for key in range(30)], each=20, topic=topic))
    settings = relay_settings(database_url, tansu, batch_size=50, shards_per_run=64)
    clock, woken = Steps([0.0]), list[bool]()
    publisher = Interrupted(settings, after=lambda: clock.move(settings.run_seconds))
    with relay(settings, publisher=publisher) as ports:
        timed = replace(ports, clock=clock)
        result = dispatch(timed, wake_another=lambda: woken.append(True))
        assert result.status is Status.MORE
        assert 0 < result.published < 600
        assert woken == [True]
        assert leased_shards(database_url) == []
        assert dispatch(timed).published == 600 - result.published
    publisher.close()
    assert payloads(consume_all(tansu.bootstrap_servers, topic)) == {str(key): list(range(20)) for key in range(30)}


def test_nothing_is_sent_once_the_lease_is_over(database_url: str, tansu: Broker) -> None:
    """A run that wakes from a long sleep after its read sends nothing: its shards may be another's."""
    topic = new_topic(tansu)
    put(database_url, *numbered(["1"], each=3, topic=topic))
    settings = relay_settings(database_url, tansu)
    clock = Steps([0.0])
    publisher = Interrupted(settings, before=lambda: clock.move(settings.lease_seconds))
    with relay(settings, publisher=publisher) as ports:
        result = dispatch(replace(ports, clock=clock))
    publisher.close()
    assert result.published == 0
    assert states(database_url) == ["pending"] * 3
    assert consume_all(tansu.bootstrap_servers, topic) == []


def test_a_run_whose_shards_were_taken_over_writes_nothing(database_url: str, tansu: Broker) -> None:
    """Where another took its shards over while it published, a run settles nothing and leaves the leases alone."""
    topic = new_topic(tansu)
    put(database_url, *numbered(["1"], each=3, topic=topic))
    settings, taker = relay_settings(database_url, tansu), uuid4()
    take = "UPDATE outbox_shard SET lease_token = %s, lease_owner = 'taker' WHERE lease_token IS NOT NULL"
    publisher = Interrupted(settings, after=lambda: execute(database_url, take, taker))
    with relay(settings, publisher=publisher) as ports:
        result = dispatch(ports)
    publisher.close()
    assert result.published == 0
    assert states(database_url) == ["pending"] * 3
    assert {row["lease_token"] for row in rows(database_url, "SELECT lease_token FROM outbox_shard")} == {None, taker}


def test_a_backlog_goes_on_without_a_shard_that_was_taken_over(database_url: str, tansu: Broker) -> None:
    """Of a shard that another took over while a backlog goes out nothing more is sent; the others go out whole."""
    topic = new_topic(tansu)
    lost, kept = list(key_by_shard(database_url, 2).values())
    put(database_url, *numbered([lost, kept], each=40))
    settings = relay_settings(database_url, tansu, batch_size=8, routes={"order": topic})
    take = """
        UPDATE outbox_shard SET lease_token = gen_random_uuid(), lease_owner = 'taker'
         WHERE shard = (SELECT min(shard) FROM outbox WHERE aggregate_id = %s)
    """
    publisher = Interrupted(settings, after=lambda: execute(database_url, take, lost))
    with relay(settings, publisher=publisher) as ports:
        result = dispatch(replace(ports, horizon=Horizon(complete=last_id(database_url))))
    publisher.close()
    sent = payloads(consume_all(tansu.bootstrap_servers, topic))
    assert sent[kept] == list(range(40))
    assert len(sent[lost]) <= 8
    assert result.published == 40
    assert [row["aggregate_id"] for row in table(database_url) if row["state"] == "pending"] == [lost] * 40
    execute(database_url, "UPDATE outbox_shard SET lease_token = NULL, lease_owner = NULL, leased_until = NULL")


def test_what_was_published_is_settled_though_the_next_read_fails(database_url: str, tansu: Broker) -> None:
    """A read ahead that fails costs no settlement: it fails again, and ends the run, once that is written."""
    topic = new_topic(tansu)
    put(database_url, *numbered(["1"], each=40))
    settings = relay_settings(database_url, tansu, batch_size=8, routes={"order": topic})
    read, reads = events.read_pending, count()

    def failing(*given: Any, **options: Any) -> list[Any]:
        if next(reads) >= 2:
            raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")
        return read(*given, **options)

    with relay(settings) as ports, pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "read_pending", failing)
        with pytest.raises(psycopg.errors.QueryCanceled):
            dispatch(replace(ports, horizon=Horizon(complete=last_id(database_url))))
    assert Counter(states(database_url)) == {"published": 16, "pending": 24}
    execute(database_url, "UPDATE outbox_shard SET lease_token = NULL, lease_owner = NULL, leased_until = NULL")


def last_id(database_url: str) -> int:
    """Return the last id of an event."""
    return int(rows(database_url, "SELECT max(id) AS id FROM outbox")[0]["id"])


@pytest.mark.parametrize("how", ["killed backend", "statement timeout"])
def test_a_run_that_loses_its_database_is_made_good_by_the_next(database_url: str, tansu: Broker, how: str) -> None:
    """A run that loses its connection, or a statement, between publishing and settling loses no event and no order."""
    topic = new_topic(tansu)
    put(database_url, *numbered([str(key) for key in range(10)], each=5, topic=topic))
    settings = relay_settings(database_url, tansu)
    kill = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = %s AND datname = current_database()"
    )
    with psycopg.connect(database_url) as latch:
        accident = (
            (lambda: execute(database_url, kill, settings.client_id))
            if how == "killed backend"
            else (lambda: latch.execute("SELECT FROM outbox_shard FOR UPDATE"))
        )
        runtime = Runtime(settings.model_copy(update={"statement_seconds": 1.0}), stopping=StopFlag())
        runtime._publisher = Interrupted(settings, after=accident)
        with pytest.raises(psycopg.OperationalError):
            runtime.run(dispatch, task="outbox.dispatch", owner="first")
        latch.rollback()
    assert set(states(database_url)) == {"pending"}
    assert leased_shards(database_url) != []
    report = runtime.run(dispatch, task="outbox.dispatch", owner="second")
    runtime.close()
    assert report == {"status": "done", "published": 50}
    assert leased_shards(database_url) == []
    found = payloads(consume_all(tansu.bootstrap_servers, topic))
    assert {key: list(dict.fromkeys(numbers)) for key, numbers in found.items()} == {
        str(key): list(range(5)) for key in range(10)
    }


def test_a_run_leaves_what_others_hold(database_url: str, tansu: Broker) -> None:
    """A run publishes nothing of a shard that another run has leased."""
    topic = new_topic(tansu)
    (theirs, held), (_, free) = key_by_shard(database_url, 2).items()
    settings = relay_settings(database_url, tansu, routes={"order": topic})
    _, second = put(database_url, *numbered([held, free], each=1))
    execute(
        database_url,
        "UPDATE outbox_shard SET lease_token = gen_random_uuid(), lease_owner = 'other',"
        " leased_until = clock_timestamp() + interval '1 hour' WHERE shard = %s",
        theirs,
    )
    with relay(settings) as ports:
        assert dispatch(ports).published == 1
    published = rows(database_url, "SELECT event_id FROM outbox WHERE state = 'published'")
    assert [row["event_id"] for row in published] == [second]
    end_leases(database_url)
    with relay(settings) as ports:
        assert dispatch(ports).published == 1


def test_ids_that_are_no_uuidv7_are_published_too(database_url: str, tansu: Broker) -> None:
    """Events with ids of any kind, in the DEFAULT partition or days away, are published in the order of `id`."""
    topic = new_topic(tansu)
    ids = [UUID(int=2**128 - 1), uuid4(), UUID(int=0), uuid4()]
    drafts = numbered(["1"], each=4, topic=topic)
    put(database_url, *[draft | {"event_id": event_id} for draft, event_id in zip(drafts, ids, strict=True)])
    with relay(relay_settings(database_url, tansu)) as ports:
        assert dispatch(ports).published == 4
    assert payloads(consume_all(tansu.bootstrap_servers, topic)) == {"1": [0, 1, 2, 3]}
    make_due(database_url)
