"""Starts everything the demo needs, below one directory, and stops it in the opposite order."""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, assert_never

import psycopg

from outbox_tasks.demo.orders import AGGREGATE
from outbox_tasks.demo.processes import Beat, Flower, Shop, Worker
from outbox_tasks.schema import migrate
from outbox_tasks.testing.services import ApacheKafka, Broker, PostgresServer, RedisServer, TansuBroker

BrokerName = Literal["tansu", "kafka"]

TOPIC = "orders"
PARTITIONS = 8
DATABASE = "shop"

_CONFIGURATION = Path(__file__).parents[2] / "celeryconfig.py"
_OURS = ("CELERY_", "FLOWER_", "OUTBOX_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What runs, and where."""

    database_url: str
    redis_url: str
    broker: Broker
    shop: Shop
    flower: Flower
    logs: Path


@contextmanager
def running(directory: Path, *, broker_name: BrokerName, progress: Callable[[str], None]) -> Iterator[Stack]:
    """Run the servers, the tables, the topic and the deployment; tells what it is about to start.

    Raises:
        ServerError: one of them did not start; the message has the end of its log.
    """
    with ExitStack() as stack:
        progress(f"starting PostgreSQL, Redis and {broker_name}")
        postgres = stack.enter_context(PostgresServer(directory / "postgres"))
        redis = stack.enter_context(RedisServer(directory / "redis"))
        broker = stack.enter_context(_broker(broker_name, directory / "broker"))
        database_url = _prepare(postgres, broker)
        progress("starting the order service, a Celery worker, beat and Flower")
        deployment = _deployment(directory)
        environment = _environment(database_url, redis.url, broker.bootstrap_servers)
        stack.enter_context(Worker(deployment, environment))
        stack.enter_context(Beat(deployment, environment))
        flower = Flower(deployment, environment, user="demo", password=secrets.token_urlsafe(9))
        stack.enter_context(flower)
        shop = stack.enter_context(Shop(deployment, environment))
        stack.callback(progress, "stopping everything")
        yield Stack(
            database_url=database_url, redis_url=redis.url, broker=broker, shop=shop, flower=flower, logs=deployment
        )


def _broker(name: BrokerName, directory: Path) -> Broker:
    match name:
        case "tansu":
            return TansuBroker(directory)
        case "kafka":
            return ApacheKafka(directory)
        case _:
            assert_never(name)


def _prepare(postgres: PostgresServer, broker: Broker) -> str:
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {DATABASE}")
    migrate.upgrade(postgres.url(DATABASE))
    broker.create_topic(TOPIC, partitions=PARTITIONS)
    return postgres.url(DATABASE)


def _deployment(directory: Path) -> Path:
    """Make the directory the deployment runs in, with the celeryconfig.py of this checkout if it is one.

    Not the current directory: a celeryconfig.py there may name a database that is not the demo's.
    """
    deployment = directory / "deployment"
    deployment.mkdir()
    if _CONFIGURATION.is_file():
        shutil.copy(_CONFIGURATION, deployment)
    return deployment


def _environment(database_url: str, redis_url: str, bootstrap_servers: str) -> Mapping[str, str]:
    """Return what a deployment sets, in place of what the surroundings of the demo have set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return kept | {
        "CELERY_BROKER_URL": redis_url,
        "CELERY_RESULT_BACKEND": redis_url,
        "OUTBOX_DATABASE_URL": database_url,
        "OUTBOX_BOOTSTRAP_SERVERS": bootstrap_servers,
        "OUTBOX_ROUTES": json.dumps({AGGREGATE: TOPIC}),
    }
