"""Partitions: one a day, made ahead."""

from outbox_tasks.store.connection import Connection

# Makes one day's partition unless it is there. ATTACH waits for no writer and no writer waits for it, but for
# those that write to the DEFAULT partition: it is locked while it is searched for rows of that day.
MAKE_PARTITION = """
SELECT outbox_make_partition((clock_timestamp() AT TIME ZONE 'UTC')::date + %(ahead)s)
"""


def make_partition(connection: Connection, *, ahead_days: int) -> bool:
    """Make the partition of the day `ahead_days` from today (UTC); false if it was there.

    Raises:
        psycopg.errors.CheckViolation: the DEFAULT partition has rows of that day.
    """
    row = connection.execute(MAKE_PARTITION, {"ahead": ahead_days}).fetchone()
    return bool(row and row[0])
