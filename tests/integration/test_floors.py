"""Floors: what was published is not read again, however long a snapshot is held, and nothing is passed over."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, LiteralString
from uuid import uuid4

import psycopg
import pytest
from support.consuming import consume_all, payloads
from support.relaying import (
    assert_consistent,
    execute,
    insert,
    keys_of_one_shard,
    new_topic,
    numbered,
    put,
    relay,
    relay_settings,
    rows,
    store_connection,
)

from outbox_tasks.relay.dispatch import dispatch
from outbox_tasks.store.events import READ_PENDING
from outbox_tasks.store.leases import CLAIM
from outbox_tasks.store.settle import SETTLE
from outbox_tasks.testing.services import Broker
from outbox_tasks.upkeep.partitions import maintain_partitions

EVENTS, FEW, PORTIONS = 20_000, 1000, 5
"""How many events pass while a snapshot is held, how many before and after, and in how many portions."""


@pytest.fixture(autouse=True)
def consistent(database_url: str) -> Iterator[None]:
    """Look, after each test, at what must always hold."""
    yield
    assert_consistent(database_url)


@contextmanager
def snapshot_held(database_url: str) -> Iterator[None]:
    """Hold a snapshot open, as a dump or somebody's report does."""
    with psycopg.connect(database_url) as other:
        other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        other.execute("SELECT count(*) FROM outbox")
        yield


def pages(database_url: str, statement: LiteralString, **parameters: object) -> int:
    """Return how many pages a statement touches."""
    with closing(store_connection(database_url)) as connection, connection.transaction(force_rollback=True):
        explain = b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement.encode()
        row = connection.execute(explain, parameters).fetchone()
    assert row is not None
    plan: dict[str, Any] = row[0] if isinstance(row[0], dict) else row[0][0]
    return int(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])


def pages_of_an_idle_claim(database_url: str) -> int:
    """Return how many pages a claim touches that finds nothing."""
    return pages(database_url, CLAIM, token=uuid4(), owner="run", limit=16, seconds=60, deaths=3)


def pages_of_an_idle_read(database_url: str) -> int:
    """Return how many pages a read of all shards touches, each from its floor, that finds nothing."""
    floors = {row["shard"]: row["floor"] for row in rows(database_url, "SELECT shard, floor FROM outbox_shard")}
    return pages(
        database_url, READ_PENDING, shards=list(floors), after=list(floors.values()), limit=15, bytes=1_000_000
    )


def publish(database_url: str, broker: Broker, topic: str, count: int) -> None:
    """Write so many events over many keys and publish them, in one process that lives on as a child does."""
    write = """
        INSERT INTO outbox (aggregate_type, aggregate_id, event_type, topic, payload)
        SELECT 'order', (i %% 1000)::text, 'placed', %s, '{}' FROM generate_series(1, %s) AS i
    """
    with relay(relay_settings(database_url, broker)) as ports:
        for _ in range(PORTIONS):
            execute(database_url, write, topic, count // PORTIONS)
            assert dispatch(ports).published == count // PORTIONS


def test_a_held_snapshot_does_not_make_claims_and_reads_dear(database_url: str, tansu: Broker) -> None:
    """An idle claim and read touch less than three times the pages after many events passed under a held snapshot."""
    topic = new_topic(tansu)
    publish(database_url, tansu, topic, FEW)
    claim, read = pages_of_an_idle_claim(database_url), pages_of_an_idle_read(database_url)
    with snapshot_held(database_url):
        publish(database_url, tansu, topic, EVENTS)
        publish(database_url, tansu, topic, FEW)
        assert pages_of_an_idle_claim(database_url) < 3 * claim
        assert pages_of_an_idle_read(database_url) < 3 * read


def test_a_transaction_that_stays_open_holds_the_floor(database_url: str, tansu: Broker) -> None:
    """However many runs pass meanwhile, an event is published that was written before them and committed after."""
    topic = new_topic(tansu)
    first, second = keys_of_one_shard(database_url, 2)
    settings = relay_settings(database_url, tansu, routes={"order": topic})
    with psycopg.connect(database_url) as late, relay(settings) as ports:
        insert(late, *numbered([first], each=1))
        for _ in range(6):
            put(database_url, *numbered([second], each=5))
            assert dispatch(ports).published == 5
        late.commit()
        assert dispatch(ports).published == 1
    assert payloads(consume_all(tansu.bootstrap_servers, topic))[first] == [0]


def test_the_youngest_transaction_holds_the_floor(database_url: str, tansu: Broker) -> None:
    """An event is not passed over whose transaction is younger than all that have ended: no snapshot names it."""
    topic = new_topic(tansu)
    first, second = keys_of_one_shard(database_url, 2)
    settings = relay_settings(database_url, tansu, routes={"order": topic})
    with psycopg.connect(database_url) as older, psycopg.connect(database_url) as late, relay(settings) as ports:
        insert(older, *numbered([second], each=1))
        insert(late, *numbered([first], each=1))
        assert dispatch(ports).published == 0
        older.commit()
        assert dispatch(ports).published == 1
        late.commit()
        assert dispatch(ports).published == 1


def test_floors_rise(database_url: str, tansu: Broker) -> None:
    """The floor of a shard is at what was published last once the next run of the process has passed."""
    topic = new_topic(tansu)
    with relay(relay_settings(database_url, tansu)) as ports:
        for _ in range(4):
            put(database_url, *numbered(["1"], each=3, topic=topic))
            assert dispatch(ports).published == 3
    (found,) = rows(database_url, "SELECT max(floor) AS floor, (SELECT max(id) FROM outbox) AS last FROM outbox_shard")
    assert found["last"] - 3 <= found["floor"] <= found["last"]


def test_an_event_under_the_floor_is_found_by_the_next_maintenance(database_url: str, tansu: Broker) -> None:
    """An event that somebody gave an old id by hand is published after the next maintenance, and told of."""
    topic = new_topic(tansu)
    with relay(relay_settings(database_url, tansu)) as ports:
        for _ in range(4):
            put(database_url, *numbered(["1"], each=3, topic=topic))
            dispatch(ports)
        execute(
            database_url,
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, topic, payload) "
            """VALUES (0, 'order', '1', 'placed', %s, '{"key": "1", "number": 99}')""",
            topic,
        )
        assert dispatch(ports).published == 0
        assert maintain_partitions(ports).as_dict()["missed"] == [0]
        assert dispatch(ports).published == 1


def test_a_new_event_has_a_transaction_before_it_has_an_id(database_url: str) -> None:
    """A transaction that draws an id is known to others as running by then: the horizon rests on that."""
    found = rows(
        database_url,
        """
        SELECT pg_get_expr(adbin, adrelid) AS text FROM pg_attrdef AS d
          JOIN pg_attribute AS a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
         WHERE adrelid = 'outbox'::regclass AND attname = 'id'
        """,
    )
    with psycopg.connect(database_url) as writer:
        assert transaction_of(writer) is None
        writer.execute(f"SELECT {found[0]['text']}".encode())
        assert transaction_of(writer) is not None


def transaction_of(connection: psycopg.Connection[Any]) -> int | None:
    """Return the id of the transaction a connection is in, if it has one by now."""
    row = connection.execute("SELECT pg_current_xact_id_if_assigned()::text::bigint").fetchone()
    return row[0] if row else None


@pytest.mark.parametrize("statement", [CLAIM, SETTLE])
def test_the_sequence_is_read_under_its_lock(statement: str) -> None:
    """What a run takes for the last id drawn is never ahead of what was: `nextval` shows more for a moment."""
    assert "pg_sequence_last_value('outbox_id_seq')" in statement
    assert "FROM outbox_id_seq" not in statement
