"""How fast a backlog goes out: the bare producer, and the relay with one and two children."""

import time

import psycopg
from celery import Celery
from kafka import KafkaProducer

from bench.rig import Rig, until, write_backlog
from outbox_tasks.publishing.kafka_config import client_config, producer_config
from outbox_tasks.settings import Settings

# From the first dispatch run's start to the last event published.
RATE = """
SELECT (SELECT count(*) FROM outbox WHERE state = 'published')
       / extract(epoch FROM (SELECT max(published_at) FROM outbox) - (SELECT min(started_at) FROM outbox_run
                                                                       WHERE task = 'outbox.dispatch'
                                                                         AND (report ->> 'published')::int > 0))::float8
"""

MESSAGES = """
SELECT aggregate_id, convert_to(payload::text, 'UTF8'), event_id::text, event_type FROM outbox ORDER BY id
"""


def bare_producer(rig: Rig, events: int) -> float:
    """Return events a second of kafka-python alone, with the relay's own settings, messages and headers."""
    database_url = rig.new_database()
    write_backlog(database_url, events)
    topic = rig.new_topic()
    settings = Settings(database_url=database_url, bootstrap_servers=rig.broker.bootstrap_servers)
    with psycopg.connect(database_url) as connection:
        messages = connection.execute(MESSAGES).fetchall()
    producer = KafkaProducer(**(client_config(settings, of=KafkaProducer) | producer_config(settings)))
    producer.partitions_for(topic)
    started = time.monotonic()
    futures = [
        producer.send(
            topic,
            key=key.encode(),
            value=bytes(value),
            headers=[("event_id", event_id.encode()), ("event_type", event_type.encode())],
        )
        for key, value, event_id, event_type in messages
    ]
    for future in futures:
        future.get(timeout=60)
    seconds = time.monotonic() - started
    producer.close()
    return events / seconds


def relay(rig: Rig, events: int, *, children: int) -> float:
    """Return events a second of the relay: a worker with so many children, one dispatch sent."""
    database_url, topic = rig.new_database(), rig.new_topic()
    write_backlog(database_url, events)
    environment = rig.environment(database_url, topic, run_seconds=120, lease_seconds=180)
    app = Celery("bench", broker=rig.redis.url)
    with (
        rig.celery(environment, "worker", "-c", str(children), "-l", "warning"),
        psycopg.connect(database_url, autocommit=True) as connection,
    ):
        until(lambda: bool(app.control.ping(timeout=0.5)), "the worker")
        app.send_task("outbox.dispatch")
        until(lambda: _drained(connection), "the backlog to drain")
        row = connection.execute(RATE).fetchone()
    assert row is not None
    return float(row[0])


def _drained(connection: psycopg.Connection[tuple[object, ...]]) -> bool:
    waiting = connection.execute("SELECT FROM outbox WHERE state = 'pending' LIMIT 1").fetchone()
    running = connection.execute("SELECT FROM outbox_shard WHERE lease_token IS NOT NULL LIMIT 1").fetchone()
    return waiting is None and running is None
