"""Days made ahead, days past retention removed, the DEFAULT partition and the books cleaned."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from statistics import quantiles
from time import monotonic
from typing import Any
from uuid import UUID

import psycopg
import pytest
from support.relaying import Row, execute, relay, relay_settings, rows, store_connection
from support.waiting import until

from outbox_tasks.ports import Ports
from outbox_tasks.store import partitions
from outbox_tasks.store.connection import Connection
from outbox_tasks.upkeep.partitions import MOVABLE, maintain_partitions, name_of

NOON = timedelta(hours=12)
LOCK_SECONDS = 0.3


def day_of(offset: int) -> datetime:
    """Return noon (UTC) of a day counted from today, by the clock the template was migrated by."""
    today = datetime.now(UTC).date() + timedelta(days=offset)
    return datetime(today.year, today.month, today.day, tzinfo=UTC) + NOON


def event_id_at(time: datetime, number: int = 0) -> UUID:
    """Return a UUIDv7 of a time."""
    return UUID(int=(round(time.timestamp() * 1000) << 80) | (7 << 76) | (2 << 62) | number)


def write(database_url: str, time: datetime, *, state: str = "published", count: int = 1) -> None:
    """Write events as they would be if they had been written, and published, at a time."""
    with psycopg.connect(database_url) as connection:
        for number in range(count):
            connection.execute(
                "INSERT INTO outbox (event_id, aggregate_type, aggregate_id, event_type, state, created_at,"
                " published_at) VALUES (%s, 'order', '1', 'placed', %s, %s, %s)",
                (event_id_at(time, number), state, time, time if state == "published" else None),
            )


def days_there(database_url: str) -> set[date]:
    """Return the days that have a partition."""
    with store_connection(database_url) as connection:
        return {partition.day for partition in partitions.find(connection)}


def default_rows(database_url: str) -> list[Row]:
    """Return what is in the DEFAULT partition."""
    return rows(database_url, "SELECT * FROM outbox_default ORDER BY event_id")


@pytest.fixture
def ports(database_url: str) -> Iterator[Ports]:
    """Give maintenance what it works with."""
    with relay(relay_settings(database_url, lock_seconds=LOCK_SECONDS)) as ports:
        yield ports


def test_fortnight(database_url: str, ports: Ports) -> None:
    """Over a fortnight exactly the days of retention, the days ahead and those with something unpublished exist."""
    stuck = {day_of(2).date(), day_of(5).date()}
    for offset in range(15):
        now = day_of(offset)
        write(database_url, now, count=3)
        if now.date() in stuck:
            write(database_url, now + timedelta(seconds=1), state="pending")
        maintain_partitions(ports, now=now)
        kept = {day_of(day).date() for day in range(max(0, offset - 7), offset + 8)}
        assert days_there(database_url) == kept | {day for day in stuck if day <= now.date()}
    left = rows(database_url, "SELECT state, count(*) AS events FROM outbox GROUP BY state ORDER BY state")
    assert left == [{"state": "pending", "events": 2}, {"state": "published", "events": 8 * 3 + 2 * 3}]
    assert not default_rows(database_url)


def test_kept_day_is_named(database_url: str, ports: Ports) -> None:
    """A day that is kept for its unpublished events is named, with how many they are and the oldest of them."""
    write(database_url, day_of(0), state="pending", count=2)
    write(database_url, day_of(0) + timedelta(hours=1), state="pending")
    done = maintain_partitions(ports, now=day_of(20))
    assert done.in_the_way == {name_of(day_of(0).date()): partitions.InTheWay(events=3, oldest=day_of(0))}
    assert "3 unpublished" in str(done.as_dict())


def test_held_events_keep_a_day(database_url: str, ports: Ports) -> None:
    """A day with a held event is never removed."""
    write(database_url, day_of(0), state="held")
    assert maintain_partitions(ports, now=day_of(20)).in_the_way
    assert rows(database_url, "SELECT state FROM outbox") == [{"state": "held"}]


def test_event_that_comes_between_the_look_and_the_lock(database_url: str, ports: Ports) -> None:
    """An event that arrives in an old day after it was found clean keeps that day."""
    name = name_of(day_of(0).date())
    with psycopg.connect(database_url) as writer, ThreadPoolExecutor(1) as pool:
        writer.execute(
            "INSERT INTO outbox (event_id, aggregate_type, aggregate_id, event_type) VALUES (%s, 'a', 'b', 'c')",
            (event_id_at(day_of(0)),),
        )
        removal = pool.submit(partitions.remove, ports.connection, name=name, action="drop", lock_seconds=30)
        pid = ports.connection.info.backend_pid
        until(lambda: _waits(database_url, pid), "the removal waits for the writer")
        writer.commit()
        found = removal.result(timeout=60)
    assert found is not None
    assert found.events == 1


def _waits(database_url: str, pid: int) -> bool:
    query = "SELECT 1 AS yes FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
    return bool(rows(database_url, query, pid))


def test_detach(database_url: str, ports: Ports) -> None:
    """With the action `detach` a day past retention stays as a table of its own."""
    write(database_url, day_of(0), count=2)
    name = name_of(day_of(0).date())
    detaching = replace(ports, settings=ports.settings.model_copy(update={"retention_action": "detach"}))
    assert name in maintain_partitions(detaching, now=day_of(20)).removed
    assert rows(database_url, f"SELECT count(*) AS events FROM {name}") == [{"events": 2}]
    assert not rows(database_url, "SELECT 1 AS yes FROM outbox")


def test_two_at_once(database_url: str, ports: Ports) -> None:
    """Of two maintenances at once one works and the other says that it does not."""
    with store_connection(database_url) as other, partitions.maintenance(other) as alone:
        assert alone
        assert maintain_partitions(ports).as_dict() == {"status": "another maintenance is at work"}
    assert maintain_partitions(ports).alone


def test_missing_today_is_no_outage(database_url: str, ports: Ports) -> None:
    """Events of a day without a partition go to DEFAULT, and into their day once it is made."""
    execute(database_url, f"DROP TABLE {name_of(day_of(0).date())}")
    execute(database_url, "INSERT INTO outbox (aggregate_type, aggregate_id, event_type) VALUES ('a', 'b', 'c')")
    before = default_rows(database_url)
    assert len(before) == 1
    done = maintain_partitions(ports)
    assert done.made == [name_of(day_of(0).date())]
    assert not default_rows(database_url)
    assert rows(database_url, "SELECT * FROM outbox") == before


def test_too_many_to_move(database_url: str, ports: Ports) -> None:
    """A day of which DEFAULT has many events stays there, nothing is locked for long, and the result says so."""
    execute(database_url, f"DROP TABLE {name_of(day_of(0).date())}")
    execute(
        database_url,
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type)"
        " SELECT 'a', 'b', 'c' FROM generate_series(1, %s)",
        MOVABLE + 1,
    )
    done = maintain_partitions(ports)
    assert done.in_default == {name_of(day_of(0).date()): MOVABLE + 1}
    assert done.made == []
    assert len(default_rows(database_url)) == MOVABLE + 1


@pytest.mark.parametrize(
    "event_id", [UUID(int=0), UUID(int=2**128 - 1), event_id_at(datetime(9999, 12, 31, tzinfo=UTC))]
)
def test_absurd_ids(database_url: str, ports: Ports, event_id: UUID) -> None:
    """Ids with absurd times do no harm, and their events go when they are past retention."""
    old = datetime.now(UTC) - timedelta(days=8)
    for state, published_at in (("pending", None), ("published", old)):
        execute(database_url, "DELETE FROM outbox")
        execute(
            database_url,
            "INSERT INTO outbox (event_id, aggregate_type, aggregate_id, event_type, state, published_at)"
            " VALUES (%s, 'a', 'b', 'c', %s, %s)",
            event_id,
            state,
            published_at,
        )
        maintain_partitions(ports)
        assert len(default_rows(database_url)) == (state == "pending")


def test_decided_dead_letters_go(database_url: str, ports: Ports) -> None:
    """Dead letters go 90 days after they were decided on, and never before anybody has."""
    for number, resolution in enumerate([None, "discarded", "redriven"]):
        execute(
            database_url,
            "INSERT INTO outbox_dead_letter (event_id, id, aggregate_type, aggregate_id, event_type, headers,"
            " created_at, attempts, error, ordering_key, died_at, resolution, resolved_at)"
            " VALUES (%s, 1, 'a', 'b', 'c', '{}', now(), 1, 'e', 'a/b', now() - interval '1 year', %s,"
            "         CASE WHEN %s::text IS NOT NULL THEN now() - interval '89 days' END)",
            UUID(int=number),
            resolution,
            resolution,
        )
    maintain_partitions(ports)
    assert len(rows(database_url, "SELECT 1 AS yes FROM outbox_dead_letter")) == 3
    maintain_partitions(ports, now=datetime.now(UTC) + timedelta(days=2))
    assert rows(database_url, "SELECT resolution FROM outbox_dead_letter") == [{"resolution": None}]


class _Killed(psycopg.Connection[Any]):
    """A connection whose process is killed instead of sending its n-th statement."""

    statements_left: int = 0

    def execute(self, *arguments: Any, **options: Any) -> Any:
        """Count down, and die."""
        if self.statements_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.statements_left -= 1
        return super().execute(*arguments, **options)


def _maintain_until_killed(database_url: str, statements: int, now: datetime) -> int:
    """Run a maintenance in a process of its own that dies before its n-th statement; returns how it ended."""
    pid = os.fork()
    if pid == 0:
        try:
            settings = relay_settings(database_url, lock_seconds=LOCK_SECONDS)
            connection: Connection = _Killed.connect(settings.conninfo, autocommit=True)
            connection.statements_left = statements  # type: ignore[attr-defined]
            maintain_partitions(_bare_ports(settings, connection), now=now)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _bare_ports(settings: Any, connection: Connection) -> Ports:
    return Ports(connection=connection, publisher=None, settings=settings, owner="killed")  # type: ignore[arg-type]


@pytest.mark.parametrize("part", range(4))
def test_killed_at_every_statement(database_url: str, ports: Ports, part: int) -> None:
    """A maintenance killed before any of its statements leaves everything to the next one, and loses nothing."""
    now, statements, ended = day_of(10), part, -signal.SIGKILL
    while ended == -signal.SIGKILL:
        _prepare(database_url)
        ended = _maintain_until_killed(database_url, statements, now)
        until(lambda: maintain_partitions(ports, now=now).alone, "the server sees that the killed one is gone")
        _assert_maintained(database_url, now)
        statements += 4
    assert statements > 20


def _prepare(database_url: str) -> None:
    """Make a table with something to do for every step."""
    execute(database_url, "DELETE FROM outbox")
    for partition in days_there(database_url):
        execute(database_url, f"DROP TABLE {name_of(partition)}")
    for offset in (0, 1, 2):
        execute(database_url, "SELECT outbox_make_partition(%s)", day_of(offset).date())
        write(database_url, day_of(offset))
    write(database_url, day_of(1) + timedelta(seconds=1), state="pending")
    write(database_url, day_of(12), state="pending")  # lies in DEFAULT: its day is not made yet
    write(database_url, day_of(-30))  # lies in DEFAULT, past retention


def _assert_maintained(database_url: str, now: datetime) -> None:
    ahead = {(now + timedelta(days=days)).date() for days in range(8)}
    assert days_there(database_url) == ahead | {day_of(1).date()}
    assert not default_rows(database_url)
    unpublished = rows(database_url, "SELECT event_id FROM outbox WHERE state = 'pending' ORDER BY event_id")
    assert [row["event_id"] for row in unpublished] == [
        event_id_at(day_of(1) + timedelta(seconds=1)),
        event_id_at(day_of(12)),
    ]


def test_writers_never_wait_long(database_url: str, ports: Ports) -> None:
    """While days are made, dropped and detached under a reader that holds the table, no insert waits or fails."""
    stop = threading.Event()
    with ThreadPoolExecutor(2) as pool, psycopg.connect(database_url) as reader:
        reader.execute("SELECT count(*) FROM outbox")  # and holds its locks until it ends
        writer = pool.submit(_write_steadily, database_url, stop)
        try:
            busy = _churn(ports)
            reader.rollback()
            free = _churn(ports)
        finally:
            stop.set()
        waits = writer.result(timeout=60)
    assert busy
    assert not free
    assert len(waits) > 200
    assert quantiles(waits, n=100)[98] < 2 * LOCK_SECONDS
    assert max(waits) < 4 * LOCK_SECONDS


def _churn(ports: Ports) -> list[str]:
    """Have maintenances make days and remove days, by dropping and by detaching; returns what they found busy."""
    busy: list[str] = []
    for offset, action in ((30, "drop"), (60, "detach")):
        settings = ports.settings.model_copy(update={"retention_action": action})
        busy += maintain_partitions(replace(ports, settings=settings), now=day_of(offset)).busy
    return busy


def _write_steadily(database_url: str, stop: threading.Event) -> list[float]:
    """Insert 200 events a second until told to stop; returns how long each took."""
    waits: list[float] = []
    with psycopg.connect(database_url, autocommit=True) as connection:
        while not stop.wait(0.005):
            started = monotonic()
            connection.execute("INSERT INTO outbox (aggregate_type, aggregate_id, event_type) VALUES ('a', 'b', 'c')")
            waits.append(monotonic() - started)
    return waits
