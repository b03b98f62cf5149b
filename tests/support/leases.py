"""Who held which shard and when: a trigger writes it down, the database's clock dates it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

import psutil
import psycopg
from psycopg.rows import class_row

from support.waiting import until

_RECORD = """
CREATE TABLE lease_history (
    number bigint GENERATED ALWAYS AS IDENTITY, at timestamptz NOT NULL DEFAULT clock_timestamp(), shard int NOT NULL,
    owner_before text, until_before timestamptz, owner text, until timestamptz, takeovers int NOT NULL);
CREATE FUNCTION lease_history() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO lease_history (shard, owner_before, until_before, owner, until, takeovers)
    VALUES (new.shard, old.lease_owner, old.leased_until, new.lease_owner, new.leased_until, new.takeovers);
    RETURN NULL;
END $$;
CREATE TRIGGER lease_history AFTER UPDATE ON outbox_shard FOR EACH ROW EXECUTE FUNCTION lease_history();
"""
_HISTORY = """
SELECT at, shard, owner_before, until_before, owner, until, takeovers FROM lease_history ORDER BY number
"""
# Not one statement with OFFSET: that would lock the rows it skips.
_LATCH = """
WITH latched AS MATERIALIZED (SELECT event_id FROM outbox ORDER BY id OFFSET %s)
SELECT FROM outbox WHERE event_id IN (SELECT event_id FROM latched) FOR UPDATE
"""
_BLOCKED = """
SELECT client_port FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()
"""


@dataclass(frozen=True, kw_only=True)
class LeaseChange:
    """One change of one shard's lease; owners are ids of Celery tasks."""

    at: datetime
    shard: int
    owner_before: str | None
    until_before: datetime | None
    owner: str | None
    until: datetime | None
    takeovers: int

    @property
    def is_claim(self) -> bool:
        """Whether a run took the shard."""
        return self.owner is not None and self.owner != self.owner_before

    @property
    def is_takeover(self) -> bool:
        """Whether a run took the shard of one that never gave it back."""
        return self.is_claim and self.owner_before is not None

    @property
    def is_expiry(self) -> bool:
        """Whether somebody ended a lease for its dead owner."""
        return self.owner is not None and self.owner == self.owner_before


def record_leases(database_url: str) -> None:
    """Write down every change of a lease from now on."""
    with psycopg.connect(database_url) as connection:
        connection.execute(_RECORD)


def end_backend(database_url: str, port: int) -> None:
    """End the backend of a client that was killed: left alone, it would carry out the statement it has been sent."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        ended = connection.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE client_port = %s", (port,)
        ).fetchall()
    assert ended == [(True,)]


def lease_history(database_url: str) -> list[LeaseChange]:
    """Return what was written down, in order."""
    with psycopg.connect(database_url) as connection:
        return connection.cursor(row_factory=class_row(LeaseChange)).execute(_HISTORY).fetchall()


def lease_owners(database_url: str) -> set[str]:
    """Return the runs that hold a shard now, or died holding one."""
    with psycopg.connect(database_url) as connection:
        rows = connection.execute("SELECT lease_owner FROM outbox_shard WHERE lease_token IS NOT NULL").fetchall()
    return {row[0] for row in rows}


def database_time(database_url: str) -> datetime:
    """Return the time by the clock that leases go by."""
    with psycopg.connect(database_url) as connection:
        (now,) = connection.execute("SELECT clock_timestamp()").fetchone() or (None,)
    assert isinstance(now, datetime)
    return now


@contextmanager
def settlement_latched(database_url: str, *, spared: int = 0) -> Iterator[psycopg.Connection]:
    """Lock all events but the first `spared`: they can be read and published, but settling them waits.

    Rolling the connection back, or leaving the context, opens the latch.
    """
    with psycopg.connect(database_url) as connection:
        connection.execute(_LATCH, (spared,))
        yield connection


def await_blocked(database_url: str) -> int:
    """Return the client port of the session that waits at the latch, as soon as one does."""

    def look() -> int | None:
        with psycopg.connect(database_url) as connection:
            row = connection.execute(_BLOCKED).fetchone()
        return row[0] if row else None

    port = until(look, "a session waits for a lock")
    assert port is not None
    return port


def owner_of_port(processes: list[psutil.Process], port: int) -> psutil.Process:
    """Return the process that holds the client's end of a connection."""
    (found,) = [
        process
        for process in processes
        if any(connection.laddr and connection.laddr.port == port for connection in process.net_connections("tcp"))
    ]
    return found
