"""Shard leases: who may publish a shard, for how long, proved by a token."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from uuid import UUID

from outbox_tasks.store.connection import Connection
from outbox_tasks.store.horizon import Seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The shards a run may publish, with their floors; `more` says that others were left for another run.

    Nothing of a shard is pending at its floor, an id, or below. `shaken` are those of the shards that were taken over
    from runs that died, without progress since; `deadly` those with which `DEATHS` runs in a row died, or one while it
    handled a single event.
    """

    floors: dict[int, int]
    shaken: frozenset[int]
    deadly: frozenset[int]
    more: bool
    seen: Seen

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards, in order."""
        return tuple(self.floors)


DEATHS = 3
"""How many runs may die with a shard, without progress, before it is published one event at a time."""


# Claims free shards that have something pending, least recently claimed first.
# Locks the rows it takes; SKIP LOCKED passes over those another claim or settlement holds, and the conditions are
# looked at again once a row is locked, so two claims never get one shard. LATERAL … LIMIT 1 asks each shard's
# index once, from its floor: a semi-join might read every pending event instead. A token that is still there when
# its time has passed belongs to a run that never released it: that is a takeover. Commits without waiting for the
# disk: a lease a crash loses was proof of nothing yet, and what was published under it is published again.
CLAIM = """
WITH candidate AS MATERIALIZED (
    SELECT s.shard
      FROM outbox_shard AS s
     CROSS JOIN LATERAL (
           SELECT FROM outbox AS o
            WHERE o.shard = s.shard AND o.state = 'pending' AND o.id > s.floor LIMIT 1) AS something
     WHERE s.leased_until IS NULL OR s.leased_until <= clock_timestamp()
     ORDER BY s.claimed_at NULLS FIRST
     LIMIT %(limit)s + 1
       FOR UPDATE OF s SKIP LOCKED
), numbered AS (
    SELECT shard, row_number() OVER () AS place FROM candidate
), claimed AS (
    UPDATE outbox_shard AS s
       SET lease_token = %(token)s,
           lease_owner = %(owner)s,
           leased_until = clock_timestamp() + %(seconds)s * interval '1 second',
           claimed_at = clock_timestamp(),
           takeovers = s.takeovers + (s.lease_token IS NOT NULL)::int
      FROM numbered
     WHERE numbered.shard = s.shard AND numbered.place <= %(limit)s
    RETURNING s.shard, s.floor, s.takeovers > 0 AS shaken,
              s.takeovers >= %(deaths)s OR s.suspect IS NOT NULL AS deadly
)
SELECT c.shard, c.floor, c.shaken, c.deadly, (SELECT count(*) FROM candidate) > %(limit)s,
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint, pg_current_xact_id_if_assigned()::text::bigint,
       coalesce(pg_sequence_last_value('outbox_id_seq'), 0),
       set_config('synchronous_commit', 'off', true)
  FROM (SELECT) AS always LEFT JOIN claimed AS c ON true
"""

# Keeps, until the transaction ends, the leases that are still this token's. A shard taken over is not returned;
# whoever wants to take one over meanwhile skips the locked row.
LOCK = """
SELECT shard FROM outbox_shard
 WHERE lease_token = %(token)s AND shard = ANY(%(shards)s)
 ORDER BY shard
   FOR UPDATE
"""

# Gives leases back, and notes the floors. Changes nothing where the token has been replaced.
RELEASE = """
UPDATE outbox_shard AS s
   SET lease_token = NULL, lease_owner = NULL, leased_until = NULL, takeovers = 0, suspect = NULL,
       floor = greatest(s.floor, given.floor)
  FROM unnest(%(shards)s::smallint[], %(floors)s::bigint[]) AS given (shard, floor)
 WHERE s.lease_token = %(token)s AND s.shard = given.shard
"""

# Gives leases back of shards the run did not come to: what is known of earlier deaths stays known.
PUT_BACK = """
UPDATE outbox_shard SET lease_token = NULL, lease_owner = NULL, leased_until = NULL
 WHERE lease_token = %(token)s AND shard = ANY(%(shards)s)
"""

# Forgets earlier deaths once a shard moves on. Changes nothing where the token has been replaced.
FORGET_DEATHS = """
UPDATE outbox_shard SET takeovers = 0
 WHERE lease_token = %(token)s AND shard = ANY(%(shards)s) AND takeovers > 0
"""

# Notes which event a run is about to handle on its own: the first pending one. Reads no payload, for that may be
# what kills. Locks the run's own lease.
SUSPECT = """
UPDATE outbox_shard AS s SET suspect = head.event_id
  FROM (SELECT o.event_id, o.id FROM outbox AS o
         WHERE o.shard = %(shard)s AND o.state = 'pending'
           AND o.id > (SELECT floor FROM outbox_shard WHERE shard = %(shard)s)
         ORDER BY o.id LIMIT 1) AS head
 WHERE s.lease_token = %(token)s AND s.shard = %(shard)s
RETURNING head.id
"""

# Blocks the keys of the events that killed the runs which handled them on their own, before anything reads these
# events again. A key that is blocked already stays as it is, though locked: its turn, or a person's decision, comes
# first. Lock order: shards, the events, their keys; nobody else changes pending events of leased shards.
ACCUSE = """
WITH mine AS MATERIALIZED (
    SELECT shard, suspect FROM outbox_shard
     WHERE lease_token = %(token)s AND suspect IS NOT NULL ORDER BY shard FOR UPDATE
), guilty AS (
    UPDATE outbox AS o SET state = 'held', attempts = o.attempts + 1, last_error = %(reason)s
      FROM mine WHERE o.event_id = mine.suspect AND o.state = 'pending'
    RETURNING o.ordering_key, o.topic, o.event_id
), blocked AS (
    INSERT INTO outbox_blocked_key AS b (ordering_key, topic, event_id, kind, reason)
    SELECT ordering_key, topic, event_id, 'exhausted', %(reason)s FROM guilty ORDER BY ordering_key
        ON CONFLICT (ordering_key) DO UPDATE SET reason = b.reason
), cleared AS (
    UPDATE outbox_shard AS s SET suspect = NULL, takeovers = 0 FROM mine WHERE s.shard = mine.shard
)
SELECT event_id FROM guilty
"""

# Lowers the floor of a shard in which something under it is pending after all, as an event that was given its id by
# hand. Only of a free shard: whoever leases it would raise it again. Locks the shard's row.
LOWER_FLOOR = """
WITH free AS MATERIALIZED (
    SELECT shard, floor FROM outbox_shard WHERE shard = %(shard)s AND lease_token IS NULL FOR UPDATE
), missed AS MATERIALIZED (
    SELECT free.shard, first.id
      FROM free CROSS JOIN LATERAL (
           SELECT o.id FROM outbox AS o
            WHERE o.shard = free.shard AND o.state = 'pending' AND o.id <= free.floor ORDER BY o.id LIMIT 1) AS first
), lowered AS (
    UPDATE outbox_shard AS s SET floor = missed.id - 1 FROM missed WHERE s.shard = missed.shard
)
SELECT missed.id FROM free LEFT JOIN missed ON true
"""

# Ends the leases of a run that died: free at once, but still marked as taken over from somebody.
EXPIRE = """
UPDATE outbox_shard SET leased_until = clock_timestamp() WHERE lease_owner = %(owner)s AND lease_token IS NOT NULL
"""

# Takes the locks in the order of the keys, as settlements do.
EXPIRE_KEYS = """
WITH theirs AS MATERIALIZED (
    SELECT ordering_key FROM outbox_blocked_key
     WHERE lease_owner = %(owner)s AND lease_token IS NOT NULL ORDER BY ordering_key FOR UPDATE
)
UPDATE outbox_blocked_key AS b SET leased_until = clock_timestamp()
  FROM theirs WHERE theirs.ordering_key = b.ordering_key
"""

# Gives back the leases of a run that lost its connection, but lives: nobody died.
GIVE_BACK = """
UPDATE outbox_shard SET lease_token = NULL, lease_owner = NULL, leased_until = NULL, suspect = NULL
 WHERE lease_owner = %(owner)s
"""

# Takes the locks in the order of the keys, as settlements do.
GIVE_BACK_KEYS = """
WITH theirs AS MATERIALIZED (
    SELECT ordering_key FROM outbox_blocked_key
     WHERE lease_owner = %(owner)s AND lease_token IS NOT NULL ORDER BY ordering_key FOR UPDATE
)
UPDATE outbox_blocked_key AS b SET lease_token = NULL, lease_owner = NULL, leased_until = NULL
  FROM theirs WHERE theirs.ordering_key = b.ordering_key
"""


def claim(connection: Connection, *, token: UUID, owner: str, limit: int, seconds: float) -> Claim:
    """Lease up to `limit` free shards with something pending, for `seconds` of the database's clock."""
    parameters = {"token": token, "owner": owner, "limit": limit, "seconds": seconds, "deaths": DEATHS}
    found = connection.execute(CLAIM, parameters).fetchall()
    rows = sorted(row for row in found if row[0] is not None)
    return Claim(
        floors={row[0]: row[1] for row in rows},
        shaken=frozenset(row[0] for row in rows if row[2]),
        deadly=frozenset(row[0] for row in rows if row[3]),
        more=found[0][4],
        seen=Seen(*found[0][5:8]),
    )


def lock(connection: Connection, *, token: UUID, shards: Collection[int]) -> list[int]:
    """Return those of `shards` that are still leased by `token`, locked until the transaction ends."""
    return [row[0] for row in connection.execute(LOCK, {"token": token, "shards": list(shards)})]


def release(connection: Connection, *, token: UUID, floors: Mapping[int, int]) -> None:
    """Give shards back at once; nothing of them is pending at these floors or below."""
    if floors:
        connection.execute(RELEASE, {"token": token, "shards": list(floors), "floors": list(floors.values())})


def put_back(connection: Connection, *, token: UUID, shards: Collection[int]) -> None:
    """Give shards back that were not touched."""
    if shards:
        connection.execute(PUT_BACK, {"token": token, "shards": list(shards)})


def forget_deaths(connection: Connection, *, token: UUID, shards: Collection[int]) -> None:
    """Note that shards moved on: earlier deaths had other causes than their oldest event."""
    connection.execute(FORGET_DEATHS, {"token": token, "shards": list(shards)})


def suspect(connection: Connection, *, token: UUID, shard: int) -> int | None:
    """Note the first pending event of a shard as the one about to be handled; returns its id, None if there is none."""
    row = connection.execute(SUSPECT, {"token": token, "shard": shard}).fetchone()
    return None if row is None else int(row[0])


def accuse(connection: Connection, *, token: UUID) -> list[UUID]:
    """Block the keys of events that were being handled when the last run died; returns these events' ids."""
    reason = "the process died each time it handled this event, last when it handled nothing else"
    return [row[0] for row in connection.execute(ACCUSE, {"token": token, "reason": reason})]


@dataclass(frozen=True, slots=True)
class Look:
    """What there was under a floor: an event's id, or nothing; `done` is false where the shard was leased."""

    done: bool
    missed: int | None = None


def look_under_floor(connection: Connection, *, shard: int) -> Look:
    """Have a free shard read from the first event under its floor that is pending, if there is one."""
    row = connection.execute(LOWER_FLOOR, {"shard": shard}).fetchone()
    return Look(done=False) if row is None else Look(done=True, missed=row[0])


# The same for a replay.
GIVE_BACK_REPLAY = """
UPDATE outbox_replay SET lease_token = NULL, lease_owner = NULL, leased_until = NULL WHERE lease_owner = %(owner)s
"""


def give_back(connection: Connection, *, owner: str) -> None:
    """Give back every lease of a run that lost its connection before it could."""
    connection.execute(GIVE_BACK, {"owner": owner})
    connection.execute(GIVE_BACK_KEYS, {"owner": owner})
    connection.execute(GIVE_BACK_REPLAY, {"owner": owner})


def expire(connection: Connection, *, owner: str) -> int:
    """End every lease of a run that cannot release them itself; returns how many there were."""
    connection.execute(GIVE_BACK_REPLAY, {"owner": owner})
    shards = connection.execute(EXPIRE, {"owner": owner}).rowcount
    return shards + connection.execute(EXPIRE_KEYS, {"owner": owner}).rowcount
