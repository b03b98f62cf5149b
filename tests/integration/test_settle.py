"""Settlements: what becomes of a batch is written down once, by who holds the lease, or not at all."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta
from uuid import UUID, uuid4

import psycopg
import pytest
from support.relaying import (
    assert_consistent,
    await_lock,
    block,
    blocked,
    dice,
    end_leases,
    execute,
    key_by_shard,
    keys_of_one_shard,
    make_due,
    numbered,
    pending,
    put,
    refusal,
    rows,
    states,
    store_connection,
    table,
)

from outbox_tasks.event import SHARDS, Event
from outbox_tasks.store import blocked_keys, events, leases
from outbox_tasks.store.connection import Connection
from outbox_tasks.store.settle import Settlement, settle, settle_held

ALL = range(SHARDS)


@pytest.fixture(autouse=True)
def consistent(database_url: str) -> Iterator[None]:
    """Look, after each test, at what must always hold."""
    yield
    assert_consistent(database_url)


@pytest.fixture
def connect() -> Iterator[Callable[[str], Connection]]:
    """Give connections as the relay opens them, and close them at the end."""
    with ExitStack() as opened:
        yield lambda url: opened.enter_context(closing(store_connection(url)))


@pytest.fixture
def connection(connect: Callable[[str], Connection], database_url: str) -> Connection:
    """Open a connection as the relay does."""
    return connect(database_url)


@pytest.fixture
def other(connect: Callable[[str], Connection], database_url: str) -> Connection:
    """Open a second connection."""
    return connect(database_url)


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    """Run beside the test what has to wait for a lock."""
    with ThreadPoolExecutor(2) as pool:
        yield pool


def lease_all(connection: Connection, *, owner: str = "run") -> UUID:
    """Claim every shard with something pending."""
    token = uuid4()
    leases.claim(connection, token=token, owner=owner, limit=SHARDS, seconds=60)
    return token


def lease_keys(connection: Connection, *, limit: int = 100) -> tuple[UUID, list[str]]:
    """Claim blocked keys that are due."""
    token = uuid4()
    return token, list(blocked_keys.claim_keys(connection, token=token, owner="retry", limit=limit, seconds=60))


def held(connection: Connection, *keys: str) -> list[Event]:
    """Read what keys hold."""
    return events.read_held(connection, keys=keys, limit=1000)


def ids_of(written: Settlement) -> list[int]:
    """Return the ids of all events in a settlement."""
    refused = [refusal.event for refusal in written.refused]
    return [event.id for event in (*written.published, *refused, *written.followers)]


# pending events, by shard leases


def test_published_events_are_marked_with_their_time(database_url: str, connection: Connection) -> None:
    """What was published is marked so, with the time; everything else of the batch stays as it was."""
    put(database_url, *numbered(["1", "2"], each=2))
    token, batch = lease_all(connection), pending(connection)
    settled = settle(connection, Settlement(published=batch[:3]), token=token, shards=ALL)
    assert states(database_url) == ["published"] * 3 + ["pending"]
    (row,) = rows(database_url, "SELECT max(clock_timestamp() - published_at) AS ago FROM outbox")
    assert timedelta(0) <= row["ago"] < timedelta(seconds=60)
    assert list(settled.written.published) == batch[:3]


def test_a_settlement_with_a_lost_token_changes_nothing(
    database_url: str, connection: Connection, other: Connection
) -> None:
    """A run whose shards were taken over settles nothing: neither published, refused nor held; the taker goes on."""
    put(database_url, *numbered(["1", "2", "3"], each=2))
    block(database_url, "order/3")
    put(database_url, {"aggregate_id": "3"})
    lost, batch = lease_all(connection, owner="lost"), pending(connection)
    end_leases(database_url)
    taken = lease_all(other, owner="taker")
    before = table(database_url), blocked(database_url).keys()
    settlement = Settlement(published=batch[:1], refused=[refusal(batch[1])], followers=[batch[3], batch[4]])
    settled = settle(connection, settlement, token=lost, shards=ALL)
    assert (table(database_url), blocked(database_url).keys()) == before
    assert settled.leased == frozenset()
    assert ids_of(settled.written) == []
    settle(other, Settlement(published=batch[:4]), token=taken, shards=ALL)
    assert states(database_url).count("published") == 4
    leases.release(other, token=taken, floors=dict.fromkeys(ALL, 0))


def test_of_shards_lost_in_part_the_rest_is_settled(
    database_url: str, connection: Connection, other: Connection
) -> None:
    """Where some of its shards were taken over, a run settles the others and is told which those are."""
    keys = key_by_shard(database_url, 4)
    put(database_url, *numbered(list(keys.values()), each=1))
    token, batch = lease_all(connection), pending(connection)
    lost = batch[1].shard
    execute(database_url, "UPDATE outbox_shard SET leased_until = clock_timestamp() WHERE shard = %s", lost)
    lease_all(other)
    settled = settle(connection, Settlement(published=batch), token=token, shards=keys)
    assert [row["shard"] for row in table(database_url) if row["state"] == "pending"] == [lost]
    assert settled.leased == keys.keys() - {lost}
    assert [event.shard for event in settled.written.published] == [e.shard for e in batch if e.shard != lost]


@pytest.mark.parametrize(("kind", "attempts"), [("refused", 1), ("misconfigured", 0), ("exhausted", 1)])
def test_a_refused_event_is_held_and_blocks_its_key(
    database_url: str, connection: Connection, kind: str, attempts: int
) -> None:
    """A refused event is held, costs an attempt if it is its own fault, and blocks its key; its followers are held."""
    put(database_url, *numbered(["1"], each=3))
    token, batch = lease_all(connection), pending(connection)
    settlement = Settlement(
        published=batch[:1],
        refused=[refusal(batch[1], kind=kind, topic="orders", reason="no good", retry_seconds=30)],
        followers=batch[2:],
    )
    settle(connection, settlement, token=token, shards=ALL)
    assert states(database_url) == ["published", "held", "held"]
    assert [row["attempts"] for row in table(database_url)] == [0, attempts, 0]
    assert [row["last_error"] for row in table(database_url)] == [None, "no good", None]
    key = blocked(database_url)["order/1"]
    assert (key["kind"], key["reason"], key["topic"]) == (kind, "no good", "orders")
    assert key["event_id"] == batch[1].event_id
    assert (key["wait"] is None) == (kind == "exhausted")
    if key["wait"] is not None:
        assert timedelta(0) < key["wait"] <= timedelta(seconds=30)


def test_a_reason_may_hold_anything(database_url: str, connection: Connection) -> None:
    """Quotes, backslashes, percent signs and 4-byte text in a reason or key arrive as they are."""
    nasty = "\"'\\ %s %(x)s {} 𝄞 \n\t $1 \\u0041"
    put(database_url, {"aggregate_id": nasty})
    token, batch = lease_all(connection), pending(connection)
    settle(connection, Settlement(refused=[refusal(batch[0], reason=nasty)]), token=token, shards=ALL)
    assert blocked(database_url)[f"order/{nasty}"]["reason"] == nasty
    assert table(database_url)[0]["last_error"] == nasty


def test_an_empty_settlement_tells_which_leases_are_left(database_url: str, connection: Connection) -> None:
    """Where nothing became of a batch, nothing is written, and the leases are still looked at."""
    put(database_url, *numbered(["1"], each=1))
    token = lease_all(connection)
    settled = settle(connection, Settlement(), token=token, shards=ALL)
    assert len(settled.leased) == 1
    assert states(database_url) == ["pending"]


def test_a_follower_is_held_only_while_its_key_is_blocked(
    database_url: str, connection: Connection, other: Connection, aside: ThreadPoolExecutor
) -> None:
    """A settlement waits for a retry that is freeing the key, and then leaves the followers pending."""
    put(database_url, *numbered(["1"], each=1))
    block(database_url, "order/1")
    put(database_url, *numbered(["1"], each=2, start=1))
    token, batch = lease_all(connection), pending(connection)
    assert [event.blocked for event in batch] == [True, True]
    key_token, keys = lease_keys(other)
    (first,) = held(other, *keys)
    with other.transaction():
        settle_held(other, Settlement(published=[first]), token=key_token, keys=keys)
        waiting = aside.submit(settle, connection, Settlement(followers=batch), token=token, shards=ALL)
        await_lock(database_url, connection)
    settled = waiting.result(timeout=60)
    assert states(database_url) == ["published", "pending", "pending"]
    assert settled.written.followers == []
    assert blocked(database_url) == {}


def test_a_key_is_not_freed_under_a_follower(
    database_url: str, connection: Connection, other: Connection, aside: ThreadPoolExecutor
) -> None:
    """A retry about to free a key waits for a settlement that adds a follower, and then keeps the key."""
    put(database_url, *numbered(["1"], each=1))
    block(database_url, "order/1")
    put(database_url, *numbered(["1"], each=1, start=1))
    token, batch = lease_all(connection), pending(connection)
    key_token, keys = lease_keys(other)
    (first,) = held(other, *keys)
    with connection.transaction():
        settle(connection, Settlement(followers=batch), token=token, shards=ALL)
        waiting = aside.submit(settle_held, other, Settlement(published=[first]), token=key_token, keys=keys)
        await_lock(database_url, other)
    settled = waiting.result(timeout=60)
    assert settled.leased == {"order/1"}
    assert states(database_url) == ["published", "held"]
    last = settle_held(other, Settlement(published=held(other, *keys)), token=key_token, keys=keys)
    assert last.leased == frozenset()
    assert states(database_url) == ["published", "published"]


# held events, by leases on keys


def test_a_key_that_holds_nothing_any_more_is_free(database_url: str, connection: Connection) -> None:
    """A key is freed by the settlement that publishes the last event it holds, and not before."""
    put(database_url, *numbered(["1", "2"], each=2))
    block(database_url, "order/1")
    block(database_url, "order/2")
    token, keys = lease_keys(connection)
    batch = held(connection, *sorted(keys))
    settled = settle_held(connection, Settlement(published=batch[:3]), token=token, keys=keys)
    assert settled.leased == {"order/2"}
    assert blocked(database_url).keys() == {"order/2"}
    assert states(database_url) == ["published"] * 3 + ["held"]


def test_a_held_event_refused_again_gives_its_key_back(database_url: str, connection: Connection) -> None:
    """A held event that is refused again costs another attempt, and its key waits anew, leased by nobody."""
    put(database_url, *numbered(["1"], each=3))
    block(database_url, "order/1")
    token, keys = lease_keys(connection)
    batch = held(connection, *keys)
    again = refusal(batch[1], reason="still no good", retry_seconds=90)
    settled = settle_held(connection, Settlement(published=batch[:1], refused=[again]), token=token, keys=keys)
    assert settled.leased == frozenset()
    key = blocked(database_url)["order/1"]
    assert (key["lease_token"], key["reason"], key["event_id"]) == (None, "still no good", batch[1].event_id)
    assert timedelta(seconds=20) < key["wait"] <= timedelta(seconds=90)
    assert [row["attempts"] for row in table(database_url)] == [0, 1, 0]
    assert states(database_url) == ["published", "held", "held"]


def test_held_events_of_a_lost_key_are_left_alone(database_url: str, connection: Connection, other: Connection) -> None:
    """A retry whose key was taken over settles nothing of it; of its other keys it does."""
    put(database_url, *numbered(["1", "2"], each=1))
    block(database_url, "order/1")
    block(database_url, "order/2")
    token, keys = lease_keys(connection)
    batch = held(connection, *keys)
    execute(
        database_url,
        "UPDATE outbox_blocked_key SET leased_until = clock_timestamp() WHERE ordering_key = 'order/1'",
    )
    _, taken = lease_keys(other)
    assert taken == ["order/1"]
    settled = settle_held(connection, Settlement(published=batch), token=token, keys=keys)
    assert [event.ordering_key for event in settled.written.published] == ["order/2"]
    assert states(database_url) == ["held", "published"]
    assert blocked(database_url)["order/1"]["lease_token"] is not None


def test_a_topic_that_works_again_makes_all_its_keys_due(database_url: str, connection: Connection) -> None:
    """Once one key moves that waited for a topic, the others that wait for it are due; those that wait for else not."""
    put(database_url, *numbered(["1", "2", "3", "4"], each=1))
    waiting = {"1": "orders", "2": "orders", "3": "bills"}
    for name, topic in waiting.items():
        block(database_url, f"order/{name}", kind="misconfigured", topic=topic)
    block(database_url, "order/4", topic="orders")
    later = "UPDATE outbox_blocked_key SET retry_at = clock_timestamp() + interval '1 hour' WHERE ordering_key <> %s"
    execute(database_url, later, "order/1")
    token, keys = lease_keys(connection)
    assert keys == ["order/1"]
    settle_held(connection, Settlement(published=held(connection, *keys)), token=token, keys=keys)
    due = {name for name, key in blocked(database_url).items() if key["wait"] < timedelta(0)}
    assert due == {"order/2"}


def test_one_key_is_tried_for_all_that_wait_for_a_topic(database_url: str, connection: Connection) -> None:
    """Of the keys blocked for a missing topic one has the near time, in one settlement and over several."""
    put(database_url, *numbered([str(n) for n in range(6)], each=1))
    token, batch = lease_all(connection), pending(connection)
    missing = [refusal(event, kind="misconfigured", topic="missing", retry_seconds=30) for event in batch]
    settle(connection, Settlement(refused=missing[:3]), token=token, shards=ALL)
    settle(connection, Settlement(refused=missing[3:]), token=token, shards=ALL)
    near = [key for key in blocked(database_url).values() if key["wait"] <= timedelta(seconds=30)]
    assert len(near) == 1
    assert len(blocked(database_url)) == 6


# locks


GIVING_UP: dict[str, Callable[[Connection, UUID], object]] = {
    "a retry gives its keys back": lambda connection, token: blocked_keys.release_keys(connection, token=token),
    "a rescue ends a dead run's leases": lambda connection, _: leases.expire(connection, owner="retry"),
    "a run that was cut off gives back": lambda connection, _: leases.give_back(connection, owner="retry"),
}


@pytest.mark.parametrize("how", GIVING_UP)
def test_leases_on_keys_end_without_a_deadlock(
    database_url: str, connect: Callable[[str], Connection], aside: ThreadPoolExecutor, how: str
) -> None:
    """Whoever ends leases on several keys takes their locks in the order in which a settlement takes them."""
    connection, other, third = (connect(database_url) for _ in range(3))
    names = keys_of_one_shard(database_url, 3)
    low, middle, high = sorted(f"order/{name}" for name in names)
    # They lie in the table the other way round.
    for key in (high, middle, low):
        put(database_url, {"aggregate_id": key.removeprefix("order/")})
        block(database_url, key)
    put(database_url, *numbered(names, each=1))
    token, batch = lease_all(connection), pending(connection)
    key_token, _ = lease_keys(other)
    with third.transaction():
        third.execute("SELECT FROM outbox_blocked_key WHERE ordering_key = %s FOR UPDATE", [middle])
        ending = aside.submit(GIVING_UP[how], other, key_token)
        await_lock(database_url, other)
        settling = aside.submit(settle, connection, Settlement(followers=batch), token=token, shards=ALL)
        await_lock(database_url, connection)
    ending.result(timeout=60)
    assert settling.result(timeout=60).written.followers == batch
    leases.give_back(other, owner="retry")


def test_settlements_of_both_kinds_never_deadlock_nor_strand_an_event(database_url: str) -> None:
    """Dispatches and retries that settle the same keys at once end without a deadlock, and strand no event."""
    names = [str(number) for number in range(12)]
    put(database_url, *numbered(names, each=20))

    def dispatch(seed: int) -> None:
        chance = dice(seed)
        with closing(store_connection(database_url)) as own:
            for _ in range(60):
                token = uuid4()
                shards = leases.claim(own, token=token, owner="d", limit=chance.randint(1, 12), seconds=60).shards
                if shards:
                    batch = events.read_pending(own, after=dict.fromkeys(shards, 0), limit=3)
                    settle(own, _any_fate(batch, chance), token=token, shards=shards)
                    leases.release(own, token=token, floors=dict.fromkeys(shards, 0))

    def retry(seed: int) -> None:
        chance = dice(seed)
        with closing(store_connection(database_url)) as own:
            for _ in range(120):
                token, keys = lease_keys(own, limit=chance.randint(1, 8))
                if keys:
                    batch = events.read_held(own, keys=keys, limit=3)
                    settle_held(own, _any_fate(batch, chance), token=token, keys=keys)
                    blocked_keys.release_keys(own, token=token)

    with ThreadPoolExecutor(6) as pool:
        runs = [pool.submit(dispatch, seed) for seed in range(3)] + [pool.submit(retry, seed) for seed in range(3, 6)]
        for run in runs:
            run.result(timeout=120)
    _assert_each_key_in_order(database_url)
    make_due(database_url)


def _any_fate(batch: list[Event], chance: random.Random) -> Settlement:
    """Publish some of each key, refuse now and then the next one, and let the rest follow: as a broker might."""
    published, refused, followers = list[Event](), dict[str, Event](), list[Event]()
    left: set[str] = set()
    for event in batch:
        key = event.ordering_key
        if event.blocked or key in refused:
            followers.append(event)
        elif key in left or chance.random() < 0.2:
            left.add(key)
        elif chance.random() < 0.3:
            refused[key] = event
        else:
            published.append(event)
    return Settlement(
        published=published,
        refused=[refusal(event, retry_seconds=0.001) for event in refused.values()],
        followers=followers,
    )


def _assert_each_key_in_order(database_url: str) -> None:
    """Of each key the published come first, then the held, then the pending, with at most one block."""
    order = {"published": 0, "held": 1, "pending": 2}
    for key in {row["ordering_key"] for row in table(database_url)}:
        places = [order[row["state"]] for row in table(database_url) if row["ordering_key"] == key]
        assert places == sorted(places), key


def test_a_settlement_that_fails_writes_nothing(database_url: str, connection: Connection, other: Connection) -> None:
    """A settlement cut off in its midst is undone whole: the lease, the events and the keys are as before."""
    put(database_url, *numbered(["1", "2"], each=2))
    token, batch = lease_all(connection), pending(connection)
    # The second event is locked: the settlement gets as far as its refusal and waits.
    with other.transaction():
        other.execute("SELECT FROM outbox WHERE event_id = %s FOR UPDATE", [batch[1].event_id])
        connection.execute("SET statement_timeout = '300ms'")
        settlement = Settlement(published=batch[:1], refused=[refusal(batch[1])])
        with pytest.raises(psycopg.errors.QueryCanceled):
            settle(connection, settlement, token=token, shards=ALL)
    assert states(database_url) == ["pending"] * 4
    assert blocked(database_url) == {}
    connection.execute("SET statement_timeout = '60s'")
    assert ids_of(settle(connection, settlement, token=token, shards=ALL).written) == [batch[0].id, batch[1].id]
