"""The bell in Redis: no ring is lost, none is heard twice, and a Redis that is away costs writers next to nothing."""

import asyncio
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import redis
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from support.waiting import until
from support.waking import keys, messages, service
from support.workers import redis_url_of_its_own

from outbox_tasks import append, wake, waker, worker
from outbox_tasks.ports import SILENCE, Bell
from outbox_tasks.settings import Settings, load
from outbox_tasks.testing.proxy import TcpProxy
from outbox_tasks.testing.services import RedisServer
from outbox_tasks.testing.services.places import LOOPBACK
from outbox_tasks.waking import bell as bell_module
from outbox_tasks.waking import parts, place
from outbox_tasks.waking.bell import Ringer

PLACED: dict[str, Any] = {"aggregate_type": "order", "aggregate_id": "42", "event_type": "order_placed"}

AGES = 600.0
"""No ring of a test is old enough to be taken for lost, so that nothing but an answer ends it."""

PATIENCE = 0.5
"""How long writers of a test wait for a Redis that is away."""


@pytest.fixture
def url(redis_server: RedisServer) -> str:
    """Give a Redis database of this test's own."""
    return redis_url_of_its_own(redis_server)


@pytest.fixture
def app(url: str) -> Iterator[Celery]:
    """Set up a service."""
    with service(url) as given:
        yield given


def new_bell(app: Celery) -> Bell:
    """Return the runs' side of an app's bell."""
    return parts.bell(app, worker.settings_of(app))


def new_ringer(app: Celery) -> Ringer:
    """Return the writers' side of an app's bell, which sends no messages by itself."""
    found = place.find(app, worker.settings_of(app))
    assert found is not None
    return Ringer(found, timeout_seconds=10, lost_after_seconds=AGES)


def messages_after_a_wake(redis_url: str) -> int:
    """Wake the relay, and return how many messages wait then."""
    wake()
    return messages(redis_url)


# rings and answers


def test_many_rings_are_one_message_until_one_is_answered(app: Celery, url: str) -> None:
    """However often writers ring, one message is on its way; after an answer the next ring sends another."""
    for _ in range(5):
        wake()
    assert messages(url) == 1
    with closing(new_bell(app)) as bell:
        bell.answer()
    for _ in range(5):
        wake()
    assert messages(url) == 2


def test_a_ring_that_nobody_answered_gets_old(url: str) -> None:
    """A ring whose message got lost keeps others from ringing no longer than a tick."""
    with service(url, dispatch_seconds=0.2), redis.Redis.from_url(url) as client:
        wake()
        assert client.delete("celery") == 1
        until(lambda: messages_after_a_wake(url), "a ring sends a message again")


class Bustle:
    """Writers that commit to a table and ring, and runs that answer, look at the table and stay; as tasks do it."""

    def __init__(self, app: Celery) -> None:
        self.table: list[int] = []
        self.last_look = 0
        self.messages: queue.Queue[bool] = queue.Queue()
        self._app = app

    def write(self, events: int) -> None:
        """Commit so many events, and ring after each."""
        ringer = new_ringer(self._app)
        for number in range(events):
            self.table.append(number)
            if ringer.ring():
                self.messages.put(True)

    def work(self) -> None:
        """Run once for each message, until told to stop."""
        with closing(new_bell(self._app)) as bell:
            while self.messages.get():
                self._run(bell)

    def _run(self, bell: Bell) -> None:
        self._look(bell)
        with bell.stay() as stay:
            while stay.wait(0.002):
                self._look(bell)
        if stay.missed:
            self.messages.put(True)

    def _look(self, bell: Bell) -> None:
        bell.answer()
        self.last_look = max(self.last_look, len(self.table))

    def is_settled(self) -> bool:
        """Say whether a run has seen everything."""
        return self.last_look == len(self.table)


@pytest.mark.parametrize("workers", [1, 2])
def test_no_ring_is_lost_between_writers_and_runs(app: Celery, workers: int) -> None:
    """However rings, answers and stays fall together, after the last commit some run looks at the table."""
    bustle, chance = Bustle(app), random.Random(1)  # noqa: S311 - a test is no secret
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(bustle.work) for _ in range(workers)]
        try:
            for _ in range(250):  # each round ends with a last ring, at any moment of a run
                for writer in [pool.submit(bustle.write, chance.randint(1, 6)) for _ in range(2)]:
                    writer.result(60)
                threading.Event().wait(chance.uniform(0, 0.004))
                until(bustle.is_settled, "a run has seen the last commit", seconds=5, every_seconds=0.0005)
        finally:
            for _ in runs:
                bustle.messages.put(False)
    assert [run.result() for run in runs] == [None] * workers


# runs that stay


def test_a_run_that_stays_hears_the_bell(app: Celery, url: str) -> None:
    """While a run stays, a ring reaches it and no message is sent; what it hears is answered."""
    with closing(new_bell(app)) as bell, bell.stay() as stay, ThreadPoolExecutor(1) as pool:
        heard = pool.submit(stay.wait, 1)
        until(lambda: any(key.endswith("listening") for key in keys(url)), "the run listens")
        wake()
        assert heard.result() is True
        bell.answer()
        assert stay.wait(0.01) is False
    assert stay.missed is False
    assert messages(url) == 0
    assert keys(url) == set()


def test_a_ring_from_before_the_stay(app: Celery) -> None:
    """A ring between a run's last look and its stay is heard at once."""
    with closing(new_bell(app)) as bell:
        bell.answer()
        wake()
        with bell.stay() as stay:
            assert stay.wait(1) is True
            bell.answer()
            assert stay.wait(0.01) is False


def test_one_run_stays_at_a_time(app: Celery, url: str) -> None:
    """While a run stays, the stay of another is over at once, and leaves the first one's rings alone."""
    with (
        closing(new_bell(app)) as first,
        closing(new_bell(app)) as second,
        first.stay() as stay,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(stay.wait, 1)
        until(lambda: any(key.endswith("listening") for key in keys(url)), "the first listens")
        with second.stay() as other:
            assert other.wait(60) is False
        assert other.missed is False
        wake()
        assert waiting.result() is True


def test_another_run_leaves_its_rings_to_the_one_that_stays(app: Celery) -> None:
    """A run that answers the bell while another stays is told so, and what rang for that one it still hears."""
    with closing(new_bell(app)) as first, closing(new_bell(app)) as second:
        assert first.answer() is False
        wake()
        with first.stay() as stay:
            assert stay.wait(1) is True
            first.answer()
            wake()
            assert second.answer() is True
            assert stay.wait(1) is True
            first.answer()
        assert stay.missed is False
        assert second.answer() is False


def test_a_run_that_leaves_is_told_of_a_ring(app: Celery, url: str) -> None:
    """A run that leaves is told of a ring that counted on it, and sent no message: somebody else has to look."""
    with closing(new_bell(app)) as bell:
        wake()
        with bell.stay() as stay:
            assert stay.wait(1) is True
            bell.answer()
            sent = messages(url)
            wake()
        assert messages(url) == sent
        assert stay.missed is True
        wake()
        assert messages(url) == sent + 1


def test_a_run_that_heard_and_cannot_look_is_told(app: Celery) -> None:
    """A run that hears the bell, and then has no time to look at the table, is told that it missed a ring."""
    with closing(new_bell(app)) as bell:
        bell.answer()
        wake()
        with bell.stay() as stay:
            assert stay.wait(1) is True
        assert stay.missed is True


def test_a_listener_that_died_is_soon_forgotten(app: Celery, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed while it stays swallows rings for a moment only; then they send messages again."""
    monkeypatch.setattr(bell_module, "LISTENING_SECONDS", 0.2)
    with closing(new_bell(app)) as bell:
        wake()
        assert bell.stay().wait(1) is True  # and never leaves
        bell.answer()
        wake()
        assert messages(url) == 1
        until(lambda: messages_after_a_wake(url) == 2, "a ring sends a message again")


def test_a_long_stay_goes_on_listening(app: Celery, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that stays for long says so in time: no ring during its stay sends a message."""
    monkeypatch.setattr(bell_module, "LISTENING_SECONDS", 0.4)
    monkeypatch.setattr(bell_module, "RENEW_SECONDS", 0.1)
    with closing(new_bell(app)) as bell, ThreadPoolExecutor(1) as pool, bell.stay() as stay:
        first = pool.submit(stay.wait, 1)
        until(lambda: any(key.endswith("listening") for key in keys(url)), "the run listens")
        for _ in range(10):
            wake()
            assert first.result() is True
            bell.answer()
            first = pool.submit(stay.wait, 0.2)
            threading.Event().wait(0.1)  # the time that passes is what is tested
        wake()
        assert first.result() is True
    assert messages(url) == 0


# whose bell it is


def test_deployments_that_share_a_redis_do_not_mix(url: str) -> None:
    """Two deployments in one Redis database have a bell each, by database and by client id."""
    with service(url):
        wake()
    with service(url, "postgresql://db.example/other"):
        wake()
    with service(url, client_id="other"):
        wake()
    assert messages(url) == 3
    assert len(keys(url)) == 3


def test_writers_and_workers_may_come_as_different_users(url: str) -> None:
    """A writer and a worker that reach one database as different users, by different drivers, have one bell."""
    with service(url, "postgresql+asyncpg://shop:secret@db.example/shop"):
        wake()
    with service(url, "postgresql://relay:other@db.example/shop"):
        wake()
    assert messages(url) == 1


def test_the_port_that_goes_without_saying(url: str) -> None:
    """A writer and a worker of which one names PostgreSQL's own port have one bell."""
    for database_url in ("postgresql://db.example/shop", "postgresql://db.example:5432/shop"):
        with service(url, database_url):
            wake()
    assert messages(url) == 1


def test_two_outboxes_of_one_database_do_not_mix(url: str) -> None:
    """Two outboxes of one database, told apart by the search_path in its address, have a bell each."""
    for schema in ("shop", "stock"):
        with service(url, f"postgresql://db.example/shop?options=-csearch_path%3D{schema}"):
            wake()
    assert messages(url) == 2


def test_the_prefix_of_keys_is_kept(url: str) -> None:
    """Keys carry the prefix that the app gives those of Celery."""
    with service(url, broker_transport_options={"global_keyprefix": "shop:"}):
        wake()
    assert messages(url, "shop:celery") == 1
    assert all(key.startswith("shop:outbox:") for key in keys(url))


def test_another_message_broker(url: str) -> None:
    """Where Celery's broker is no Redis the bell hangs in that of `outbox_wake_url`, and messages go by Celery."""
    with service("memory://", wake_url=url) as app, app.connection_for_read() as broker:
        simple = broker.SimpleQueue("celery")
        for _ in range(3):
            wake()
        message = simple.get(timeout=5)
        assert message.headers["task"] == "outbox.dispatch"
        message.ack()
        with pytest.raises(simple.Empty):
            simple.get(block=False)
        simple.close()
    assert len(keys(url)) == 1


@pytest.mark.parametrize("broker", ["memory://", "sentinel://localhost:26379"])
def test_without_a_redis_there_is_no_bell(broker: str) -> None:
    """Where there is no Redis with one address nothing is sent, nothing waits for it, and runs do not stay."""
    with service(broker) as app:
        wake()
        assert parts.bell(app, worker.settings_of(app)) is SILENCE
        with SILENCE.stay() as stay:
            assert stay.wait(60) is False
        assert stay.missed is False


def test_the_wake_up_can_be_turned_off(url: str, database_url: str) -> None:
    """With `outbox_wake` off neither a commit nor `wake` reaches Redis, and runs do not stay."""
    with service(url, database_url, wake=False) as app:
        commit_one(database_url)
        wake()
        assert new_bell(app) is SILENCE
        app.finalize()
        assert waker.installed() is None
    with redis.Redis.from_url(url) as client:
        assert client.dbsize() == 0


def test_settings_that_are_wrong_fail_no_commit(url: str, database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A service whose settings are wrong commits all the same; what is wrong is told once."""
    with service(url, database_url, wake_timeout_seconds="soon"):
        for _ in range(3):
            commit_one(database_url)
    assert [record for record in caplog.messages if "outbox_wake_timeout_seconds" in record] == caplog.messages
    assert len(caplog.messages) == 1


def test_messages_are_sent_as_ticks_are(url: str) -> None:
    """A message goes to the queue of the tasks, expires as a tick does, and has its time limit."""
    with service(url, queue="relay") as app, app.connection_for_read() as broker:
        wake()
        simple = broker.SimpleQueue("relay")
        message = simple.get(timeout=5)
        assert message.headers["task"] == "outbox.dispatch"
        assert message.headers["expires"] is not None
        assert message.headers["timelimit"] == [45, None]
        message.ack()
        simple.close()


# writers


def commit_one(database_url: str) -> float:
    """Commit one event over a Session; returns how long the commit took, in seconds."""
    engine = create_engine(database_url.replace("postgresql:", "postgresql+psycopg:"))
    try:
        with Session(engine) as session:
            append(session, **PLACED)
            began = time.monotonic()
            session.commit()
            return time.monotonic() - began
    finally:
        engine.dispose()


def test_a_commit_sends_a_message(url: str, database_url: str) -> None:
    """Committing an event over a Session has sent a message when the commit returns; rolling back has not."""
    engine = create_engine(database_url.replace("postgresql:", "postgresql+psycopg:"))
    with service(url, database_url), Session(engine) as session:
        append(session, **PLACED)
        session.rollback()
        assert messages(url) == 0
        append(session, **PLACED)
        session.commit()
        assert messages(url) == 1
    engine.dispose()


def test_a_commit_in_an_event_loop_sends_a_message(url: str, database_url: str) -> None:
    """Committing an event over an AsyncSession sends a message, from a thread."""

    async def write() -> None:
        engine = create_async_engine(database_url.replace("postgresql:", "postgresql+asyncpg:"))
        async with AsyncSession(engine) as session, session.begin():
            await append(session, **PLACED)
        await engine.dispose()

    with service(url, database_url):
        asyncio.run(write())
        until(lambda: messages(url) == 1, "a message is sent")


SCRIPT = """
import asyncio, sys
from celery import Celery
from outbox_tasks import setup, wake

app = Celery(broker=sys.argv[1])
app.conf.outbox_database_url = "postgresql://db.example/shop"
setup(app)

async def main():
    wake()

asyncio.run(main())
"""


def test_a_short_script_rings_before_it_ends(url: str) -> None:
    """A program that ends right after a commit in its event loop has rung all the same."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("OUTBOX_", "CELERY_"))}
    subprocess.run([sys.executable, "-c", SCRIPT, url], env=environment, check=True, timeout=60)
    assert messages(url) == 1


def in_a_child(action: Callable[[], None]) -> int:
    """Do something in a forked process, which ends with 0 if nothing was raised; returns how it ended."""
    pid = os.fork()
    if not pid:
        try:
            action()
        except BaseException:  # noqa: BLE001 - it must not go on as a second pytest
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_rings_for_itself(url: str) -> None:
    """A process that was forked from one that had rung rings over connections of its own, and its parent goes on."""
    with service(url) as app, closing(new_bell(app)) as bell:
        wake()
        bell.answer()
        assert in_a_child(wake) == 0
        assert messages(url) == 2
        bell.answer()
        wake()
    assert messages(url) == 3


def test_a_forked_child_rings_from_its_own_event_loop(url: str) -> None:
    """A process forked from one whose thread has rung has a thread of its own for it."""

    async def ring(sent: int) -> None:
        wake()
        await asyncio.to_thread(until, lambda: messages(url) == sent, "a message is sent", seconds=10)

    with service(url) as app, closing(new_bell(app)) as bell:
        asyncio.run(ring(1))
        bell.answer()
        assert in_a_child(lambda: asyncio.run(ring(2))) == 0


def test_many_threads_ring_at_once(url: str) -> None:
    """Threads that ring at the same time send one message."""
    with service(url), ThreadPoolExecutor(16) as pool:
        for _ in pool.map(lambda _: wake(), range(200)):
            pass
    assert messages(url) == 1


def test_a_thread_that_cannot_be_started_fails_no_wake(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wake in an event loop that gets no thread raises nothing and is told once; a later one has its thread."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def ring(times: int) -> None:
        for _ in range(times):
            wake()

    with service(url):
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", refuse)
            asyncio.run(ring(3))
        assert len([line for line in caplog.messages if "can't start new thread" in line]) == 1
        asyncio.run(ring(1))
        until(lambda: messages(url) == 1, "a message is sent")
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("error", [SoftTimeLimitExceeded, KeyboardInterrupt])
def test_a_wake_lets_through_what_ends_a_task(
    url: str, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Celery's soft time limit and an interrupt pass through a wake, the first of a process too."""

    def interrupt(*_arguments: object) -> None:
        raise error

    with service(url):
        monkeypatch.setattr(parts, "has_bell", interrupt)
        with pytest.raises(error):
            wake()


# a Redis that is away


def breakages(own_redis: RedisServer, proxy: TcpProxy) -> dict[str, tuple[Any, Any]]:
    """Return ways for Redis to be away, each with its way back."""
    return {
        "frozen": (own_redis.freeze, own_redis.thaw),
        "killed": (own_redis.kill, own_redis.start),
        "cut off": (proxy.cut, proxy.heal),
        "silent": (proxy.blackhole, proxy.heal),
    }


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("how", ["frozen", "killed", "cut off", "silent"])
def test_redis_away_costs_a_commit_little(
    own_redis: RedisServer, database_url: str, caplog: pytest.LogCaptureFixture, how: str, *, used: bool
) -> None:
    """With Redis away a commit takes a timeout longer, the next nothing; it is told once; then wakes come again."""
    with TcpProxy(LOOPBACK, own_redis.port) as proxy:
        through = f"redis://{LOOPBACK}:{proxy.port}/0"
        with service(through, database_url, wake_timeout_seconds=PATIENCE, dispatch_seconds=1.5):
            if used:
                wake()
            lose, give_back = breakages(own_redis, proxy)[how]
            lose()
            assert commit_one(database_url) < 3 * PATIENCE
            began = time.monotonic()
            for _ in range(20):
                wake()
            assert time.monotonic() - began < PATIENCE
            assert len([line for line in caplog.messages if "the wake-up's Redis:" in line]) == 1
            give_back()
            with redis.Redis.from_url(own_redis.url) as client:
                client.flushdb()
            until(lambda: messages_after_a_wake(own_redis.url), "wakes come again")
    assert len([line for line in caplog.messages if "the wake-up's Redis:" in line]) == 1
    assert "the wake-up's Redis works again" in caplog.messages


def test_redis_away_keeps_no_event_loop_waiting(own_redis: RedisServer) -> None:
    """With Redis frozen a wake in an event loop returns at once."""

    async def ring() -> float:
        began = time.monotonic()
        for _ in range(50):
            wake()
        return time.monotonic() - began

    with service(own_redis.url, wake_timeout_seconds=PATIENCE):
        own_redis.freeze()
        assert asyncio.run(ring()) < PATIENCE
        own_redis.thaw()


def test_redis_away_does_not_break_a_run(own_redis: RedisServer) -> None:
    """With Redis frozen a run answers and stays in no time, and hears the bell again once Redis is back."""
    with (
        service(own_redis.url, wake_timeout_seconds=PATIENCE, dispatch_seconds=1.5) as app,
        closing(new_bell(app)) as bell,
    ):
        bell.answer()
        own_redis.freeze()
        began = time.monotonic()
        for _ in range(20):
            bell.answer()
            with bell.stay() as stay:
                assert stay.wait(1) is False
            assert stay.missed is False
        assert time.monotonic() - began < 3 * PATIENCE
        own_redis.thaw()
        until(lambda: rings_and_hears(bell), "the run hears the bell again")


def rings_and_hears(bell: Bell) -> bool:
    """Ring, and say whether the runs' side hears it."""
    wake()
    with bell.stay() as stay:
        return stay.wait(0.01)


def test_redis_away_in_the_midst_of_a_stay(own_redis: RedisServer) -> None:
    """A stay during which Redis is killed is over soon."""
    with service(own_redis.url) as app, closing(new_bell(app)) as bell, ThreadPoolExecutor(1) as pool:
        with bell.stay() as stay:
            waiting = pool.submit(stay.wait, 1)
            until(lambda: any(key.endswith("listening") for key in keys(own_redis.url)), "the run listens")
            own_redis.kill()
            assert waiting.result(10) is False
        assert stay.missed is False


def test_a_redis_that_refuses_to_be_waited_for(own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """Where Redis refuses BLPOP, no run stays any more, which is told once; rings send messages, and are answered."""
    with service(own_redis.url) as app, closing(new_bell(app)) as bell:
        with redis.Redis.from_url(own_redis.url) as client:
            client.execute_command("ACL", "SETUSER", "default", "-blpop")
        for sent in range(1, 4):
            with bell.stay() as stay:
                assert stay.wait(1) is False
                assert keys(own_redis.url) == set()
                wake()
                assert messages(own_redis.url) == sent
            assert stay.missed is False
            bell.answer()
    assert len([line for line in caplog.messages if "Redis 6" in line]) == 1
    assert len(caplog.messages) == 1


def test_a_redis_that_becomes_a_replica_is_only_away(own_redis: RedisServer) -> None:
    """A run whose stay a failover has ended stays again once Redis takes writes."""
    with (
        service(own_redis.url, dispatch_seconds=0.2) as app,
        closing(new_bell(app)) as bell,
        redis.Redis.from_url(own_redis.url) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        with bell.stay() as stay:
            waiting = pool.submit(stay.wait, 1)
            until(lambda: client.info("clients")["blocked_clients"] == 1, "the run waits")
            client.replicaof(LOOPBACK, 1)
            assert waiting.result(10) is False
        client.replicaof("NO", "ONE")
        until(lambda: rings_and_hears(bell), "the run hears the bell again")


def test_a_broker_that_takes_no_message(url: str) -> None:
    """Where the bell rings but the message broker is away, a wake raises nothing and does not wait for long."""
    with service("redis://127.0.0.1:1/0", wake_url=url, wake_timeout_seconds=PATIENCE):
        began = time.monotonic()
        wake()
        assert time.monotonic() - began < 3 * PATIENCE
    assert len(keys(url)) == 1


# how to get there


def options_for(broker: str, **configuration: Any) -> dict[str, Any]:
    """Return how the bell gets to an app's broker."""
    app = Celery(broker=broker, set_as_current=False)
    app.conf.update(configuration)
    settings = load({"outbox_database_url": "postgresql://db.example/shop"}, {})
    found = place.find(app, settings)
    assert found is not None
    found.wire(seconds=1).close()
    return dict(found.options)


def test_the_brokers_credentials_are_used() -> None:
    """User, password, port and number of the broker's URL are the bell's."""
    options = options_for("redis://me:p%40ss@redis.example:6380/3")
    expected = {"host": "redis.example", "port": 6380, "username": "me", "password": "p@ss", "db": 3}
    assert options == expected


@pytest.mark.parametrize(
    ("broker", "configuration"),
    [
        ("rediss://redis.example/1", {"broker_use_ssl": {"ssl_ca_certs": "/ca.pem"}}),
        ("redis://redis.example/1", {"broker_use_ssl": {"ssl_ca_certs": "/ca.pem"}}),
        ("rediss://redis.example/1?ssl_ca_certs=/ca.pem", {}),
    ],
)
def test_the_brokers_tls_is_used(broker: str, configuration: dict[str, Any]) -> None:
    """A broker behind TLS is reached through TLS, with its settings, wherever they are."""
    options = options_for(broker, **configuration)
    assert options["connection_class"] is redis.SSLConnection
    assert options["ssl_ca_certs"] == "/ca.pem"


def test_a_broker_on_a_unix_socket() -> None:
    """A broker on a Unix socket is reached there."""
    options = options_for("redis+socket:///run/redis.sock?virtual_host=2")
    assert options["connection_class"] is redis.UnixDomainSocketConnection
    assert (options["path"], options["db"]) == ("/run/redis.sock", 2)


def test_no_password_shows() -> None:
    """The place of the bell shows no password."""
    app = Celery(broker="redis://me:hunter2@redis.example/0", set_as_current=False)
    found = place.find(app, Settings(database_url="postgresql://me:hunter2@db.example/shop"))
    assert found is not None
    assert "hunter2" not in repr(found)
