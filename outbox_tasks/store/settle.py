"""Writes down what became of a batch, in one short transaction that a lost lease turns into nothing."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar
from uuid import UUID

from psycopg.types.json import Jsonb

from outbox_tasks.event import Event
from outbox_tasks.store import blocked_keys, leases
from outbox_tasks.store.connection import Connection

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


# Marks events published. The caller holds the lease on them, locked, so nobody else changes these rows; the range
# of ids lets whole partitions be passed over.
PUBLISHED = """
UPDATE outbox SET state = 'published', published_at = clock_timestamp()
 WHERE event_id = ANY(%(ids)s) AND event_id BETWEEN %(first)s AND %(last)s AND state = %(state)s
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
UPDATE outbox SET state = 'held'
 WHERE event_id = ANY(%(ids)s) AND event_id BETWEEN %(first)s AND %(last)s AND state = %(state)s
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
    return {"ids": ids, "first": min(ids), "last": max(ids)}


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
