"""What a measurement runs on: fresh servers, a migrated database, a topic, Celery workers."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psycopg

from outbox_tasks.schema import migrate
from outbox_tasks.testing.services import (
    ApacheKafka,
    Broker,
    PostgresServer,
    RedisServer,
    TansuBroker,
    scratch_directory,
)

KEYS = 1000
PAYLOAD_BYTES = 200
CHECKOUT = Path(__file__).parents[1]
WAIT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Rig:
    """The servers of one run."""

    postgres: PostgresServer
    redis: RedisServer
    broker: Broker
    directory: Path

    def new_database(self) -> str:
        """Make a migrated database; returns its URL."""
        name = f"bench_{uuid4().hex}"
        with psycopg.connect(self.postgres.url(), autocommit=True) as connection:
            connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(name)))
        migrate.upgrade(self.postgres.url(name))
        return self.postgres.url(name)

    def new_topic(self) -> str:
        """Make a topic of 8 partitions."""
        name = f"bench-{uuid4().hex}"
        self.broker.create_topic(name)
        return name

    def environment(self, database_url: str, topic: str, **settings: object) -> dict[str, str]:
        """Return the environment of a worker or beat."""
        ours = {
            "OUTBOX_DATABASE_URL": database_url,
            "OUTBOX_BOOTSTRAP_SERVERS": self.broker.bootstrap_servers,
            "OUTBOX_ROUTES": f'{{"order": "{topic}"}}',
            "CELERY_BROKER_URL": self.redis.url,
        }
        return {**os.environ, **ours, **{f"OUTBOX_{name.upper()}": str(value) for name, value in settings.items()}}

    @contextmanager
    def celery(self, environment: Mapping[str, str], *arguments: str) -> Iterator[None]:
        """Run a Celery process."""
        log = self.directory / f"{arguments[0]}-{uuid4().hex}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "outbox_tasks", *arguments],
                cwd=CHECKOUT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                yield
            finally:
                process.terminate()
                process.wait(timeout=60)


@contextmanager
def rig(*, kafka: bool) -> Iterator[Rig]:
    """Start everything."""
    with ExitStack() as stack:
        directory = stack.enter_context(scratch_directory("outbox-bench-"))
        postgres = stack.enter_context(PostgresServer(directory / "postgres"))
        redis = stack.enter_context(RedisServer(directory / "redis"))
        broker: Broker = stack.enter_context(
            ApacheKafka(directory / "kafka") if kafka else TansuBroker(directory / "tansu")
        )
        yield Rig(postgres, redis, broker, directory)


def write_backlog(database_url: str, events: int) -> None:
    """Write events of 200 bytes over 1,000 keys in one statement."""
    with psycopg.connect(database_url) as connection:
        connection.execute(
            """
            INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
            SELECT 'order', (i %% %(keys)s)::text, 'placed',
                   jsonb_build_object('i', i, 'pad', repeat('x', %(bytes)s - 24))
              FROM generate_series(1, %(events)s) AS i
            """,
            {"keys": KEYS, "bytes": PAYLOAD_BYTES, "events": events},
        )
        connection.execute("ANALYZE outbox")


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {WAIT_SECONDS} s for {what}")
        time.sleep(0.05)
