"""Outages: what the relay stands on goes away and comes back; work resumes without a restart of anything of ours."""

from dataclasses import replace

import psycopg
import pytest
import redis
from support.clients import Client
from support.judging import judge, states
from support.workers import Deployment, fleet
from support.writers import Load, write

from outbox_tasks.testing.services import ApacheKafka, PostgresServer, RedisServer

SMALL_BATCHES = {"batch_size": 20}
"""So that there is a middle to be caught in."""


def blocked_keys(database_url: str) -> int:
    """Count the blocked keys."""
    with psycopg.connect(database_url) as connection:
        return connection.execute("SELECT FROM outbox_blocked_key").rowcount


def unacknowledged(server: RedisServer) -> int:
    """Count the messages a worker has fetched that no child has taken yet, by kombu's own book."""
    with redis.Redis.from_url(server.url) as client:
        return int(client.hlen("unacked"))


def test_postgres_restarted_in_mid_run(deployment: Deployment, topic: str, own_postgres: PostgresServer) -> None:
    """When PostgreSQL is restarted in mid-run, worker and beat go on by themselves and nothing is lost."""
    deployment = replace(deployment, database_url=own_postgres.url())
    database = deployment.database_url
    committed = write(database, Load(topic=topic, events=8000))
    with fleet(deployment.but(**SMALL_BATCHES)) as celery:
        worker, _ = celery.worker(children=2), celery.beat()
        celery.until(lambda: states(database)["published"] > 100, "a run is under way")
        own_postgres.stop()
        worker.await_word("database unavailable")
        own_postgres.start()
        assert states(database)["pending"] > 0
        committed += write(database, Load(topic=topic, events=800), seed=2)
        celery.until(lambda: states(database) == {"published": len(committed)}, "everything is published")
    assert judge(deployment.bootstrap_servers, topic, committed).faults == {}


def test_redis_restarted_in_mid_run(deployment: Deployment, topic: str, own_redis: RedisServer) -> None:
    """When Redis is restarted in mid-run, worker and beat go on by themselves and nothing is lost or repeated."""
    deployment = replace(deployment, redis_url=own_redis.url)
    database = deployment.database_url
    committed = write(database, Load(topic=topic, events=8000))
    with fleet(deployment.but(**SMALL_BATCHES)) as celery:
        worker, _ = celery.worker(children=2), celery.beat()
        celery.until(lambda: states(database)["published"] > 100, "a run is under way")
        celery.until(lambda: unacknowledged(own_redis), "a tick waits in the worker for a free child")
        own_redis.stop()
        worker.await_word("Connection to broker lost")
        committed += write(database, Load(topic=topic, events=800), seed=2)
        own_redis.start()
        celery.until(lambda: states(database) == {"published": len(committed)}, "what was there is published")
        committed += write(database, Load(topic=topic, events=800), seed=3)
        celery.until(lambda: states(database) == {"published": len(committed)}, "what came later is published")
    judgement = judge(deployment.bootstrap_servers, topic, committed)
    assert judgement.faults == {}
    assert judgement.duplicates == 0


@pytest.mark.parametrize("broker", ["kafka"], indirect=True)
def test_a_broker_that_comes_later(deployment: Deployment, topic: str, kafka: ApacheKafka, client: Client) -> None:
    """Events wait untouched for a broker that is not there at start, and are published once it comes."""
    deployment = deployment.but(publisher=client.name)
    database = deployment.database_url
    kafka.stop()
    try:
        committed = write(database, Load(topic=topic, events=800, writers=4))
        with fleet(deployment) as celery:
            worker, _ = celery.worker(children=2), celery.beat()
            worker.await_word("'status': 'broker unavailable'")
            assert states(database) == {"pending": len(committed)}
            kafka.start()
            celery.until(lambda: states(database) == {"published": len(committed)}, "everything is published")
    finally:
        if not kafka.is_running:
            kafka.start()
    assert blocked_keys(database) == 0
    judgement = judge(deployment.bootstrap_servers, topic, committed)
    assert judgement.faults == {}
    assert judgement.duplicates == 0


@pytest.mark.parametrize("broker", ["kafka"], indirect=True)
def test_a_broker_restarted_in_mid_run(deployment: Deployment, topic: str, kafka: ApacheKafka, client: Client) -> None:
    """A broker that is killed in mid-run and comes back costs no event an attempt and holds none."""
    deployment = deployment.but(publisher=client.name)
    database = deployment.database_url
    committed = write(database, Load(topic=topic, events=8000))
    try:
        with fleet(deployment.but(**SMALL_BATCHES, delivery_seconds=4)) as celery:
            worker, _ = celery.worker(children=2), celery.beat()
            celery.until(lambda: states(database)["published"] > 100, "a run is under way")
            kafka.kill()
            worker.await_word("'status': 'broker unavailable'")
            found = states(database)
            assert found.keys() == {"published", "pending"}
            kafka.start()
            celery.until(lambda: states(database) == {"published": len(committed)}, "everything is published")
    finally:
        if not kafka.is_running:
            kafka.start()
    assert blocked_keys(database) == 0
    assert judge(deployment.bootstrap_servers, topic, committed).faults == {}
