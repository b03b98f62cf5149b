"""A deployment with all it stands on, and the ways to break it."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import psutil
import psycopg

from outbox_tasks.testing.services import ApacheKafka, PostgresServer, RedisServer
from support.families import is_alive
from support.leases import database_time
from support.waiting import until
from support.workers import CeleryProcess, Fleet

LEASE_SECONDS, DELIVERY_SECONDS = 16, 2

SETTINGS = {
    "run_seconds": 2,
    "delivery_seconds": DELIVERY_SECONDS,
    "probe_seconds": 1,
    "statement_seconds": 2,
    "lease_seconds": LEASE_SECONDS,
    "batch_size": 20,
}
"""Leases that end soon, and batches so small that there is always a middle to be caught in."""


@dataclass
class World:
    """All that can be broken. Each way to break it returns when what was broken is whole again, or replaced."""

    postgres: PostgresServer
    redis: RedisServer
    kafka: ApacheKafka
    celery: Fleet
    workers: list[CeleryProcess]
    beat: CeleryProcess
    chance: random.Random

    def a_worker_is_killed(self) -> None:
        """Kill a worker with its children, and start another."""
        self.workers.pop(0).kill()
        self.workers.append(self.celery.worker(children=2))

    def a_worker_is_restarted(self) -> None:
        """Stop a worker as a deployment does, and start another."""
        assert self.workers.pop(0).await_ready().stop() == 0
        self.workers.append(self.celery.worker(children=2))

    def a_child_is_killed(self) -> None:
        """Kill one child of a pool."""
        with suppress(psutil.NoSuchProcess):
            self._any_child().kill()

    def a_child_is_frozen(self) -> None:
        """Freeze a child for longer than a lease lasts; Celery may have killed it by then."""
        child = self._any_child()
        with suppress(psutil.NoSuchProcess):
            child.suspend()
        self._wait(LEASE_SECONDS + 1)
        with suppress(psutil.NoSuchProcess):
            child.resume()

    def beat_is_killed(self) -> None:
        """Kill beat, and start another."""
        self.beat.kill()
        self.beat = self.celery.beat()

    def postgres_is_restarted(self) -> None:
        """Restart PostgreSQL as an upgrade does."""
        self.postgres.restart()

    def postgres_is_killed(self) -> None:
        """Kill PostgreSQL, and let it recover."""
        self.postgres.kill()
        self.postgres.start()

    def backends_are_ended(self) -> None:
        """End all of the relay's sessions, in the midst of whatever they do."""
        with psycopg.connect(self.postgres.url()) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'outbox%'"
            )

    def redis_is_killed(self) -> None:
        """Kill Redis, with all messages in it, and start it again."""
        self.redis.kill()
        self.redis.start()

    def redis_is_frozen(self) -> None:
        """Freeze Redis for a moment."""
        self._freeze(self.redis, seconds=3)

    def kafka_is_killed(self) -> None:
        """Kill the broker, and start it again."""
        self.kafka.kill()
        self.kafka.start()

    def kafka_is_frozen(self) -> None:
        """Freeze the broker for longer than the delivery of a batch may take."""
        self._freeze(self.kafka, seconds=DELIVERY_SECONDS + 2)

    def _any_child(self) -> psutil.Process:
        """Return a child of a pool that lives: one that died a moment ago may still be listed."""
        worker = self.chance.choice(self.workers).await_ready()
        return self.chance.choice(until(lambda: [*filter(is_alive, worker.children)], "a child lives"))

    def _freeze(self, server: RedisServer | ApacheKafka, *, seconds: float) -> None:
        server.freeze()
        self._wait(seconds)
        server.thaw()

    def _wait(self, seconds: float) -> None:
        """Let so much time pass by the database's clock, which leases go by."""
        end = database_time(self.postgres.url()) + timedelta(seconds=seconds)
        until(lambda: database_time(self.postgres.url()) > end, "the time has passed")

    @property
    def ways(self) -> list[Callable[[], None]]:
        """All the ways to break something."""
        return [
            self.a_worker_is_killed,
            self.a_worker_is_restarted,
            self.a_child_is_killed,
            self.a_child_is_frozen,
            self.beat_is_killed,
            self.postgres_is_restarted,
            self.postgres_is_killed,
            self.backends_are_ended,
            self.redis_is_killed,
            self.redis_is_frozen,
            self.kafka_is_killed,
            self.kafka_is_frozen,
        ]

    def accidents(self, count: int) -> Iterator[Callable[[], None]]:
        """Choose so many ways: each once, in any order, and again."""
        left: list[Callable[[], None]] = []
        for _ in range(count):
            left = left or self.chance.sample(self.ways, len(self.ways))
            yield left.pop()
