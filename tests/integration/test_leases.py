"""Leases on shards and on blocked keys: who may publish what, and for how long."""

import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from support.relaying import (
    assert_consistent,
    block,
    blocked,
    dice,
    end_leases,
    execute,
    key_by_shard,
    leased_shards,
    make_due,
    numbered,
    put,
    rows,
    store_connection,
    table,
)

from outbox_tasks.store import blocked_keys, leases
from outbox_tasks.store.connection import Connection
from outbox_tasks.store.leases import Claim


@pytest.fixture(autouse=True)
def consistent(database_url: str) -> Iterator[None]:
    """Look, after each test, at what must always hold."""
    yield
    assert_consistent(database_url)


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    """Open a connection as the relay does."""
    with closing(store_connection(database_url)) as opened:
        yield opened


def claim(connection: Connection, token: UUID, *, limit: int = 64, owner: str = "run", seconds: float = 60) -> Claim:
    """Claim shards as a run does."""
    return leases.claim(connection, token=token, owner=owner, limit=limit, seconds=seconds)


def put_in_shards(database_url: str, count: int) -> list[int]:
    """Write one event into each of `count` shards; returns the shards."""
    keys = key_by_shard(database_url, count)
    put(database_url, *numbered(list(keys.values()), each=1))
    return sorted(keys)


class Holders:
    """Who holds which shard or key, as the holders themselves see it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: set[object] = set()
        self.shared: list[object] = []
        self.seen: set[object] = set()

    def take(self, things: Collection[object]) -> None:
        """Note that somebody has these now; who has them already stands in `shared`."""
        with self._lock:
            self.shared += self._held.intersection(things)
            self._held.update(things)
            self.seen.update(things)

    def give(self, things: Collection[object]) -> None:
        """Note that they are about to be given back."""
        with self._lock:
            self._held.difference_update(things)


def test_concurrent_claims_never_share_a_shard(database_url: str) -> None:
    """However many claim at once, no shard has two holders at any moment, and every shard gets its turn."""
    put(database_url, *numbered([str(key) for key in range(400)], each=1))
    holders, rounds = Holders(), 60

    def work(seed: int) -> None:
        chance = dice(seed)
        with closing(store_connection(database_url)) as own:
            for _ in range(rounds):
                token = uuid4()
                shards = claim(own, token, limit=chance.randint(1, 20)).shards
                holders.take(shards)
                holders.give(shards)
                leases.release(own, token=token, floors=dict.fromkeys(shards, 0))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert holders.shared == []
    assert holders.seen == {row["shard"] for row in table(database_url)}


def test_a_claim_takes_the_shards_that_waited_longest(database_url: str, connection: Connection) -> None:
    """Claimed a few at a time, all shards have their turn before any has its second."""
    shards = put_in_shards(database_url, 9)
    taken: list[int] = []
    for _ in range(6):
        token = uuid4()
        claimed = claim(connection, token, limit=3).shards
        leases.release(connection, token=token, floors=dict.fromkeys(claimed, 0))
        taken += claimed
    assert sorted(taken[:9]) == shards
    assert [set(taken[start : start + 3]) for start in (9, 12, 15)] == [
        set(taken[start : start + 3]) for start in (0, 3, 6)
    ]


@pytest.mark.parametrize(("limit", "taken", "more"), [(1, 1, True), (4, 4, True), (5, 5, False), (64, 5, False)])
def test_a_claim_says_whether_more_is_pending(
    database_url: str, connection: Connection, limit: int, taken: int, *, more: bool
) -> None:
    """A claim says that there is more exactly if free shards with something pending were left."""
    put_in_shards(database_url, 5)
    token = uuid4()
    first = claim(connection, token, limit=limit)
    assert (len(first.shards), first.more) == (taken, more)


def test_a_claim_on_nothing_is_empty(database_url: str, connection: Connection) -> None:
    """Where nothing is pending nothing is claimed: published and held events are not pending."""
    put(database_url, *numbered(["1", "2"], each=1))
    block(database_url, "order/1")
    execute(database_url, "UPDATE outbox SET state = 'published', published_at = now() WHERE ordering_key = 'order/2'")
    assert not claim(connection, uuid4()).floors
    assert leased_shards(database_url) == []


def test_a_lease_in_force_cannot_be_claimed(database_url: str, connection: Connection) -> None:
    """A shard with a lease in force is left alone, and what is left of it is not `more`."""
    put_in_shards(database_url, 3)
    first = claim(connection, uuid4(), limit=2)
    second = claim(connection, uuid4())
    assert len(second.shards) == 1
    assert not set(first.shards) & set(second.shards)
    assert not claim(connection, uuid4()).floors


def test_a_lease_lasts_as_long_as_asked_by_the_databases_clock(database_url: str, connection: Connection) -> None:
    """A lease ends the seconds asked for after the claim, by the clock of the database."""
    put_in_shards(database_url, 1)
    claim(connection, uuid4(), seconds=45)
    (row,) = rows(
        database_url,
        "SELECT leased_until - claimed_at AS lasts, clock_timestamp() - claimed_at AS ago FROM outbox_shard"
        " WHERE lease_token IS NOT NULL",
    )
    assert abs(row["lasts"] - timedelta(seconds=45)) < timedelta(seconds=1)
    assert timedelta(0) <= row["ago"] < timedelta(seconds=30)


def test_an_ended_lease_is_taken_over(database_url: str, connection: Connection) -> None:
    """A lease whose time has passed can be claimed; each such claim in a row counts as one takeover more."""
    (shard,) = put_in_shards(database_url, 1)
    first = claim(connection, uuid4())
    assert (first.shards, first.shaken, first.deadly) == ((shard,), frozenset(), frozenset())
    for takeovers in (1, 2, 3):
        end_leases(database_url)
        again = claim(connection, token := uuid4())
        assert again.shaken == {shard}
        assert again.deadly == (frozenset({shard}) if takeovers >= leases.DEATHS else frozenset())
        assert rows(database_url, "SELECT takeovers FROM outbox_shard WHERE shard = %s", shard) == [
            {"takeovers": takeovers}
        ]
    leases.release(connection, token=token, floors=dict.fromkeys([shard], 0))
    assert claim(connection, uuid4()).shaken == frozenset()


def test_progress_forgets_deaths(database_url: str, connection: Connection) -> None:
    """A shard that moved on after a takeover is sound again, unless its lease is another's by then."""
    (shard,) = put_in_shards(database_url, 1)
    claim(connection, uuid4())
    end_leases(database_url)
    claim(connection, token := uuid4())
    leases.forget_deaths(connection, token=uuid4(), shards=[shard])
    assert rows(database_url, "SELECT 1 AS one FROM outbox_shard WHERE takeovers > 0")
    leases.forget_deaths(connection, token=token, shards=[shard])
    assert not rows(database_url, "SELECT 1 AS one FROM outbox_shard WHERE takeovers > 0")


def test_a_release_with_a_replaced_token_changes_nothing(database_url: str, connection: Connection) -> None:
    """Who lost a lease cannot give it back: it stays the new holder's."""
    (shard,) = put_in_shards(database_url, 1)
    claim(connection, lost := uuid4(), owner="lost")
    end_leases(database_url)
    claim(connection, taken := uuid4(), owner="taken")
    before = rows(database_url, "SELECT * FROM outbox_shard ORDER BY shard")
    leases.release(connection, token=lost, floors=dict.fromkeys([shard], 0))
    assert rows(database_url, "SELECT * FROM outbox_shard ORDER BY shard") == before
    assert leases.lock(connection, token=lost, shards=[shard]) == []
    assert leases.lock(connection, token=taken, shards=[shard]) == [shard]


def test_a_release_frees_at_once(database_url: str, connection: Connection) -> None:
    """What is given back can be claimed at once, and only what was named is given back."""
    shards = put_in_shards(database_url, 3)
    claim(connection, token := uuid4())
    leases.release(connection, token=token, floors=dict.fromkeys(shards[:2], 0))
    assert claim(connection, uuid4()).shards == tuple(shards[:2])


def test_expiring_an_owner_frees_all_it_held(database_url: str, connection: Connection) -> None:
    """The leases of a dead owner, on shards and on keys, are free at once and count as taken over; others' stay."""
    shards = put_in_shards(database_url, 3)
    put(database_url, {"aggregate_id": "blocked"})
    block(database_url, "order/blocked")
    mine = claim(connection, uuid4(), owner="dead", limit=2)
    others = claim(connection, uuid4(), owner="alive")
    blocked_keys.claim_keys(connection, token=uuid4(), owner="dead", limit=9, seconds=60)
    assert leases.expire(connection, owner="dead") == 3
    again = claim(connection, uuid4())
    assert again.shards == mine.shards
    assert again.shaken == set(mine.shards)
    assert sorted(again.shards + others.shards) == shards
    keys = blocked_keys.claim_keys(connection, token=uuid4(), owner="next", limit=9, seconds=60)
    assert list(keys) == ["order/blocked"]


def test_giving_an_owners_leases_back_is_no_death(database_url: str, connection: Connection) -> None:
    """The leases of a run that lost its connection are free at once, and nothing counts as taken over."""
    put_in_shards(database_url, 1)
    claim(connection, uuid4(), owner="cut off")
    leases.give_back(connection, owner="cut off")
    assert leased_shards(database_url) == []
    assert claim(connection, uuid4()).shaken == frozenset()


def test_a_claim_passes_over_a_settlement_in_flight(database_url: str, connection: Connection) -> None:
    """While a settlement holds its leases locked nobody can take them over, even if their time has passed."""
    shards = put_in_shards(database_url, 3)
    claim(connection, token := uuid4(), limit=2)
    end_leases(database_url)
    with closing(store_connection(database_url)) as other:
        with connection.transaction():
            locked = leases.lock(connection, token=token, shards=shards)
            meanwhile = claim(other, uuid4())
            assert set(meanwhile.shards) == set(shards) - set(locked)
        afterwards = claim(other, uuid4())
        assert sorted(afterwards.shards) == sorted(locked)
    assert len(locked) == 2


def test_an_event_written_meanwhile_is_seen(database_url: str, connection: Connection) -> None:
    """A shard becomes claimable with the commit of its first event, not before."""
    with closing(store_connection(database_url)) as writer, writer.transaction():
        writer.execute("INSERT INTO outbox (aggregate_type, aggregate_id, event_type) VALUES ('order', '1', 'placed')")
        assert not claim(connection, uuid4()).floors
    assert len(claim(connection, uuid4()).shards) == 1


def test_concurrent_claims_never_share_a_key(database_url: str) -> None:
    """However many claim blocked keys at once, no key has two holders at any moment."""
    names = [str(number) for number in range(40)]
    put(database_url, *numbered(names, each=1))
    for name in names:
        block(database_url, f"order/{name}")
    holders = Holders()

    def work(seed: int) -> None:
        chance = dice(seed)
        with closing(store_connection(database_url)) as own:
            for _ in range(40):
                token = uuid4()
                keys = blocked_keys.claim_keys(own, token=token, owner="run", limit=chance.randint(1, 12), seconds=60)
                holders.take(keys)
                holders.give(keys)
                blocked_keys.release_keys(own, token=token)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert holders.shared == []
    assert holders.seen == {f"order/{name}" for name in names}


def test_only_keys_that_are_due_are_claimed(database_url: str, connection: Connection) -> None:
    """A key is claimed once its time has come, never before, and not while it waits for anything else."""
    put(database_url, *numbered(["early", "due", "dead"], each=1))
    for name in ("early", "due", "dead"):
        block(database_url, f"order/{name}")
    execute(
        database_url,
        "UPDATE outbox_blocked_key SET retry_at = now() + interval '1 hour' WHERE ordering_key = 'order/early'",
    )
    execute(
        database_url,
        "UPDATE outbox_blocked_key SET kind = 'exhausted', retry_at = NULL WHERE ordering_key = 'order/dead'",
    )
    assert blocked_keys.any_due(connection)
    keys = blocked_keys.claim_keys(connection, token=uuid4(), owner="run", limit=9, seconds=60)
    assert list(keys) == ["order/due"]
    assert not blocked_keys.any_due(connection)


def test_a_key_a_run_died_with_is_claimed_alone(database_url: str, connection: Connection) -> None:
    """A key that a run died with is tried on its own, so that no other is blamed for the next death."""
    put(database_url, *numbered(["1", "2", "3"], each=1))
    for name in "123":
        block(database_url, f"order/{name}")

    def claim_keys(limit: int) -> list[str]:
        return list(blocked_keys.claim_keys(connection, token=uuid4(), owner="run", limit=limit, seconds=60))

    (died,) = claim_keys(1)
    end_leases(database_url)
    assert claim_keys(9) == [died]
    assert sorted([died, *claim_keys(9)]) == ["order/1", "order/2", "order/3"]
    assert blocked(database_url)[died]["takeovers"] == 1


def test_releasing_keys_with_a_replaced_token_changes_nothing(database_url: str, connection: Connection) -> None:
    """Who lost the lease on a key cannot give it back."""
    put(database_url, {"aggregate_id": "1"})
    block(database_url, "order/1")
    blocked_keys.claim_keys(connection, token=(lost := uuid4()), owner="lost", limit=1, seconds=60)
    end_leases(database_url)
    blocked_keys.claim_keys(connection, token=(taken := uuid4()), owner="taken", limit=1, seconds=60)
    blocked_keys.release_keys(connection, token=lost)
    make_due(database_url)
    assert blocked(database_url)["order/1"]["lease_token"] == taken
