"""A long outage in small: whatever keeps the broker away, no event pays for it, and the backlog drains by itself."""

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from threading import Event
from time import monotonic
from uuid import uuid4

import psycopg
import pytest
from celery import Celery
from psycopg import sql
from support.judging import judge
from support.leases import database_time
from support.misfortune import SteadyWriter, is_published
from support.proxied import ProxiedBroker, behind_proxy
from support.relaying import assert_consistent, rows
from support.workers import CeleryProcess, Deployment, Fleet, fleet, redis_url_of_its_own
from support.writers import Written

from outbox_tasks.testing.services import ApacheKafka, PostgresServer, RedisServer, scratch_directory
from outbox_tasks.testing.services.kafka_jars import missing_tools

OUTAGE_SECONDS = float(os.environ.get("TEST_OUTAGE_SECONDS", "60"))
"""With kafka-python, the default; with confluent-kafka half of it."""
EVENTS_A_SECOND = 200
KEYS = 500
DRAINS_WITHIN = timedelta(seconds=5)
IDLE_SHARE = 0.15
"""Of one core, for a whole worker with two children, once batches that were on their way have been given up."""
TASK_SECONDS = 20.0
"""Within which a task of somebody else gets its turn. The longest wait is for batches that were on their way when the
broker went: each child gives them outbox_delivery_seconds, that is 10 s."""
USUAL_TASK_SECONDS = 4.0
"""What it takes from then on: each child looks for the broker for outbox_probe_seconds, 2 s, tick after tick."""
WAITING = "SELECT event_id FROM outbox WHERE state = 'pending' ORDER BY id LIMIT 1"

Step = Callable[[ProxiedBroker], None]

OUTAGES: dict[str, tuple[Step, Step]] = {
    "frozen": (lambda stage: stage.broker.freeze(), lambda stage: stage.broker.thaw()),
    "killed": (lambda stage: stage.broker.kill(), lambda stage: stage.broker.start()),
    "unreachable": (lambda stage: stage.proxy.blackhole(), lambda stage: stage.proxy.heal()),
}
"""How the broker goes and comes back; a restarted one is back once it answers a request for metadata."""


@dataclass(frozen=True)
class Stage:
    """A deployment at work, with a broker that can be taken away from it."""

    deployment: Deployment
    proxied: ProxiedBroker
    celery: Fleet
    worker: CeleryProcess
    beat: CeleryProcess

    @property
    def database_url(self) -> str:
        """The database of all outages."""
        return self.deployment.database_url


@pytest.fixture(scope="module", params=["kafka-python", "confluent-kafka"])
def publisher(request: pytest.FixtureRequest) -> str:
    """Run all outages with each Kafka client."""
    return str(request.param)


@pytest.fixture(scope="module")
def module_database(postgres: PostgresServer, template_database: str, publisher: str) -> Iterator[str]:
    """Copy the migrated template to a database for this module and a client alone."""
    assert publisher
    name = f"test_{uuid4().hex}"
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        names = {"name": sql.Identifier(name), "template": sql.Identifier(template_database)}
        connection.execute(sql.SQL("CREATE DATABASE {name} TEMPLATE {template}").format(**names))
        yield postgres.url(name)
        connection.execute(sql.SQL("DROP DATABASE {name} WITH (FORCE)").format(**names))


@pytest.fixture(scope="module")
def stage(
    module_database: str, publisher: str, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """Run a worker of two children and a beat through all outages, one after the other, without a restart."""
    if missing_tools() and os.environ.get("TEST_REQUIRE_KAFKA") != "1":
        pytest.skip(f"Apache Kafka needs {' and '.join(missing_tools())}, which are not installed")
    with scratch_directory("outbox-test-") as directory, behind_proxy(ApacheKafka, directory) as proxied:
        deployment = Deployment(
            database_url=module_database,
            bootstrap_servers=proxied.broker.bootstrap_servers,
            redis_url=redis_url_of_its_own(redis_server),
            scratch=Path(tmp_path_factory.mktemp("outage")),
            settings={"publisher": publisher},
        )
        with fleet(deployment) as celery:
            worker, beat = celery.worker(children=2), celery.beat()
            celery.await_ready()
            yield Stage(deployment, proxied, celery, worker, beat)


def cpu_seconds(worker: CeleryProcess) -> float:
    """Return the processor time a worker and its children have used so far."""
    times = [process.cpu_times() for process in [worker.main, *worker.children]]
    return sum(float(time.user + time.system) for time in times)


@dataclass(frozen=True)
class Seen:
    """What was seen of a worker for a while: its share of a core, and how long each task of somebody else took."""

    cpu_share: float
    latencies: list[float]


def look_on(stage: Stage, *, seconds: float) -> Seen:
    """Look on for a while, sending a small task of somebody else's again and again."""
    began, cpu_before = monotonic(), cpu_seconds(stage.worker)
    latencies = task_latencies(stage.deployment, seconds=seconds)
    return Seen((cpu_seconds(stage.worker) - cpu_before) / (monotonic() - began), latencies)


def task_latencies(deployment: Deployment, *, seconds: float) -> list[float]:
    """Send a small task of somebody else's, again and again for a while; returns how long each took, in seconds."""
    client = Celery("somebody-else", broker=deployment.redis_url, backend=deployment.redis_url)
    took: list[float] = []
    end, pace = monotonic() + seconds, Event()
    while (began := monotonic()) < end:
        assert client.send_task("celery.accumulate", args=(1, 2)).get(timeout=60) == [1, 2]
        took.append(monotonic() - began)
        pace.wait(max(0.0, min(1.0, end - monotonic())))
    client.close()
    return took


def first_published(database_url: str, topic: str, *, since: datetime) -> datetime:
    """Return when the first event after a moment was published."""
    query = "SELECT min(published_at) AS at FROM outbox WHERE topic = %s AND published_at >= %s"
    at = rows(database_url, query, topic, since)[0]["at"]
    assert isinstance(at, datetime)
    return at


def first_pending(database_url: str, written: list[Written]) -> Written:
    """Return the oldest event that waits."""
    (row,) = rows(database_url, WAITING)
    (event,) = [event for event in written if event.event_id == row["event_id"]]
    return event


@pytest.mark.parametrize("kind", OUTAGES)
def test_an_outage_in_small(
    stage: Stage, publisher: str, kind: str, record_property: Callable[[str, object], None]
) -> None:
    """While a broker is away at 200 events/s no event pays and other tasks run; at its return the backlog drains."""
    seconds = OUTAGE_SECONDS if publisher == "kafka-python" else OUTAGE_SECONDS / 2
    database, (take_away, give_back) = stage.database_url, OUTAGES[kind]
    topic = f"{kind}-{uuid4().hex}"
    stage.proxied.broker.create_topic(topic)
    with SteadyWriter(database, topic, keys=KEYS, per_second=EVENTS_A_SECOND) as writer:
        stage.celery.until(lambda: writer.written and is_published(database, writer.written[0]), "publishing goes on")
        take_away(stage.proxied)
        try:
            first, second = (look_on(stage, seconds=seconds / 2) for _ in range(2))
            waiting = first_pending(database, writer.written)
            coming = database_time(database)
        finally:
            give_back(stage.proxied)
        back = database_time(database)
        stage.celery.until(lambda: is_published(database, waiting), "the oldest event that waited is published")
    stage.celery.until(lambda: not rows(database, WAITING), "the backlog is gone")
    resumed = first_published(database, topic, since=coming) - back
    latencies = [*first.latencies, *second.latencies]
    figures = {
        "events": len(writer.written),
        "cpu share, first half": round(first.cpu_share, 3),
        "cpu share, second half": round(second.cpu_share, 3),
        "other tasks, median": round(statistics.median(latencies), 3),
        "other tasks, slowest": round(max(latencies), 3),
        "resumed after": round(resumed.total_seconds(), 3),
    }
    record_property(kind, figures)
    print(kind, figures)  # noqa: T201 - figures for whoever runs this to measure
    assert len(writer.written) >= seconds * EVENTS_A_SECOND * 0.9
    assert rows(database, "SELECT sum(attempts)::int AS attempts FROM outbox") == [{"attempts": 0}]
    assert rows(database, "SELECT FROM outbox_blocked_key UNION ALL SELECT FROM outbox_dead_letter") == []
    assert_consistent(database)
    assert judge(stage.deployment.bootstrap_servers, topic, writer.written).faults == {}
    assert second.cpu_share < IDLE_SHARE, figures
    assert max(latencies) < TASK_SECONDS, figures
    assert statistics.median(latencies) < USUAL_TASK_SECONDS, figures
    assert resumed < DRAINS_WITHIN, figures
    assert stage.worker.is_running
    assert stage.beat.is_running
