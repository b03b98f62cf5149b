"""PostgreSQL's notifications of new events: a trigger that sends them, off by default, and who listens."""

import psycopg
from psycopg import sql

from outbox_tasks.settings import Settings
from outbox_tasks.store.connection import NETWORK, Connection, set_lock_timeout

CHANNEL = "outbox"

_CONNECT_SECONDS = 5

IS_ON = "SELECT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'outbox'::regclass AND tgname = 'outbox_notify')"

# Of the whole server, from 0 to 1. At 1 every commit that notifies fails, in whatever database and on any channel.
QUEUE_USAGE = "SELECT pg_notification_queue_usage()"

# Fires once a statement: what all writers name is the parent. Making it (SHARE ROW EXCLUSIVE) and dropping it (ACCESS
# EXCLUSIVE) wait for writers that are under way, and writers for them.
SWITCH_ON = "CREATE TRIGGER outbox_notify AFTER INSERT ON outbox FOR EACH STATEMENT EXECUTE FUNCTION outbox_notify()"
SWITCH_OFF = "DROP TRIGGER outbox_notify ON outbox"

LISTEN = sql.SQL("LISTEN {}").format(sql.Identifier(CHANNEL))


def is_on(connection: Connection) -> bool:
    """Return whether inserts notify."""
    row = connection.execute(IS_ON).fetchone()
    return row is not None and bool(row[0])


def queue_usage(connection: Connection) -> float:
    """Return how full the server's queue of notifications is, from 0 to 1."""
    row = connection.execute(QUEUE_USAGE).fetchone()
    return 0.0 if row is None else float(row[0])


def switch(connection: Connection, *, on: bool, lock_seconds: float) -> None:
    """Have inserts notify, or not.

    Raises:
        psycopg.errors.LockNotAvailable: the table was busy for `lock_seconds`.
    """
    with connection.transaction():
        set_lock_timeout(connection, lock_seconds)
        connection.execute(SWITCH_ON if on else SWITCH_OFF)


def listen(settings: Settings) -> Connection:
    """Open a connection that hears of every insert committed from now on.

    Raises:
        psycopg.OperationalError: no database answered in time.
        psycopg.errors.ReadOnlySqlTransaction: it is a standby.
    """
    connection = psycopg.connect(
        settings.conninfo,
        autocommit=True,
        connect_timeout=_CONNECT_SECONDS,
        application_name=f"{settings.client_id} listener",
        **NETWORK,
    )
    try:
        connection.execute(LISTEN)
    except BaseException:
        connection.close()
        raise
    return connection


def hear(connection: Connection, *, seconds: float) -> bool:
    """Wait for notifications, and take all that have come; returns whether there was one.

    Raises:
        psycopg.OperationalError: the connection is lost.
    """
    return any([*connection.notifies(timeout=seconds, stop_after=1)])
