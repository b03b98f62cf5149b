"""How long an event takes from its commit to a consumer."""

import json
import statistics
import threading
import time

import psycopg
from kafka import KafkaConsumer, TopicPartition

from bench.rig import Rig

INSERT = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
VALUES ('order', %s, 'placed', jsonb_build_object('at', %s::float8))
"""


def latency(rig: Rig, *, rate: int, seconds: float) -> tuple[float, float]:
    """Return p50 and p99, in milliseconds, of events written at a steady rate, a transaction each."""
    database_url, topic = rig.new_database(), rig.new_topic()
    environment = rig.environment(database_url, topic)
    events = round(rate * seconds)
    beat = ("beat", "-l", "warning", "-s", str(rig.directory / f"beat-{topic}"))
    with rig.celery(environment, "worker", "-c", "2", "-l", "warning"), rig.celery(environment, *beat):
        consumer = _Consumer(rig.broker.bootstrap_servers, topic)
        _write(database_url, rate=rate, events=rate)  # warms up: processes, connections, plans
        consumer.read(rate)
        consumer.ages.clear()
        reader = threading.Thread(target=consumer.read, args=(events,))
        reader.start()
        _write(database_url, rate=rate, events=events)
        reader.join(timeout=60)
    cuts = statistics.quantiles(consumer.ages, n=100)
    return cuts[49] * 1000, cuts[98] * 1000


class _Consumer:
    """Reads a topic and notes how old each record is when it arrives."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        self._consumer = KafkaConsumer(bootstrap_servers=bootstrap_servers, group_id=None, fetch_max_wait_ms=20)
        partitions = self._consumer.partitions_for_topic(topic) or set()
        self._consumer.assign([TopicPartition(topic, partition) for partition in partitions])
        self._consumer.seek_to_beginning()
        self.ages: list[float] = []

    def read(self, events: int) -> None:
        """Read so many records."""
        end = time.monotonic() + 120
        while len(self.ages) < events and time.monotonic() < end:
            for records in self._consumer.poll(timeout_ms=100).values():
                now = time.time()
                self.ages += [now - json.loads(record.value)["at"] for record in records]


def _write(database_url: str, *, rate: int, events: int) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        start = time.monotonic()
        for number in range(events):
            time.sleep(max(0.0, start + number / rate - time.monotonic()))
            connection.execute(INSERT, (str(number % 1000), time.time()))
