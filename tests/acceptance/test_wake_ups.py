"""Events that reach Kafka without a beat: the wake-up alone can have done it."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from support.judging import states
from support.relaying import put, rows
from support.waking import service
from support.workers import CeleryProcess, Deployment, Fleet, fleet

from outbox_tasks import append, wake
from outbox_tasks.testing.services import RedisServer, scratch_directory

LISTENING = "listening to notifications"


def published(deployment: Deployment, count: int) -> bool:
    """Say whether so many events are published, and no others are there."""
    return states(deployment.database_url) == {"published": count}


def append_and_commit(deployment: Deployment, topic: str) -> None:
    """Commit one event over a Session."""
    engine = create_engine(deployment.database_url.replace("postgresql:", "postgresql+psycopg:"))
    with Session(engine) as session, session.begin():
        append(session, aggregate_type="order", aggregate_id="1", event_type="order_placed", topic=topic)
    engine.dispose()


async def append_and_commit_asynchronously(deployment: Deployment, topic: str) -> None:
    """Commit one event over an AsyncSession."""
    engine = create_async_engine(deployment.database_url.replace("postgresql:", "postgresql+asyncpg:"))
    async with AsyncSession(engine) as session, session.begin():
        await append(session, aggregate_type="order", aggregate_id="1", event_type="order_placed", topic=topic)
    await engine.dispose()


def test_commits_are_published_without_a_beat(deployment: Deployment, topic: str) -> None:
    """Events committed over sessions, and others after `wake`, are published though no beat runs."""
    with fleet(deployment) as celery, service(deployment.redis_url, deployment.database_url):
        celery.worker(children=2)
        celery.await_ready()
        for count in range(1, 6):
            append_and_commit(deployment, topic)
            celery.until(partial(published, deployment, count), "the event is published")
        asyncio.run(append_and_commit_asynchronously(deployment, topic))
        celery.until(partial(published, deployment, 6), "the event of the event loop is published")
        put(deployment.database_url, {"topic": topic})
        wake()
        celery.until(partial(published, deployment, 7), "the inserted event is published")


def test_wakes_come_again_after_redis_was_away(deployment: Deployment, topic: str) -> None:
    """After Redis was frozen, and after it was killed, commits are published without a beat again."""
    with scratch_directory("outbox-test-") as directory, RedisServer(directory / "redis") as own_redis:
        here = replace(deployment, redis_url=own_redis.url).but(dispatch_seconds=0.5)
        with fleet(here) as celery, service(own_redis.url, here.database_url, dispatch_seconds=0.5):
            celery.worker(children=1)
            celery.await_ready()
            own_redis.freeze()
            append_and_commit(here, topic)
            own_redis.thaw()
            celery.until(partial(wakes_until_published, here, 1), "the event is published")
            own_redis.kill()
            append_and_commit(here, topic)
            own_redis.start()
            celery.until(partial(wakes_until_published, here, 2), "the event is published")


def wakes_until_published(deployment: Deployment, count: int) -> bool:
    """Wake the relay, as a later commit would, and say whether so many events are published."""
    wake()
    return published(deployment, count)


@pytest.fixture
def listening(deployment: Deployment) -> Iterator[tuple[Fleet, CeleryProcess]]:
    """Run a worker that listens to notifications, which are switched on, and no beat."""
    assert deployment.run("outbox", "notify", "on").stdout == "notifications are on\n"
    with fleet(deployment.but(listen=True)) as celery:
        worker = celery.worker(children=2).await_ready()
        worker.await_word(LISTENING)
        yield celery, worker


def test_plain_inserts_are_published_without_a_beat(
    deployment: Deployment, topic: str, listening: tuple[Fleet, CeleryProcess]
) -> None:
    """With notifications on, plain INSERTs are published though no beat runs, also after the listener's loss."""
    celery, worker = listening
    for count in range(1, 4):
        put(deployment.database_url, {"topic": topic})
        celery.until(partial(published, deployment, count), "the event is published")
    with psycopg.connect(deployment.database_url) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name LIKE '%listener'"
            "   AND datname = current_database()"
        )
        connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, topic)"
            " VALUES ('order', '1', 'order_placed', %s)",
            [topic],
        )
    celery.until(partial(published, deployment, 4), "the event of the time without a listener is published")
    celery.until(lambda: worker.output.count(LISTENING) == 2, "the listener is back")
    put(deployment.database_url, {"topic": topic})
    celery.until(partial(published, deployment, 5), "the event is published")
    assert worker.stop() == 0


def test_notifications_without_a_bell(deployment: Deployment, topic: str) -> None:
    """Where the bell is off, a worker that listens publishes plain INSERTs all the same."""
    deployment.run("outbox", "notify", "on")
    with fleet(deployment.but(listen=True, wake=False)) as celery:
        celery.worker(children=1).await_ready().await_word(LISTENING)
        put(deployment.database_url, {"topic": topic})
        celery.until(partial(published, deployment, 1), "the event is published")


def test_notifications_are_switched_on_and_off(deployment: Deployment) -> None:
    """`outbox notify` makes and drops the trigger, says what was so already, and `--sql` only prints."""
    triggers = "SELECT 1 AS yes FROM pg_trigger WHERE tgname = 'outbox_notify'"
    printed = deployment.run("outbox", "notify", "on", "--sql").stdout
    assert printed.startswith("CREATE TRIGGER outbox_notify")
    assert rows(deployment.database_url, triggers) == []
    assert deployment.run("outbox", "notify", "on").stdout == "notifications are on\n"
    assert deployment.run("outbox", "notify", "on").stdout == "notifications are on, as they were\n"
    assert rows(deployment.database_url, triggers) == [{"yes": 1}]
    assert deployment.run("outbox", "notify", "off").stdout == "notifications are off\n"
    assert rows(deployment.database_url, triggers) == []
