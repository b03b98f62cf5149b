"""Writes down what became of a batch, in one short transaction that a lost lease turns into nothing."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Generic, Literal, TypeVar
from uuid import UUID

from psycopg.types.json import Jsonb

from outbox_tasks.event import Event
from outbox_tasks.store import blocked_keys, leases
from outbox_tasks.store.connection import Connection
from outbox_tasks.store.horizon import Seen

Kind = Literal["refused", "misconfigured", "exhausted"]

Leased = TypeVar("Leased", int, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An event that Kafka, or a check before sending, did not take.

    `kind` refused: it is this event's fault and costs it an attempt; exhausted: the last one. misconfigured: it is
    not the event's fault. `topic`: where it was to go, if known. `retry_seconds`: when its key is tried again.
    """

    event: Event
    kind: Kind
    topic: str | None
    reason: str
    retry_seconds: float

    @property
    def cause(self) -> str:
        """What has to be put right: the topic, or, where there is none, what the reason says."""
        return self.topic or self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What became of a batch. Events in none of the three stay as they are."""

    published: Sequence[Event] = ()
    refused: Sequence[Refusal] = ()
    followers: Sequence[Event] = ()

    def of(self, shards: Collection[int]) -> "Settlement":
        """Return the part that concerns some shards."""
        return Settlement(
            published=[event for event in self.published if event.shard in shards],
            refused=[refusal for refusal in self.refused if refusal.event.shard in shards],
            followers=[event for event in self.followers if event.shard in shards],
        )

    def of_keys(self, keys: Collection[str]) -> "Settlement":
        """Return the part that concerns some ordering keys."""
        return Settlement(
            published=[event for event in self.published if event.ordering_key in keys],
            refused=[refusal for refusal in self.refused if refusal.event.ordering_key in keys],
        )


# Writes down a batch that was published whole, and gives back the shards that are done with it, noting their floors.
# Locks the run's leases first; of a shard whose lease was lost nothing is written. `shard + 0` keeps the planner from
# going through all that is pending in the shards; the state is a parameter for the same reason. partition_key is set
# to itself because PostgreSQL 18, where an update touches nothing a generated column depends on, prepares those
# columns anew for every row: a third of the statement's time. Commits without waiting for the disk: what a crash loses
# is published again.
SETTLE = """
WITH mine AS MATERIALIZED (
    SELECT shard FROM outbox_shard
     WHERE lease_token = %(token)s AND shard = ANY(%(shards)s) ORDER BY shard FOR UPDATE
), published AS (
    UPDATE outbox AS o
       SET state = 'published', published_at = clock_timestamp(), partition_key = o.partition_key
     WHERE o.event_id = ANY(%(ids)b) AND o.event_id BETWEEN %(first)s AND %(last)s AND o.state = %(state)s
       AND o.shard + 0 = ANY(ARRAY(SELECT shard FROM mine))
), freed AS (
    UPDATE outbox_shard AS s
       SET lease_token = NULL, lease_owner = NULL, leased_until = NULL, takeovers = 0, suspect = NULL,
           floor = greatest(s.floor, done.floor)
      FROM mine JOIN unnest(%(done)s::smallint[], %(floors)s::bigint[]) AS done (shard, floor)
        ON done.shard = mine.shard
     WHERE s.shard = mine.shard
)
SELECT array(SELECT shard FROM mine),
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint, pg_current_xact_id_if_assigned()::text::bigint,
       coalesce(pg_sequence_last_value('outbox_id_seq'), 0),
       set_config('synchronous_commit', 'off', true)
"""

# Marks events published. The caller holds the lease on them, locked, so nobody else changes these rows; the range
# of ids lets whole partitions be passed over. As for partition_key, see above.
PUBLISHED = """
UPDATE outbox SET state = 'published', published_at = clock_timestamp(), partition_key = partition_key
 WHERE event_id = ANY(%(ids)b) AND event_id BETWEEN %(first)s AND %(last)s AND state = %(state)s
"""

PATIENCE = 20
"""A key that waits for a topic another key is tried for comes to its own turn this many waits later, in case."""

# Blocks keys, or says why they are blocked now. Rows that were there are locked already. Of the keys that wait for one
# thing to be put right (a topic, or a route) one is tried every interval, for all: the first, if there is none yet.
BLOCK = """
INSERT INTO outbox_blocked_key AS b (ordering_key, topic, event_id, kind, reason, retry_at)
SELECT r.ordering_key, r.topic, r.event_id, r.kind, r.reason,
       clock_timestamp() + interval '1 second' * r.retry_seconds * CASE
           WHEN r.kind = 'exhausted' THEN NULL
           WHEN r.kind = 'misconfigured' AND (r.place > 1 OR EXISTS (
                SELECT FROM outbox_blocked_key AS tried
                 WHERE tried.kind = 'misconfigured' AND tried.ordering_key <> r.ordering_key
                   AND md5(coalesce(tried.topic, tried.reason)) = md5(coalesce(r.topic, r.reason))
                   AND tried.retry_at <= clock_timestamp() + interval '1 second' * r.retry_seconds))
           THEN %(patience)s
           ELSE 1 END
  FROM (SELECT *, row_number() OVER (PARTITION BY kind, coalesce(topic, reason) ORDER BY ordering_key) AS place
          FROM jsonb_to_recordset(%(refusals)s) AS given (
               ordering_key text, topic text, event_id uuid, kind text, reason text, retry_seconds float8)) AS r
 ORDER BY r.ordering_key
    ON CONFLICT (ordering_key) DO UPDATE
   SET topic = excluded.topic, event_id = excluded.event_id, kind = excluded.kind, reason = excluded.reason,
       retry_at = excluded.retry_at, takeovers = 0,
       lease_token = NULL, lease_owner = NULL, leased_until = NULL
"""

# Marks the refused events themselves; only what is the event's own fault counts as an attempt.
REFUSED = """
UPDATE outbox AS o
   SET state = 'held', last_error = r.reason, attempts = o.attempts + (r.kind <> 'misconfigured')::int
  FROM jsonb_to_recordset(%(refusals)s) AS r (event_id uuid, kind text, reason text)
 WHERE o.event_id = r.event_id AND o.event_id BETWEEN %(first)s AND %(last)s AND o.state = %(state)s
"""

# Marks events that wait behind a refused one. The state is a parameter: as a constant it lets a plan made while a
# partition was empty go through all that is pending there.
HOLD = """
UPDATE outbox SET state = 'held', partition_key = partition_key
 WHERE event_id = ANY(%(ids)b) AND event_id BETWEEN %(first)s AND %(last)s AND state = %(state)s
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(Generic[Leased]):
    """What was written down, and which of the shards or keys asked for are still leased."""

    written: Settlement
    leased: frozenset[Leased]


def settle(connection: Connection, settlement: Settlement, *, token: UUID, shards: Collection[int]) -> Settled[int]:
    """Write down what became of pending events of leased shards.

    Nothing is written of a shard whose lease `token` no longer holds, nor of a follower whose key is blocked no more.
    Lock order: shards, blocked keys, events.
    """
    with connection.transaction():
        leased = frozenset(leases.lock(connection, token=token, shards=shards))
        mine = settlement.of(leased)
        written = replace(mine, followers=_still_blocked(connection, mine))
        _block(connection, written.refused)
        _mark_published(connection, written.published, state="pending")
        _mark_refused(connection, written.refused, state="pending")
        _hold(connection, written.followers)
    return Settled(written=written, leased=leased)


def settle_published(
    connection: Connection, events: Sequence[Event], *, token: UUID, shards: Collection[int], done: Mapping[int, int]
) -> tuple[frozenset[int], Seen]:
    """Write down, in one statement, that all of a batch was published; returns which of `shards` were still leased.

    `done` are the shards to give back, with their floors. Nothing is written of a shard whose lease was lost.
    """
    parameters = _ids(events) | {"token": token, "shards": list(shards), "state": "pending"}
    given = {"done": list(done), "floors": list(done.values())}
    row = connection.execute(SETTLE, parameters | given).fetchone()
    assert row is not None
    return frozenset(row[0]), Seen(*row[1:4])


def settle_held(connection: Connection, settlement: Settlement, *, token: UUID, keys: Collection[str]) -> Settled[str]:
    """Write down what became of held events of leased keys, and free the keys that hold nothing any more.

    Nothing is written of a key whose lease `token` no longer holds; a refused key's lease is given back. Where a key
    moved that had waited for a topic, the others that wait for it are due at once. Lock order: blocked keys, events.
    """
    with connection.transaction():
        leased = blocked_keys.lock_leased_keys(connection, token=token, keys=keys)
        mine = settlement.of_keys(leased)
        _mark_published(connection, mine.published, state="held")
        _mark_refused(connection, mine.refused, state="held")
        _block(connection, mine.refused)
        freed = blocked_keys.free_keys(connection, token=token, keys=leased)
    _wake_fellows(connection, mine, causes=leased, freed=freed)
    refused = {refusal.event.ordering_key for refusal in mine.refused}
    return Settled(written=mine, leased=frozenset(leased).difference(freed, refused))


def _wake_fellows(
    connection: Connection, settlement: Settlement, *, causes: Mapping[str, str | None], freed: Collection[str]
) -> None:
    """Make keys due that wait for a topic or a route another key is tried for, once that key waits for it no more."""
    moved = {event.ordering_key for event in settlement.published}.union(freed)
    for refusal in settlement.refused:
        same = refusal.kind == "misconfigured" and causes[refusal.event.ordering_key] == refusal.cause
        (moved.discard if same else moved.add)(refusal.event.ordering_key)
    working = {cause for key in moved if (cause := causes[key]) is not None}
    if working:
        blocked_keys.make_due(connection, causes=working)


def _still_blocked(connection: Connection, settlement: Settlement) -> list[Event]:
    """Lock every blocked key of a settlement, in one go and in order; return the followers that have to wait."""
    refused = {refusal.event.ordering_key for refusal in settlement.refused}
    keys = refused | {event.ordering_key for event in settlement.followers}
    blocked = refused.union(blocked_keys.lock_keys(connection, keys=keys)) if keys else refused
    return [event for event in settlement.followers if event.ordering_key in blocked]


def _block(connection: Connection, refusals: Sequence[Refusal]) -> None:
    if refusals:
        connection.execute(BLOCK, {"refusals": _as_records(refusals), "patience": PATIENCE})


def _mark_published(connection: Connection, events: Sequence[Event], *, state: str) -> None:
    if events:
        connection.execute(PUBLISHED, _ids(events) | {"state": state})


def _mark_refused(connection: Connection, refusals: Sequence[Refusal], *, state: str) -> None:
    if refusals:
        ids = _ids(refusal.event for refusal in refusals)
        connection.execute(REFUSED, ids | {"refusals": _as_records(refusals), "state": state})


def _hold(connection: Connection, events: Sequence[Event]) -> None:
    if events:
        connection.execute(HOLD, _ids(events) | {"state": "pending"})


def _ids(events: Iterable[Event]) -> dict[str, object]:
    ids = [event.event_id for event in events]
    by_number = attrgetter("int")  # a third of the time of comparing UUIDs
    return {"ids": ids, "first": min(ids, key=by_number), "last": max(ids, key=by_number)}


def _as_records(refusals: Iterable[Refusal]) -> Jsonb:
    return Jsonb([_as_record(refusal) for refusal in refusals])


def _as_record(refusal: Refusal) -> dict[str, object]:
    return {
        "ordering_key": refusal.event.ordering_key,
        "topic": refusal.topic,
        "event_id": str(refusal.event.event_id),
        "kind": refusal.kind,
        "reason": refusal.reason,
        "retry_seconds": refusal.retry_seconds,
    }
