"""Opens the relay's own connections, with the session settings the plans and time limits rest on."""

from collections.abc import Callable
from typing import Any

import psycopg

from outbox_tasks.schema import migrate
from outbox_tasks.settings import Settings

Connection = psycopg.Connection[tuple[Any, ...]]

# One round trip for the whole session. Locks are waited for and rows then looked at anew, as READ COMMITTED does.
# Sequential scans off: an index entry is right on an empty, a full and a never-analysed partition alike. Generic
# plans: the statements are few, their parameters change on every run.
SET_SESSION = """
SELECT set_config('statement_timeout', %(milliseconds)s, false),
       set_config('lock_timeout', %(milliseconds)s, false),
       set_config('idle_in_transaction_session_timeout', %(milliseconds)s, false),
       set_config('default_transaction_isolation', 'read committed', false),
       set_config('enable_seqscan', 'off', false),
       set_config('jit', 'off', false),
       set_config('plan_cache_mode', 'force_generic_plan', false)
"""

# Notices a server that vanished without a word: after 5 s of silence ask, every 2 s, three times.
NETWORK: dict[str, Any] = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 11_000,
}


def connect(settings: Settings, *, check: Callable[[Connection], None] = migrate.check) -> Connection:
    """Open a connection in autocommit: every statement is a transaction unless one is begun.

    Raises:
        psycopg.OperationalError: no database answered in time.
        SchemaVersionError: its tables are of another version.
    """
    timeout = settings.statement_seconds
    connection = psycopg.connect(
        settings.conninfo,
        autocommit=True,
        connect_timeout=max(2, round(timeout)),
        application_name=settings.client_id,
        **NETWORK,
    )
    connection.execute(SET_SESSION, {"milliseconds": str(round(timeout * 1000))})
    check(connection)
    return connection


# How long a statement of this transaction waits for a lock, and with it every writer that queues up behind.
SET_LOCK_TIMEOUT = "SELECT set_config('lock_timeout', %(milliseconds)s, true)"


def set_lock_timeout(connection: Connection, seconds: float) -> None:
    """Limit how long the statements of the transaction that is open wait for a lock."""
    connection.execute(SET_LOCK_TIMEOUT, {"milliseconds": str(round(seconds * 1000))})
