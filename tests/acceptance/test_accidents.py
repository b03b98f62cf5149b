"""Everything goes wrong, one thing after another; work resumes each time, and in the end all is there.

TEST_ACCIDENTS says how many there are (each kind once), TEST_SEED in what order.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from support.accidents import SETTINGS, World
from support.clients import Client
from support.judging import judge, states, table_of
from support.patience import PatientWriters
from support.waking import service
from support.workers import Deployment, fleet

from outbox_tasks.testing.services import ApacheKafka, PostgresServer, RedisServer

ACCIDENTS = int(os.environ.get("TEST_ACCIDENTS", "12"))
SEED = int(os.environ.get("TEST_SEED", "0")) or random.randrange(1, 1_000_000)  # noqa: S311 - told when it fails


@pytest.fixture
def here(
    deployment: Deployment, own_postgres: PostgresServer, own_redis: RedisServer, kafka: ApacheKafka, client: Client
) -> Iterator[Deployment]:
    """Give a deployment on servers the test may break; Kafka is whole again afterwards."""
    deployment = replace(deployment, database_url=own_postgres.url(), redis_url=own_redis.url)
    yield deployment.but(publisher=client.name, **SETTINGS)
    if kafka.is_running:
        kafka.thaw()
    else:
        kafka.start()


@pytest.mark.timeout(300 + 60 * ACCIDENTS)
@pytest.mark.parametrize("broker", ["kafka"], indirect=True)
def test_one_accident_after_another(
    here: Deployment, topic: str, own_postgres: PostgresServer, own_redis: RedisServer, kafka: ApacheKafka
) -> None:
    """Whatever breaks, publication resumes by itself; nothing is lost, invented, held or out of order in the end."""
    database, chance = here.database_url, random.Random(SEED)  # noqa: S311 - accidents, not secrets

    def published(at_least: int = 0) -> int:
        count = states(database)["published"]
        return count if count >= at_least else 0

    with (
        fleet(here) as celery,
        service(here.redis_url, database),
        PatientWriters(database, topic, writers=4, keys=40, seed=SEED),
    ):
        workers = [celery.worker(children=2), celery.worker(children=2)]
        world = World(own_postgres, own_redis, kafka, celery, workers, celery.beat(), chance)
        celery.await_ready()
        for accident in world.accidents(ACCIDENTS):
            accident()
            it_goes_on = partial(published, at_least=published() + 100)
            celery.until(it_goes_on, f"it goes on after {accident.__name__}, seed {SEED}")
    with fleet(here) as celery:
        celery.worker(children=2)
        celery.beat()
        celery.until(lambda: states(database).keys() == {"published"}, f"everything is published, seed {SEED}")
    assert judge(here.bootstrap_servers, topic, table_of(database)).faults == {}, f"seed {SEED}"
