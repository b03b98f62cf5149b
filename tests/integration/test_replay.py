"""Published events sent again: which, in what order, how fast, and after a kill."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.consuming import ConsumedRecord, consume_all
from support.relaying import execute, numbered, put, relay, relay_settings, rows, table, with_settings

from outbox_tasks.errors import InvalidFilterError
from outbox_tasks.ports import Ports
from outbox_tasks.relay.dispatch import dispatch
from outbox_tasks.relay.replay import REPLAY_HEADER, Order, read_order, replay, start
from outbox_tasks.relay.result import Status
from outbox_tasks.store import replays
from outbox_tasks.store.replays import Wanted
from outbox_tasks.testing.services import Broker

KEYS = [f"key-{number}" for number in range(20)]


@pytest.fixture
def ports(database_url: str, broker: Broker, topic: str) -> Iterator[Ports]:
    """Give a replay what it works with; the rate lets a test's events go in a few ticks."""
    with relay(relay_settings(database_url, broker, routes={"order": topic}, replay_rate=400)) as ports:
        yield ports


def publish(database_url: str, ports: Ports, *, each: int = 50, **columns: Any) -> None:
    """Write events over 20 keys and publish them."""
    put(database_url, *numbered(KEYS, each=each, **columns))
    assert dispatch(ports).published == each * len(KEYS)


def tick_to_the_end(ports: Ports, *, ticks: int = 1000) -> int:
    """Send until nothing is left, as beat would; returns how many ticks that took."""
    for tick in range(ticks):
        if replay(ports).status is Status.IDLE:
            return tick
    raise AssertionError(f"not at the end after {ticks} ticks")


def again(broker: Broker, topic: str) -> list[ConsumedRecord]:
    """Return the records of a topic that were sent again, in order per partition."""
    return [record for record in consume_all(broker.bootstrap_servers, topic) if REPLAY_HEADER in record.headers]


def ids(records: list[ConsumedRecord]) -> list[str]:
    """Return event ids."""
    return [record.headers["event_id"].decode() for record in records]


def by_key(records: list[ConsumedRecord]) -> dict[bytes | None, list[str]]:
    """Return the event ids of each key, in order."""
    found: dict[bytes | None, list[str]] = {}
    for record in records:
        found.setdefault(record.key, []).append(record.headers["event_id"].decode())
    return found


def expected(database_url: str) -> dict[bytes | None, list[str]]:
    """Return what a whole replay has of each key."""
    found: dict[bytes | None, list[str]] = {}
    for row in table(database_url):
        found.setdefault(row["aggregate_id"].encode(), []).append(str(row["event_id"]))
    return found


def test_everything_again(database_url: str, broker: Broker, topic: str, ports: Ports) -> None:
    """A replay sends the same events with the same ids, in order per key, marked, and changes no row."""
    publish(database_url, ports)
    before = table(database_url)
    begun = start(ports, Order(wanted=Wanted(topic=topic)))
    assert begun.total == 1000
    tick_to_the_end(ports)
    sent = again(broker, topic)
    assert by_key(sent) == expected(database_url)
    assert {record.headers[REPLAY_HEADER].decode() for record in sent} == {str(begun.replay_id)}
    assert table(database_url) == before


def test_rate(database_url: str, ports: Ports, topic: str) -> None:
    """A tick sends as many events as the rate allows in a tick, and no more."""
    publish(database_url, ports)
    begun = start(ports, Order(wanted=Wanted(topic=topic), rate=150))
    assert replay(ports).published == 150
    half_as_often = with_settings(ports, replay_tick_seconds=0.5)
    assert replay(half_as_often).published == 75
    found = replays.get(ports.connection, begun.replay_id)
    assert found is not None
    assert found.sent == 225


def test_to_another_topic(database_url: str, broker: Broker, topic: str, ports: Ports) -> None:
    """A replay to another topic sends there and nowhere else."""
    publish(database_url, ports, each=2)
    other = f"{topic}-again"
    broker.create_topic(other)
    start(ports, Order(wanted=Wanted(topic=topic), to_topic=other))
    tick_to_the_end(ports)
    assert by_key(again(broker, other)) == expected(database_url)
    assert not again(broker, topic)


@pytest.mark.parametrize(
    "given",
    [
        {"since": datetime.now(UTC) - timedelta(hours=1), "until": datetime.now(UTC) + timedelta(hours=1)},
        {"aggregate_type": "order", "aggregate_id": "key-3"},
        {"event_type": "order_placed"},
    ],
)
def test_filters(database_url: str, ports: Ports, given: dict[str, Any]) -> None:
    """Events are chosen by time, aggregate and type, and only if they are published."""
    publish(database_url, ports, each=2)
    put(database_url, *numbered(KEYS, each=1, start=2))
    chosen = replays.count(ports.connection, Wanted(**given), routes=ports.settings.routes)
    assert chosen == (2 if "aggregate_id" in given else 40)


def test_filters_that_match_nothing(database_url: str, ports: Ports) -> None:
    """Events of another time, topic or aggregate are not chosen, and such a replay is over at once."""
    publish(database_url, ports, each=1)
    yesterday = datetime.now(UTC) - timedelta(days=1)
    for wanted in (Wanted(until=yesterday), Wanted(topic="another"), Wanted(aggregate_id="another")):
        begun = start(ports, Order(wanted=wanted))
        assert (begun.total, begun.finished_at is not None) == (0, True)


def test_by_id_and_from_default(database_url: str, broker: Broker, topic: str, ports: Ports) -> None:
    """Events are chosen by id; and by the time they were written where their id tells none."""
    publish(database_url, ports, each=1)
    chosen = [row["event_id"] for row in table(database_url)][:3]
    start(ports, Order(wanted=Wanted(ids=chosen)))
    tick_to_the_end(ports)
    assert sorted(ids(again(broker, topic))) == sorted(map(str, chosen))
    put(database_url, {"event_id": "00000000-0000-4000-8000-000000000001"})
    dispatch(ports)
    recently = Wanted(since=datetime.now(UTC) - timedelta(minutes=10))
    assert replays.count(ports.connection, recently, routes={}) == len(KEYS) + 1


def test_killed_half_way(database_url: str, broker: Broker, topic: str, ports: Ports) -> None:
    """A replay of 10,000 that is killed half way goes on where it was: all there, in order, with the same ids."""
    publish(database_url, ports, each=500)
    start(ports, Order(wanted=Wanted(topic=topic), rate=5_300))
    assert replay(ports).published == 5_300
    _die_in_mid_tick(ports)
    execute(database_url, "UPDATE outbox_replay SET leased_until = clock_timestamp() WHERE lease_token IS NOT NULL")
    tick_to_the_end(ports)
    sent = again(broker, topic)
    first_seen = {key: list(dict.fromkeys(found)) for key, found in by_key(sent).items()}
    assert first_seen == expected(database_url)
    assert len(sent) > 10_000  # the kill came between sending and noting: that chunk was sent twice


def _die_in_mid_tick(ports: Ports) -> None:
    """Send a chunk as a run does that dies before it notes it."""
    with relay(ports.settings, owner="dies") as dying:
        token = dying.new_token()
        found = replays.claim(dying.connection, token=token, owner="dies", seconds=60)
        assert found is not None
        chunk = replays.next_chunk(dying.connection, replay_id=found.replay_id)
        assert chunk is not None
        from outbox_tasks.relay.replay import _send  # noqa: PLC0415 - the half of a tick before the death

        fate, _ = _send(found, chunk, dying, limit=200, end=dying.deadline(30))
        assert len(fate.published) == 200


def test_lost_lease_notes_nothing(database_url: str, ports: Ports, topic: str) -> None:
    """A run whose replay was taken over notes nothing."""
    publish(database_url, ports, each=2)
    begun = start(ports, Order(wanted=Wanted(topic=topic)))
    stale, fresh = ports.new_token(), ports.new_token()
    replays.claim(ports.connection, token=stale, owner="stale", seconds=0)
    replays.claim(ports.connection, token=fresh, owner="fresh", seconds=60)
    progress = replays.Progress(sent=40, refused=0, left=[])
    assert not replays.note(ports.connection, progress, replay_id=begun.replay_id, place=0, token=stale)
    found = replays.get(ports.connection, begun.replay_id)
    assert found is not None
    assert found.sent == 0
    assert replays.next_chunk(ports.connection, replay_id=begun.replay_id) is not None


def test_broker_away(database_url: str, ports: Ports, topic: str) -> None:
    """A replay waits for a broker that is away, and loses nothing by it."""
    publish(database_url, ports, each=2)
    start(ports, Order(wanted=Wanted(topic=topic)))
    with relay(relay_settings(database_url, routes=ports.settings.routes, probe_seconds=0.2)) as offline:
        assert replay(offline).status is Status.UNAVAILABLE
    assert replay(ports).published == 40


def test_cancel(database_url: str, ports: Ports, topic: str) -> None:
    """A cancelled replay sends nothing more."""
    publish(database_url, ports, each=2)
    begun = start(ports, Order(wanted=Wanted(topic=topic), rate=10))
    assert replay(ports).published == 10
    assert replays.cancel(ports.connection, replay_id=begun.replay_id)
    assert not replays.cancel(ports.connection, replay_id=begun.replay_id)
    assert replay(ports).status is Status.IDLE
    assert not rows(database_url, "SELECT 1 AS yes FROM outbox_replay_chunk")


@pytest.mark.parametrize(
    ("given", "named"),
    [({}, "all"), ({"colour": "red"}, "colour"), ({"since": "soon"}, "since"), ({"rate": "x"}, "int")],
)
def test_orders_that_make_no_sense(given: dict[str, object], named: str) -> None:
    """An order that is empty, or has an unknown name or a wrong value, is refused with that name."""
    with pytest.raises(InvalidFilterError, match=named):
        read_order(given)
