"""The thread that listens to PostgreSQL's notifications: it rings for them, and after every loss of its connection."""

import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from support.relaying import put, relay_settings
from support.waiting import until

from outbox_tasks.settings import Settings
from outbox_tasks.store.connection import connect
from outbox_tasks.testing.proxy import TcpProxy
from outbox_tasks.testing.services import PostgresServer, scratch_directory
from outbox_tasks.testing.services.places import LOOPBACK
from outbox_tasks.upkeep.notifications import switch
from outbox_tasks.waking.listener import Listener


class Rings:
    """Counts rings; each waits until it is let go."""

    def __init__(self) -> None:
        self.count = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self) -> None:
        """Ring."""
        self.count += 1
        self.go_on.wait(60)

    def reach(self, count: int) -> None:
        """Return when there were so many rings."""
        until(lambda: self.count >= count, f"there were {count} rings")


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[TcpProxy]:
    """Stand between the listener and the database."""
    with TcpProxy(LOOPBACK, postgres.port) as opened:
        yield opened


@pytest.fixture
def settings(postgres: PostgresServer, proxy: TcpProxy, database_url: str) -> Settings:
    """Lead through the proxy to a database with notifications switched on."""
    given = relay_settings(database_url.replace(f":{postgres.port}/", f":{proxy.port}/"))
    with connect(given) as connection:
        assert switch(connection, given, on=True)
    return given


@pytest.fixture
def rings() -> Rings:
    """Count the rings of this test."""
    return Rings()


@pytest.fixture
def listener(settings: Settings, rings: Rings) -> Iterator[Listener]:
    """Run a listener that has made its connection."""
    started = Listener(settings, rings)
    started.start()
    rings.reach(1)
    yield started
    rings.go_on.set()
    started.stop()


@pytest.mark.usefixtures("listener")
def test_a_commit_is_a_ring(rings: Rings, database_url: str) -> None:
    """A committed INSERT rings, one that is rolled back does not."""
    with psycopg.connect(database_url) as connection:
        connection.execute("INSERT INTO outbox (aggregate_type, aggregate_id, event_type) VALUES ('a', 'b', 'c')")
        connection.rollback()
    assert rings.count == 1
    put(database_url, {})
    rings.reach(2)
    assert rings.count == 2


@pytest.mark.usefixtures("listener")
def test_commits_during_a_ring_are_one_more(rings: Rings, database_url: str) -> None:
    """All that is committed while the bell is being rung makes it ring once more."""
    rings.go_on.clear()
    put(database_url, {})
    rings.reach(2)
    for _ in range(10):
        put(database_url, {})
    rings.go_on.set()
    rings.reach(3)
    put(database_url, {})
    rings.reach(4)
    assert rings.count <= 5  # a notification may come in two parts


@pytest.mark.usefixtures("listener")
def test_a_lost_connection_is_made_again(
    rings: Rings, proxy: TcpProxy, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After the network was cut the listener rings for what it missed, and hears the next event; it told of it once."""
    proxy.cut()
    until(lambda: any("trying again" in line for line in caplog.messages), "the listener cannot connect")
    proxy.heal()
    rings.reach(2)
    put(database_url, {})
    rings.reach(3)
    assert sum("trying again" in line for line in caplog.messages) == 1


def test_it_stops_while_there_is_no_database(listener: Listener, proxy: TcpProxy) -> None:
    """Asked to stop while it tries to connect, the listener ends."""
    proxy.cut()
    listener.stop()
    assert not listener._thread.is_alive()


@pytest.fixture
def standby() -> Iterator[PostgresServer]:
    """Run a database that is a standby until it is promoted."""
    with scratch_directory("outbox-standby-") as directory, PostgresServer(Path(directory) / "postgres") as server:
        server.stop()
        (server.directory / "data" / "standby.signal").touch()
        server.start()
        yield server


def listening(url: str) -> int:
    """Return how many connections listeners have."""
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '% listener'")
        return int((row.fetchone() or (0,))[0])


def test_a_standby_is_asked_again_until_it_is_promoted(
    standby: PostgresServer, rings: Rings, caplog: pytest.LogCaptureFixture
) -> None:
    """A standby, which lets nobody listen, is asked again and kept no connection to; once promoted it is heard."""
    listener = Listener(relay_settings(standby.url()), rings)
    listener.start()
    until(lambda: any("recovery" in line for line in caplog.messages), "the standby refuses")
    with psycopg.connect(standby.url(), autocommit=True) as connection:
        connection.execute("SELECT pg_promote()")
        rings.reach(1)
        assert listening(standby.url()) == 1
        connection.execute("NOTIFY outbox")
    rings.reach(2)
    listener.stop()
