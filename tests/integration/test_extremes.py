"""Events at the edge of what the table takes: large ones by the hundred, names as long as they may be."""

import random
import string
from collections.abc import Iterator
from uuid import UUID

import pytest
from support.consuming import consume_all
from support.relaying import block, blocked, execute, put, relay, relay_settings, rows, states, with_settings

from outbox_tasks.ports import Ports
from outbox_tasks.relay.dead_letter import dead_letter
from outbox_tasks.relay.dispatch import dispatch
from outbox_tasks.relay.replay import Order, replay, start
from outbox_tasks.relay.result import Status
from outbox_tasks.store.replays import Wanted
from outbox_tasks.testing.services import Broker

MEGABYTE = "x" * 1_000_000


@pytest.fixture
def ports(database_url: str, broker: Broker, topic: str) -> Iterator[Ports]:
    """Give a run what it works with."""
    with relay(relay_settings(database_url, broker, routes={"order": topic}, statement_seconds=2.0)) as ports:
        yield ports


def test_many_large_dead_letters(database_url: str, ports: Ports) -> None:
    """Sixty exhausted events of a megabyte become dead letters, with copies, though statements must be short."""
    keys = [f"key-{number}" for number in range(60)]
    put(database_url, *({"aggregate_id": key, "payload": {"pad": MEGABYTE}} for key in keys))
    ids = {
        row["aggregate_id"]: row["event_id"] for row in rows(database_url, "SELECT aggregate_id, event_id FROM outbox")
    }
    for key in keys:
        block(database_url, f"order/{key}", event_id=ids[key])
    execute(database_url, "UPDATE outbox_blocked_key SET kind = 'exhausted', retry_at = NULL")
    assert dead_letter(with_settings(ports, dead_letter_topic="dead-letters")).dead == len(keys)
    assert states(database_url) == ["pending"] * len(keys)  # the copies


def test_names_as_long_as_they_may_be(database_url: str, ports: Ports) -> None:
    """An event without a route whose names are as long as may be blocks its own key, and no settlement fails."""
    chance = random.Random(1)  # noqa: S311 - for text that does not compress
    long = ["".join(chance.choices(string.ascii_letters, k=1000)) for _ in range(3)]
    put(database_url, {"aggregate_type": long[0], "aggregate_id": long[1], "event_type": long[2]}, {})
    result = dispatch(ports)
    assert (result.status, result.published, result.refused) == (Status.DONE, 1, 1)
    assert sorted(states(database_url)) == ["held", "published"]
    assert blocked(database_url)[f"{long[0]}/{long[1]}"]["kind"] == "misconfigured"


def test_reserved_headers(database_url: str, broker: Broker, topic: str, ports: Ports) -> None:
    """Headers that a plain INSERT names as ours do not hide the event's own id and type."""
    (event_id,) = put(database_url, {"headers": {"event_id": "another", "event_type": "another", "mine": "kept"}})
    dispatch(ports)
    (record,) = consume_all(broker.bootstrap_servers, topic)
    assert UUID(record.headers["event_id"].decode()) == event_id
    assert record.headers["event_type"] == b"order_placed"
    assert record.headers["mine"] == b"kept"


def test_large_events_again(database_url: str, broker: Broker, topic: str, ports: Ports) -> None:
    """A replay of many large events reads some at a time, and sends each once."""
    put(database_url, *({"aggregate_id": str(number), "payload": {"pad": "x" * 900_000}} for number in range(30)))
    assert dispatch(ports).published == 30
    start(ports, Order(wanted=Wanted(topic=topic)))
    while replay(ports).status is not Status.IDLE:
        pass
    assert len(consume_all(broker.bootstrap_servers, topic)) == 60
