"""Shard leases: who may publish a shard, for how long, proved by a token."""

from collections.abc import Collection
from dataclasses import dataclass
from uuid import UUID

from outbox_tasks.store.connection import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The shards a run may publish; `more` says that others were left for another run."""

    shards: tuple[int, ...] = ()
    more: bool = False


# Claims free shards that have something pending, least recently claimed first.
# Locks the rows it takes; SKIP LOCKED passes over those another claim or settlement holds, and the conditions are
# looked at again once a row is locked, so two claims never get one shard. LATERAL … LIMIT 1 asks each shard's
# index once: a semi-join might read every pending event instead. A token that is still there when its time has
# passed belongs to a run that never released it: that is a takeover.
CLAIM = """
WITH candidate AS MATERIALIZED (
    SELECT s.shard
      FROM outbox_shard AS s
     CROSS JOIN LATERAL (
           SELECT FROM outbox AS o WHERE o.shard = s.shard AND o.state = 'pending' LIMIT 1) AS something
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
    RETURNING s.shard
)
SELECT shard, (SELECT count(*) FROM candidate) > %(limit)s FROM claimed
"""

# Keeps, until the transaction ends, the leases that are still this token's. A shard taken over is not returned;
# whoever wants to take one over meanwhile skips the locked row.
LOCK = """
SELECT shard FROM outbox_shard
 WHERE lease_token = %(token)s AND shard = ANY(%(shards)s)
 ORDER BY shard
   FOR UPDATE
"""

# Gives leases back. Changes nothing where the token has been replaced.
RELEASE = """
UPDATE outbox_shard
   SET lease_token = NULL, lease_owner = NULL, leased_until = NULL, takeovers = 0
 WHERE lease_token = %(token)s AND shard = ANY(%(shards)s)
"""

# Ends the leases of a run that died: free at once, but still marked as taken over from somebody.
EXPIRE = """
UPDATE outbox_shard SET leased_until = clock_timestamp() WHERE lease_owner = %(owner)s AND lease_token IS NOT NULL
"""

EXPIRE_KEYS = """
UPDATE outbox_blocked_key SET leased_until = clock_timestamp() WHERE lease_owner = %(owner)s AND lease_token IS NOT NULL
"""


def claim(connection: Connection, *, token: UUID, owner: str, limit: int, seconds: float) -> Claim:
    """Lease up to `limit` free shards with something pending, for `seconds` of the database's clock."""
    parameters = {"token": token, "owner": owner, "limit": limit, "seconds": seconds}
    rows = connection.execute(CLAIM, parameters).fetchall()
    return Claim(shards=tuple(sorted(row[0] for row in rows)), more=bool(rows) and bool(rows[0][1]))


def lock(connection: Connection, *, token: UUID, shards: Collection[int]) -> list[int]:
    """Return those of `shards` that are still leased by `token`, locked until the transaction ends."""
    return [row[0] for row in connection.execute(LOCK, {"token": token, "shards": list(shards)})]


def release(connection: Connection, *, token: UUID, shards: Collection[int]) -> None:
    """Give shards back at once."""
    if shards:
        connection.execute(RELEASE, {"token": token, "shards": list(shards)})


def expire(connection: Connection, *, owner: str) -> int:
    """End every lease of a run that cannot release them itself; returns how many there were."""
    shards = connection.execute(EXPIRE, {"owner": owner}).rowcount
    return shards + connection.execute(EXPIRE_KEYS, {"owner": owner}).rowcount
