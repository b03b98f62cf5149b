"""Refusals: one bad record in the middle of a batch costs its own key, and nobody else anything."""

from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID, uuid4

import pytest
from support.clients import Client
from support.consuming import consume_all
from support.judging import event_id_of
from support.misfortune import Draft, put, rounds
from support.relaying import Row, assert_consistent, execute, relay, rows, table

from outbox_tasks.relay.dispatch import dispatch
from outbox_tasks.relay.result import Status
from outbox_tasks.settings import Settings
from outbox_tasks.testing.services import Broker

EVENTS, KEYS = 500, 50
BAD = 225
"""Place of the bad event: the fifth of ten of its key, whose number is 25."""

# All go by their event types; the bad key's have no partition key, and of them only the bad one wants one.
_SPREAD = """
UPDATE outbox
   SET topic = NULL,
       partition_key = CASE aggregate_id WHEN 'key-25' THEN '' END,
       event_type = CASE WHEN aggregate_id = 'key-25' AND payload->>'sequence' <> '5' THEN 'noted' ELSE 'stated' END
"""

on_both_brokers = pytest.mark.parametrize("broker", ["tansu", "kafka"], indirect=True)
on_apache_kafka = pytest.mark.parametrize("broker", ["kafka"], indirect=True)


@pytest.fixture(autouse=True)
def consistent_at_the_end(database_url: str) -> Iterator[None]:
    """Look, after every test, that what must always hold does: no event is held without a blocked key, say."""
    yield
    assert_consistent(database_url)


@pytest.fixture
def settings(database_url: str, broker: Broker, client: Client) -> Settings:
    """Take every shard in one batch, so that the bad record has the whole load for mates."""
    return client.settings(
        broker,
        database_url=database_url,
        shards_per_run=64,
        batch_size=64 * EVENTS,
        run_seconds=20,
        delivery_seconds=20,
        lease_seconds=60,
    )


@dataclass(frozen=True)
class Found:
    """The table after a run: of the bad key what came before the bad event, the event itself, and what came after."""

    mates: list[Row]
    before: list[Row]
    bad: Row
    after: list[Row]

    @property
    def published(self) -> list[Row]:
        """The events that are published; those of a key in their order."""
        return [*self.before, *self.mates]


def found(database_url: str) -> Found:
    """Read the table, and tell the bad key by its blocked key: there is exactly one."""
    (key,) = rows(database_url, "SELECT * FROM outbox_blocked_key")
    events = rows(database_url, "SELECT * FROM outbox ORDER BY id")
    own = [event for event in events if event["ordering_key"] == key["ordering_key"]]
    (bad,) = [event for event in own if event["event_id"] == key["event_id"]]
    return Found(
        mates=[event for event in events if event["ordering_key"] != key["ordering_key"]],
        before=[event for event in own if event["id"] < bad["id"]],
        bad=bad,
        after=[event for event in own if event["id"] > bad["id"]],
    )


def assert_only_the_bad_key_suffers(database_url: str) -> Found:
    """Assert who is published, who is held and who spent an attempt; returns what was found."""
    seen = found(database_url)
    assert len(seen.mates) == EVENTS - EVENTS // KEYS
    assert {event["state"] for event in seen.mates} == {"published"}
    assert [event["state"] for event in seen.before] == ["published"] * 4
    assert [event["state"] for event in [seen.bad, *seen.after]] == ["held"] * 6
    assert seen.bad["attempts"] == 1
    assert {event["attempts"] for event in [*seen.mates, *seen.before, *seen.after]} == {0}
    assert {event["last_error"] for event in [*seen.mates, *seen.before, *seen.after]} == {None}
    return seen


def assert_on_topic(broker: Broker, topic: str, expected: list[Row]) -> None:
    """Assert that these events are on the topic and no others, first occurrences in the order of their ids per key."""
    records = consume_all(broker.bootstrap_servers, topic)
    came: dict[bytes | None, list[UUID]] = {}
    for record in records:
        if event_id_of(record) not in (ids := came.setdefault(record.key, [])):
            ids.append(event_id_of(record))
    wanted: dict[bytes | None, list[UUID]] = {}
    for event in expected:
        wanted.setdefault(event["aggregate_id"].encode(), []).append(event["event_id"])
    assert came == wanted


def bad_among(drafts: list[Draft], *, padding: int) -> list[Draft]:
    """Make the bad event of a load big."""
    return [*drafts[:BAD], Draft(drafts[BAD].key, drafts[BAD].sequence, padding), *drafts[BAD + 1 :]]


@on_both_brokers
def test_an_oversize_record(broker: Broker, settings: Settings) -> None:
    """A record over its topic's size limit is found before it is sent: 49 keys are published in the same run, once."""
    topic = f"small-{uuid4().hex}"
    broker.create_topic(topic, config={"max.message.bytes": "20000"})
    put(settings.database_url, topic, bad_among(rounds(keys=KEYS, events=EVENTS), padding=30_000))
    with relay(settings) as ports:
        result = dispatch(ports)
    assert (result.status, result.published, result.refused, result.held) == (Status.DONE, 494, 1, 5)
    seen = assert_only_the_bad_key_suffers(settings.database_url)
    assert "max.message.bytes" in seen.bad["last_error"]
    assert_on_topic(broker, topic, seen.published)
    assert len(consume_all(broker.bootstrap_servers, topic)) == len(seen.published)


@on_both_brokers
def test_a_record_without_a_key_for_a_compacted_topic(broker: Broker, settings: Settings) -> None:
    """A record without a key is found before it is sent to a compacted topic: 49 keys are published in the same run."""
    notes, facts = f"notes-{uuid4().hex}", f"facts-{uuid4().hex}"
    broker.create_topic(notes)
    broker.create_topic(facts, config={"cleanup.policy": "compact"})
    settings = settings.model_copy(update={"routes": {"noted": notes, "stated": facts}})
    # One ordering key may reach several topics by its event types.
    put(settings.database_url, notes, rounds(keys=KEYS, events=EVENTS))
    execute(settings.database_url, _SPREAD)
    with relay(settings) as ports:
        result = dispatch(ports)
    assert (result.status, result.published, result.refused, result.held) == (Status.DONE, 494, 1, 5)
    seen = assert_only_the_bad_key_suffers(settings.database_url)
    assert "compacted" in seen.bad["last_error"]
    assert_on_topic(broker, facts, seen.mates)
    came = [event_id_of(record) for record in consume_all(broker.bootstrap_servers, notes)]
    assert sorted(came) == sorted(row["event_id"] for row in seen.before)


@on_apache_kafka
def test_a_record_the_broker_alone_refuses(broker: Broker, settings: Settings) -> None:
    """A record only the broker finds too large is told from its mates: 49 keys are published in the same run."""
    topic = f"shrunk-{uuid4().hex}"
    broker.create_topic(topic)
    with relay(settings) as ports:
        put(settings.database_url, topic, [Draft("first", 1)])
        assert dispatch(ports).published == 1
        (warm_up,) = table(settings.database_url)
        broker.alter_topic(topic, {"max.message.bytes": "20000"})
        put(settings.database_url, topic, bad_among(rounds(keys=KEYS, events=EVENTS), padding=30_000))
        result = dispatch(ports)
    assert (result.status, result.published, result.refused, result.held) == (Status.DONE, 494, 1, 5)
    execute(settings.database_url, "DELETE FROM outbox WHERE aggregate_id = 'first'")
    seen = assert_only_the_bad_key_suffers(settings.database_url)
    assert "MessageSizeTooLargeError" in seen.bad["last_error"]
    assert_on_topic(broker, topic, [warm_up, *seen.published])
