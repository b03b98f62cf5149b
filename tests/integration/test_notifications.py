"""What PostgreSQL's notifications cost others: no two-phase commits, and a queue that a listener can fill up."""

import traceback
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from support.relaying import insert, relay_settings, rows, states
from support.waiting import until

from outbox_tasks import append, waker
from outbox_tasks.publishing.factory import new_publisher
from outbox_tasks.store.connection import connect
from outbox_tasks.testing.services import PostgresServer, scratch_directory
from outbox_tasks.upkeep.check import Finding, check
from outbox_tasks.upkeep.notifications import switch


def switched(database_url: str, *, on: bool) -> None:
    """Switch notifications on or off, as `outbox notify` does."""
    settings = relay_settings(database_url)
    with connect(settings) as connection:
        assert switch(connection, settings, on=on)


def found(database_url: str, **changed: Any) -> Finding:
    """Return what `outbox check` finds of notifications."""
    settings = relay_settings(database_url, probe_seconds=0.1, **changed)
    publisher = new_publisher(settings)
    findings = {finding.subject: finding for finding in check(settings, publisher)}
    publisher.close()
    return findings["notifications"]


# what check says


@pytest.mark.parametrize("on", [True, False])
def test_who_notifies_is_heard(database_url: str, *, on: bool) -> None:
    """Where inserts notify and workers listen, or neither, nothing is wrong."""
    if on:
        switched(database_url, on=True)
    assert found(database_url, listen=on) == Finding("notifications", right=True, detail="on" if on else "off")


def test_inserts_that_notify_nobody(database_url: str) -> None:
    """Where inserts notify and no worker listens the line says what that costs, and both ways out."""
    switched(database_url, on=True)
    finding = found(database_url)
    assert not finding.right
    for way in ("commits wait for each other", "set outbox_listen", "`outbox notify off`"):
        assert way in finding.detail


def test_workers_that_listen_to_nothing(database_url: str) -> None:
    """Where workers listen and inserts do not notify the line says so, and both ways out."""
    finding = found(database_url, listen=True)
    assert not finding.right
    for way in ("`outbox notify on`", "outbox_listen"):
        assert way in finding.detail


# two-phase commits


def prepare_an_event(database_url: str, xid: str) -> None:
    """Write an event and prepare its transaction, without deciding on it."""
    with closing(psycopg.connect(database_url)) as connection:
        connection.tpc_begin(xid)
        insert(connection, {})
        connection.tpc_prepare()


def test_a_two_phase_commit_fails_where_inserts_notify(database_url: str) -> None:
    """With notifications on PostgreSQL refuses to prepare a transaction that wrote an event, and undoes it."""
    switched(database_url, on=True)
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="cannot PREPARE a transaction"):
        prepare_an_event(database_url, "broken")
    assert states(database_url) == []
    assert rows(database_url, "SELECT * FROM pg_prepared_xacts WHERE database = current_database()") == []


def test_a_two_phase_commit_works_where_they_do_not(database_url: str) -> None:
    """With notifications off, as they come, and after they were switched off, two-phase commits write events."""
    switched(database_url, on=True)
    switched(database_url, on=False)
    xid = f"whole-{uuid4().hex}"  # of the whole server
    prepare_an_event(database_url, xid)
    assert states(database_url) == []
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.tpc_commit(xid)
    assert states(database_url) == ["pending"]


class Counter:
    """Counts how often the relay was woken."""

    wakes = 0

    def wake(self) -> None:
        """Count."""
        self.wakes += 1


def test_a_two_phase_session_where_inserts_notify(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With notifications on a two-phase Session fails to commit an event, with an error about its clean-up; no wake."""
    counter = Counter()
    monkeypatch.setattr(waker, "_installed", counter)
    switched(database_url, on=True)
    engine = create_engine(database_url.replace("postgresql:", "postgresql+psycopg:"))
    with Session(engine, twophase=True) as session:
        append(session, aggregate_type="order", aggregate_id="42", event_type="order_placed")
        # SQLAlchemy rolls back what could not be prepared, and that there is nothing to roll back is what it tells.
        with pytest.raises(DBAPIError, match=r"prepared transaction with identifier .* does not exist") as caught:
            session.commit()
    assert "cannot PREPARE" in "".join(traceback.format_exception(caught.value))
    engine.dispose()
    assert states(database_url) == []
    assert counter.wakes == 0


# a queue that fills up


@pytest.fixture
def small_queue() -> Iterator[str]:
    """Run a PostgreSQL that keeps half a megabyte of notifications instead of 8 GB; from 17 on that can be set."""
    from outbox_tasks.schema import migrate  # noqa: PLC0415 - so that other tests run whatever state the schema is in

    with scratch_directory("outbox-notify-") as directory, PostgresServer(directory / "postgres") as server:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET max_notify_queue_pages = 64")
        server.restart()
        migrate.upgrade(server.url())
        yield server.url()


def notify_much(database_url: str, kilobytes: int) -> None:
    """Send notifications of so many kilobytes in all."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        for number in range(kilobytes // 7):
            connection.execute("SELECT pg_notify('other', %s)", [f"{number} {'x' * 7000}"])


def commit_one(database_url: str) -> None:
    """Commit one event."""
    with closing(psycopg.connect(database_url)) as connection:
        insert(connection, {})
        connection.commit()


def test_a_listener_that_stands_still(small_queue: str) -> None:
    """While a listener sits in a transaction the queue fills up, which `outbox check` tells, until commits fail."""
    switched(small_queue, on=True)
    with psycopg.connect(small_queue) as listener:
        listener.execute("LISTEN outbox")
        listener.commit()
        listener.execute("SELECT 1")  # begins a transaction that does not end
        assert found(small_queue, listen=True).right
        notify_much(small_queue, 350)
        finding = found(small_queue, listen=True)
        assert not finding.right
        assert "% full" in finding.detail
        with pytest.raises(psycopg.errors.ProgramLimitExceeded, match="too many notifications in the NOTIFY queue"):
            notify_much(small_queue, 350)
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            commit_one(small_queue)
        assert states(small_queue) == []


def test_a_queue_has_room_again_once_it_was_asked_for(small_queue: str) -> None:
    """When the listener has ended, commits go on failing until somebody asks how full the queue is, as `check` does."""
    switched(small_queue, on=True)
    with psycopg.connect(small_queue) as listener:
        listener.execute("LISTEN outbox")
        listener.commit()
        listener.execute("SELECT 1")
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            notify_much(small_queue, 700)
    with pytest.raises(psycopg.errors.ProgramLimitExceeded):
        commit_one(small_queue)
    until(lambda: found(small_queue, listen=True).right, "the listener's backend has ended")
    commit_one(small_queue)
    assert states(small_queue) == ["pending"]
