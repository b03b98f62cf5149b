"""Blocked keys: which may be tried again now, by whom, and when they are free."""

from collections.abc import Collection
from uuid import UUID

from outbox_tasks.store.connection import Connection

# Leases blocked keys that are due, the longest due first. Locks the rows it takes and passes over locked ones, so
# two claims never get one key; a key that waits for a person has no time to be tried at.
CLAIM_KEYS = """
WITH due AS MATERIALIZED (
    SELECT ordering_key FROM outbox_blocked_key
     WHERE retry_at <= clock_timestamp() AND (leased_until IS NULL OR leased_until <= clock_timestamp())
     ORDER BY retry_at
     LIMIT %(limit)s
       FOR UPDATE SKIP LOCKED
)
UPDATE outbox_blocked_key AS b
   SET lease_token = %(token)s,
       lease_owner = %(owner)s,
       leased_until = clock_timestamp() + %(seconds)s * interval '1 second'
  FROM due
 WHERE due.ordering_key = b.ordering_key
RETURNING b.ordering_key
"""

# Looks before the broker is asked for: most ticks find nothing.
ANY_DUE = """
SELECT FROM outbox_blocked_key
 WHERE retry_at <= clock_timestamp() AND (leased_until IS NULL OR leased_until <= clock_timestamp())
 LIMIT 1
"""

# Keeps, until the transaction ends, the leases on keys that are still this token's.
LOCK_LEASED_KEYS = """
SELECT ordering_key FROM outbox_blocked_key
 WHERE lease_token = %(token)s AND ordering_key = ANY(%(keys)s)
 ORDER BY ordering_key
   FOR UPDATE
"""

# Keeps the rows of blocked keys until the transaction ends, so that no retry removes one while events are added
# to it. A row that is gone is not returned.
LOCK_KEYS = """
SELECT ordering_key FROM outbox_blocked_key
 WHERE ordering_key = ANY(%(keys)s)
 ORDER BY ordering_key
   FOR UPDATE
"""

# Frees leased keys that hold nothing any more. The caller has locked their rows, so nothing is added meanwhile.
FREE_KEYS = """
DELETE FROM outbox_blocked_key AS b
 WHERE b.lease_token = %(token)s AND b.ordering_key = ANY(%(keys)s)
   AND NOT EXISTS (SELECT FROM outbox AS o WHERE o.ordering_key = b.ordering_key AND o.state = 'held')
RETURNING b.ordering_key
"""

# Gives leases on keys back. Changes nothing where the token has been replaced.
RELEASE_KEYS = """
UPDATE outbox_blocked_key SET lease_token = NULL, lease_owner = NULL, leased_until = NULL
 WHERE lease_token = %(token)s
"""


def claim_keys(connection: Connection, *, token: UUID, owner: str, limit: int, seconds: float) -> list[str]:
    """Lease up to `limit` blocked keys that are due, for `seconds` of the database's clock."""
    parameters = {"token": token, "owner": owner, "limit": limit, "seconds": seconds}
    return [row[0] for row in connection.execute(CLAIM_KEYS, parameters)]


def lock_leased_keys(connection: Connection, *, token: UUID, keys: Collection[str]) -> list[str]:
    """Return those of `keys` that are still leased by `token`, locked until the transaction ends."""
    return [row[0] for row in connection.execute(LOCK_LEASED_KEYS, {"token": token, "keys": list(keys)})]


def lock_keys(connection: Connection, *, keys: Collection[str]) -> list[str]:
    """Return those of `keys` that are blocked, locked until the transaction ends."""
    return [row[0] for row in connection.execute(LOCK_KEYS, {"keys": list(keys)})]


def free_keys(connection: Connection, *, token: UUID, keys: Collection[str]) -> list[str]:
    """Remove those of the leased, locked `keys` that hold nothing; returns them."""
    return [row[0] for row in connection.execute(FREE_KEYS, {"token": token, "keys": list(keys)})]


def release_keys(connection: Connection, *, token: UUID) -> None:
    """Give back every key still leased by `token`."""
    connection.execute(RELEASE_KEYS, {"token": token})


def any_due(connection: Connection) -> bool:
    """Say whether a blocked key is due, without locking anything."""
    return connection.execute(ANY_DUE).fetchone() is not None
