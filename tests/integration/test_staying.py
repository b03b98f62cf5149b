"""A run that stays: what is rung for goes out in the same run, one look a ring, and at its end nothing is left."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery
from support.relaying import new_topic, put, relay, relay_settings, results_of, states
from support.waiting import until
from support.waking import keys, messages, service
from support.workers import redis_url_of_its_own

from outbox_tasks import wake, worker
from outbox_tasks.relay import batches
from outbox_tasks.relay.dispatch import dispatch
from outbox_tasks.relay.result import Result, Status
from outbox_tasks.relay.staying import StayLimit
from outbox_tasks.store import leases, settle
from outbox_tasks.testing.services import RedisServer, TansuBroker
from outbox_tasks.waking import parts
from outbox_tasks.waking.bell import RedisStay

LIMIT = StayLimit(seconds=3.0, longest_seconds=20.0)


class Stayer:
    """A run in a thread, in a deployment with a bell."""

    def __init__(
        self, database_url: str, redis_url: str, topic: str, run: "Future[Result]", stop: threading.Event
    ) -> None:
        self.result = run.result
        self.stop = stop
        self._database_url = database_url
        self._redis_url = redis_url
        self._topic = topic

    def put(self) -> None:
        """Commit one event, and ring nobody."""
        put(self._database_url, {"topic": self._topic})

    def await_listening(self, *, published: int) -> None:
        """Return when so many events are published, and the run listens."""
        until(lambda: states(self._database_url) == ["published"] * published, "the events are published")
        until(lambda: any(key.endswith("listening") for key in keys(self._redis_url)), "the run listens")

    @property
    def messages(self) -> int:
        """How many messages were sent."""
        return messages(self._redis_url)


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """Give a Redis database of this test's own."""
    return redis_url_of_its_own(redis_server)


@pytest.fixture
def app(redis_url: str, database_url: str) -> Iterator[Celery]:
    """Set up a service that rings."""
    with service(redis_url, database_url, wake_timeout_seconds=5, dispatch_seconds=5) as given:
        yield given


@pytest.fixture
def stayer(app: Celery, redis_url: str, database_url: str, tansu: TansuBroker) -> Iterator[Stayer]:
    """Start a run that has one event to publish, and then stays."""
    topic = new_topic(tansu)
    put(database_url, {"topic": topic})
    with (
        closing(parts.bell(app, worker.settings_of(app))) as bell,
        relay(relay_settings(database_url, tansu)) as ports,
        ThreadPoolExecutor(1) as pool,
    ):
        stop = threading.Event()
        run = pool.submit(dispatch, replace(ports, bell=bell, stopping=stop.is_set), limit=LIMIT)
        given = Stayer(database_url, redis_url, topic, run, stop)
        given.await_listening(published=1)
        yield given


def test_a_run_that_stays_publishes_what_is_rung_for(stayer: Stayer) -> None:
    """Events that are rung for while a run stays go out in that run, and no message is sent for them."""
    for published in range(2, 6):
        stayer.put()
        wake()
        stayer.await_listening(published=published)
    assert stayer.result() == Result(status=Status.DONE, published=5)
    assert stayer.messages == 0


def test_a_ring_is_one_look(stayer: Stayer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that hears the bell looks at the table once for it, and once more when it leaves."""
    claims = results_of(monkeypatch, leases, "claim")
    for published in range(2, 6):
        stayer.put()
        wake()
        stayer.await_listening(published=published)
    assert stayer.result().published == 5
    assert [len(claim.floors) for claim in claims] == [1, 1, 1, 1, 0]


def test_what_nobody_rings_for_goes_out_when_the_run_leaves(stayer: Stayer) -> None:
    """An event that came in the midst of a stay and was not rung for goes out in the same run."""
    stayer.put()
    wake()
    stayer.await_listening(published=2)
    stayer.put()
    assert stayer.result() == Result(status=Status.DONE, published=3)


def test_a_ring_that_another_run_answered_is_not_lost(
    stayer: Stayer, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event that is rung for while the run is at work goes out, though another run has taken the ring away."""
    settled = settle.settle_published

    def meanwhile(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(batches, "settle_published", settled)
        stayer.put()
        wake()
        with closing(parts.bell(app, worker.settings_of(app))) as other:
            other.answer()
        return settled(*arguments, **named)

    monkeypatch.setattr(batches, "settle_published", meanwhile)
    stayer.put()
    wake()
    assert stayer.result() == Result(status=Status.DONE, published=3)


def test_a_run_beside_one_that_stays_looks_once(
    stayer: Stayer, app: Celery, monkeypatch: pytest.MonkeyPatch, database_url: str, tansu: TansuBroker
) -> None:
    """A run that starts while another stays publishes what there is and leaves the rest to the one that listens."""
    claims = results_of(monkeypatch, leases, "claim")
    stayer.put()
    settings = relay_settings(database_url, tansu)
    with closing(parts.bell(app, worker.settings_of(app))) as bell, relay(settings, owner="other") as ports:
        assert dispatch(replace(ports, bell=bell), limit=LIMIT) == Result(status=Status.DONE, published=1)
        assert [len(claim.floors) for claim in claims if claim.floors] == [1]
    stayer.put()
    wake()
    stayer.await_listening(published=3)
    assert stayer.result().published == 2
    assert stayer.messages == 0


def test_what_comes_to_a_shard_of_a_run_that_leaves(
    stayer: Stayer, app: Celery, monkeypatch: pytest.MonkeyPatch, database_url: str, tansu: TansuBroker
) -> None:
    """An event whose ring is heard while a run that is about to leave still holds its shard goes out without a tick."""
    claims = results_of(monkeypatch, leases, "claim")
    settled = settle.settle_published

    def meanwhile(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(batches, "settle_published", settled)
        seen = len(claims)
        stayer.put()
        wake()
        until(lambda: len(claims) > seen, "the one that stays has looked")
        assert claims[-1].floors == {}
        return settled(*arguments, **named)

    stayer.put()
    with (
        closing(parts.bell(app, worker.settings_of(app))) as bell,
        relay(relay_settings(database_url, tansu), owner="other") as ports,
    ):
        monkeypatch.setattr(batches, "settle_published", meanwhile)
        assert dispatch(replace(ports, bell=bell), limit=LIMIT).published == 1
    assert stayer.result().published == 2
    assert states(database_url) == ["published"] * 3
    assert stayer.messages == 0


def test_a_run_that_is_asked_to_stop_does_not_stay(stayer: Stayer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is asked to stop while it publishes what it was rung for does not wait for another ring."""
    settled = settle.settle_published

    def stopping(*arguments: Any, **named: Any) -> Any:
        stayer.stop.set()
        return settled(*arguments, **named)

    monkeypatch.setattr(batches, "settle_published", stopping)
    waits = results_of(monkeypatch, RedisStay, "wait")
    stayer.put()
    wake()
    assert stayer.result() == Result(status=Status.STOPPED, published=2)
    assert waits == []
