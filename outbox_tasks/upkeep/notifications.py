"""Switches PostgreSQL's notifications on and off, without making writers wait for long."""

from outbox_tasks.settings import Settings
from outbox_tasks.store import notifications
from outbox_tasks.store.connection import Connection
from outbox_tasks.upkeep.locks import asking_again

ATTEMPTS = 20
"""How often the lock is asked for."""

PAUSE_SECONDS = 1.0
"""Longest pause between two attempts: writers that queued up behind the first one go on meanwhile."""


def switch(connection: Connection, settings: Settings, *, on: bool) -> bool:
    """Have every insert notify, or none; returns whether that is new.

    Raises:
        psycopg.errors.LockNotAvailable: the table was busy at each of 20 attempts.
    """
    if notifications.is_on(connection) == on:
        return False
    attempts = asking_again(attempts=ATTEMPTS, pause_seconds=PAUSE_SECONDS)
    attempts(notifications.switch, connection, on=on, lock_seconds=settings.lock_seconds)
    return True
