"""A held backlog: what waits behind a blocked key costs other keys nothing, and goes out in order at the end."""

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic
from uuid import uuid4

import psycopg
import pytest
from support.consuming import consume_all
from support.judging import judge_records
from support.leases import database_time
from support.misfortune import SteadyWriter, is_published
from support.relaying import assert_consistent, rows
from support.workers import Deployment, fleet
from support.writers import Written

from outbox_tasks.testing.services import Broker

BACKLOG = int(os.environ.get("TEST_BACKLOG", "200000"))
SAMPLES = 400
"""Events of other keys, whose latency is taken, in each phase."""
EVENTS_A_SECOND = 40
KEYS = 200
LIMIT = 5_000
WORST_RATIO = 1.5
PATIENCE_SECONDS = 200.0

# In one transaction: an event that is too big, and all that come after it in its key.
_BACKLOG = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, topic, payload, headers)
SELECT 'order', 'stuck', 'order_changed', %(topic)s, jsonb_build_object('key', 'stuck', 'sequence', number),
       CASE number WHEN 1 THEN jsonb_build_object('padding', repeat('x', %(padding)s)) ELSE '{}' END
  FROM generate_series(1, %(events)s) AS number ORDER BY number
RETURNING aggregate_id, (payload->>'sequence')::int, event_id
"""
_SHARD = "SELECT shard FROM outbox WHERE event_id = %s"
_NOT_HELD = "SELECT FROM outbox WHERE state = 'pending' AND shard = %s AND aggregate_id = 'stuck' LIMIT 1"
_DEAD = "SELECT FROM outbox_dead_letter WHERE resolution IS NULL"
_LATENCIES = """
SELECT extract(epoch FROM published_at - created_at)::float8 AS seconds FROM outbox
 WHERE aggregate_id <> 'stuck' AND created_at BETWEEN %s AND %s
"""


@dataclass(frozen=True)
class Latencies:
    """How long events of other keys took from their insertion to their being known as published, in seconds."""

    seconds: list[float]

    @property
    def median(self) -> float:
        """The p50."""
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        last = statistics.quantiles(self.seconds, n=100)[-1]
        return f"p50 {self.median:.3f} p99 {last:.3f} max {max(self.seconds):.3f} of {len(self.seconds)}"


def put_backlog(database_url: str, topic: str) -> list[Written]:
    """Write the backlog; returns it."""
    values = {"topic": topic, "padding": 2 * LIMIT, "events": BACKLOG}
    with psycopg.connect(database_url) as connection:
        return [Written(*row) for row in connection.execute(_BACKLOG, values)]


def redrive(deployment: Deployment, event: Written) -> None:
    """Put a dead letter back, as a person would."""
    reason = ("--reason", "the limit is raised")
    done = deployment.run("outbox", "dead-letters", "redrive", "--id", str(event.event_id), *reason)
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Phases:
    """Takes latencies while a steady writer writes, phase by phase."""

    database_url: str
    writer: SteadyWriter
    until: Callable[..., None]

    def latencies(self, *, since: datetime) -> Latencies:
        """Return the latencies of the events written from a moment on until now, once they are all published."""
        now, last = database_time(self.database_url), self.writer.written[-1]
        self.until(lambda: is_published(self.database_url, last), "other keys are published", seconds=PATIENCE_SECONDS)
        return Latencies([row["seconds"] for row in rows(self.database_url, _LATENCIES, since, now)])

    def sample(self) -> Latencies:
        """Return the latencies of so many events written from now on."""
        began, enough = database_time(self.database_url), len(self.writer.written) + SAMPLES
        self.until(lambda: len(self.writer.written) >= enough, "there are enough samples")
        return self.latencies(since=began)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("broker", ["kafka"], indirect=True)
def test_a_backlog_behind_a_blocked_key(deployment: Deployment, broker: Broker) -> None:
    """200,000 events behind a dead letter leave other keys' latency as it is, and go out in order once redriven."""
    database, topic = deployment.database_url, f"topic-{uuid4().hex}"
    broker.create_topic(topic, config={"max.message.bytes": str(LIMIT)})
    deployment = deployment.but(
        dispatch_seconds=0.25, retry_attempts=1, dead_letter_policy="block", topic_facts_seconds=0.5
    )
    with fleet(deployment) as celery:
        celery.worker(children=2)
        celery.beat()
        celery.await_ready()
        with SteadyWriter(database, topic, keys=KEYS, per_second=EVENTS_A_SECOND) as writer:
            phases = Phases(database, writer, celery.until)
            celery.until(lambda: writer.written and is_published(database, writer.written[-1]), "all are at work")
            before = phases.sample()
            arrived, began = database_time(database), monotonic()
            backlog = put_backlog(database, topic)
            written = monotonic()
            shard = rows(database, _SHARD, backlog[0].event_id)[0]["shard"]
            celery.until(lambda: not rows(database, _NOT_HELD, shard), "the backlog is held", seconds=PATIENCE_SECONDS)
            held = monotonic()
            celery.until(lambda: rows(database, _DEAD), "its first event is a dead letter")
            becoming_held = phases.latencies(since=arrived)
            behind = phases.sample()
            put_right, freeing = database_time(database), monotonic()
            broker.alter_topic(topic, {"max.message.bytes": "1000000"})
            redrive(deployment, backlog[0])
            celery.until(
                lambda: is_published(database, backlog[-1]), "the backlog is published", seconds=PATIENCE_SECONDS
            )
            freed = monotonic()
            draining = phases.latencies(since=put_right)
            after = phases.sample()
        celery.until(lambda: is_published(database, writer.written[-1]), "everything is published")
    without = Latencies(before.seconds + after.seconds)
    figures = {
        "before": before,
        "while the backlog becomes held": becoming_held,
        "behind": behind,
        "while it drains": draining,
        "after": after,
        "p50 with / without": round(behind.median / without.median, 2),
        "seconds to write, hold, drain": [round(s, 1) for s in (written - began, held - written, freed - freeing)],
    }
    print(*(f"{name}: {figure}" for name, figure in figures.items()), sep="\n")  # noqa: T201 - for whoever measures
    assert rows(database, "SELECT FROM outbox_blocked_key") == []
    assert rows(database, _DEAD) == []
    assert_consistent(database)
    records = consume_all(broker.bootstrap_servers, topic, timeout=timedelta(seconds=PATIENCE_SECONDS))
    judgement = judge_records(records, [*writer.written, *backlog])
    assert judgement.faults == {}
    assert judgement.duplicates == 0
    assert behind.median <= WORST_RATIO * without.median, figures
