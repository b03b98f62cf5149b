"""Blocked keys: which may be tried again now, by whom, and when they are free."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from psycopg.rows import class_row

from outbox_tasks.store.connection import Connection

FELLOWS = 10_000
"""How many keys that wait for one thing one key makes due, once it works."""

DEATHS = 3
"""How many runs may die with a key before its oldest event is taken for the cause."""

# Leases blocked keys that are due, the longest due first: the given number, or, where a run died with keys, one of
# those alone. Locks the rows it takes and passes over locked ones, so two claims never get one key.
CLAIM_KEYS = """
WITH due AS MATERIALIZED (
    SELECT ordering_key FROM outbox_blocked_key
     WHERE retry_at <= clock_timestamp() AND (leased_until IS NULL OR leased_until <= clock_timestamp())
       AND (takeovers > 0 OR lease_token IS NOT NULL) = %(died)s
     ORDER BY retry_at
     LIMIT %(limit)s
       FOR UPDATE SKIP LOCKED
)
UPDATE outbox_blocked_key AS b
   SET takeovers = b.takeovers + (b.lease_token IS NOT NULL)::int,
       lease_token = %(token)s,
       lease_owner = %(owner)s,
       leased_until = clock_timestamp() + %(seconds)s * interval '1 second'
  FROM due
 WHERE due.ordering_key = b.ordering_key
RETURNING b.ordering_key, CASE b.kind WHEN 'misconfigured' THEN b.topic END
"""

# Looks, by its own small index, whether there is a key that a run died with.
ANY_DIED = """
SELECT FROM outbox_blocked_key
 WHERE retry_at <= clock_timestamp() AND (leased_until IS NULL OR leased_until <= clock_timestamp())
   AND (takeovers > 0 OR lease_token IS NOT NULL)
 LIMIT 1
"""

# Gives up keys whose oldest event killed run after run: it is to be a dead letter. Passes over locked rows.
EXHAUST_KEYS = """
WITH deadly AS MATERIALIZED (
    SELECT b.ordering_key, head.event_id
      FROM outbox_blocked_key AS b
     CROSS JOIN LATERAL (
           SELECT o.event_id FROM outbox AS o
            WHERE o.ordering_key = b.ordering_key AND o.state = 'held' ORDER BY o.id LIMIT 1) AS head
     WHERE b.lease_token IS NOT NULL AND b.leased_until <= clock_timestamp() AND b.takeovers + 1 >= %(deaths)s
       FOR UPDATE OF b SKIP LOCKED
)
UPDATE outbox_blocked_key AS b
   SET kind = 'exhausted', retry_at = NULL, takeovers = 0, reason = %(reason)s, event_id = deadly.event_id,
       lease_token = NULL, lease_owner = NULL, leased_until = NULL
  FROM deadly
 WHERE deadly.ordering_key = b.ordering_key
RETURNING b.ordering_key
"""

# Makes keys due that wait for a topic or a route that works now: so many, for as they go on they make more due.
# Passes over locked rows: those come to their turn.
MAKE_DUE = """
WITH waiting AS MATERIALIZED (
    SELECT ordering_key FROM outbox_blocked_key
     WHERE kind = 'misconfigured' AND retry_at > clock_timestamp()
       AND md5(coalesce(topic, reason)) = ANY(ARRAY(SELECT md5(cause) FROM unnest(%(causes)s::text[]) AS cause))
     LIMIT %(limit)s
       FOR UPDATE SKIP LOCKED
)
UPDATE outbox_blocked_key AS b SET retry_at = clock_timestamp()
  FROM waiting WHERE waiting.ordering_key = b.ordering_key
"""

# Looks before the broker is asked for: most ticks find nothing.
ANY_DUE = """
SELECT FROM outbox_blocked_key
 WHERE retry_at <= clock_timestamp() AND (leased_until IS NULL OR leased_until <= clock_timestamp())
 LIMIT 1
"""

# Keeps, until the transaction ends, the leases on keys that are still this token's.
LOCK_LEASED_KEYS = """
SELECT ordering_key, CASE kind WHEN 'misconfigured' THEN coalesce(topic, reason) END FROM outbox_blocked_key
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
# OFFSET 0 keeps the look-up one per key, by index: made a join, it goes through all that all keys hold.
FREE_KEYS = """
DELETE FROM outbox_blocked_key AS b
 WHERE b.lease_token = %(token)s AND b.ordering_key = ANY(%(keys)s)
   AND NOT EXISTS (SELECT FROM outbox AS o WHERE o.ordering_key = b.ordering_key AND o.state = 'held' OFFSET 0)
RETURNING b.ordering_key
"""

# Makes one key due, for a person who has put things right. A key that waits for a decision on a dead letter is not.
RETRY_NOW = """
UPDATE outbox_blocked_key SET retry_at = clock_timestamp()
 WHERE ordering_key = %(key)s AND kind IN ('refused', 'misconfigured')
"""

FIND = """
SELECT b.ordering_key, b.topic, b.kind, b.reason, b.event_id, b.blocked_at, b.retry_at, h.held
  FROM outbox_blocked_key AS b
 CROSS JOIN LATERAL (
       SELECT count(*) AS held FROM outbox AS o WHERE o.ordering_key = b.ordering_key AND o.state = 'held') AS h
 WHERE %(key)s::text IS NULL OR b.ordering_key = %(key)s
 ORDER BY b.blocked_at
 LIMIT %(limit)s
"""

# Gives leases on keys back. Changes nothing where the token has been replaced. Takes the locks in the order of the
# keys, as settlements do: else the two could wait for each other.
RELEASE_KEYS = """
WITH mine AS MATERIALIZED (
    SELECT ordering_key FROM outbox_blocked_key WHERE lease_token = %(token)s ORDER BY ordering_key FOR UPDATE
)
UPDATE outbox_blocked_key AS b SET lease_token = NULL, lease_owner = NULL, leased_until = NULL, takeovers = 0
  FROM mine WHERE mine.ordering_key = b.ordering_key
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedKey:
    """A blocked key as a person reads it: why, since when, how many events it holds, when it is tried again."""

    ordering_key: str
    topic: str | None
    kind: str
    reason: str
    event_id: UUID
    blocked_at: datetime
    retry_at: datetime | None
    held: int


def find(connection: Connection, *, key: str | None = None, limit: int = 1000) -> list[BlockedKey]:
    """Return blocked keys, the longest blocked first; locks nothing."""
    with connection.cursor(row_factory=class_row(BlockedKey)) as cursor:
        return cursor.execute(FIND, {"key": key, "limit": limit}).fetchall()


def retry_now(connection: Connection, *, key: str) -> bool:
    """Make a key due at once; false where it is not blocked, or waits for a decision on a dead letter."""
    return connection.execute(RETRY_NOW, {"key": key}).rowcount == 1


def claim_keys(
    connection: Connection, *, token: UUID, owner: str, limit: int, seconds: float
) -> Mapping[str, str | None]:
    """Lease up to `limit` blocked keys that are due, for `seconds` of the database's clock.

    Each comes with the topic that was missing or forbidden when it was last tried, if that is why it is blocked.
    A key a run has died with is leased alone, so that its fellows are not blamed for the next death.
    """
    given: dict[str, object] = {"token": token, "owner": owner, "seconds": seconds}
    died = connection.execute(ANY_DIED).fetchone() is not None
    alone = connection.execute(CLAIM_KEYS, given | {"died": True, "limit": 1}).fetchall() if died else []
    rows = alone or connection.execute(CLAIM_KEYS, given | {"died": False, "limit": limit}).fetchall()
    return dict(rows)


def exhaust_keys(connection: Connection) -> list[str]:
    """Give up keys whose oldest event killed `DEATHS` runs in a row; returns them."""
    reason = f"{DEATHS} runs in a row died while they handled this event"
    return [row[0] for row in connection.execute(EXHAUST_KEYS, {"deaths": DEATHS, "reason": reason})]


def make_due(connection: Connection, *, causes: Collection[str]) -> int:
    """Make every key due that waits for one of these topics, or routes; returns how many there were."""
    return connection.execute(MAKE_DUE, {"causes": list(causes), "limit": FELLOWS}).rowcount


def lock_leased_keys(connection: Connection, *, token: UUID, keys: Collection[str]) -> Mapping[str, str | None]:
    """Return those of `keys` that are still leased by `token`, locked until the transaction ends.

    Each comes with what it waited for to be put right, if it did.
    """
    return dict(connection.execute(LOCK_LEASED_KEYS, {"token": token, "keys": list(keys)}).fetchall())


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
