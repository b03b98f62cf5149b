"""Reads topics: with confluent's client where it is installed, else with kafka-python."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from kafka import KafkaConsumer, TopicPartition

from bench.available import has_confluent

WAIT_SECONDS = 0.05
"""How long a broker may keep a fetch waiting; it answers at once when something comes."""


class Arrival(NamedTuple):
    """A record: when it came (seconds of the epoch), its key, and the event it is."""

    at: float
    key: bytes | None
    event_id: str


Poll = Callable[[], list[Arrival]]


@contextmanager
def end_of(bootstrap_servers: str, topic: str) -> Iterator[Callable[[], int]]:
    """Yield a function that tells how many records a topic has; for one thread."""
    with closing(KafkaConsumer(bootstrap_servers=bootstrap_servers)) as consumer:
        partitions = _partitions(consumer, topic)
        yield lambda: sum(consumer.end_offsets(partitions).values())


@contextmanager
def reading(bootstrap_servers: str, topic: str) -> Iterator[Poll]:
    """Yield a function that returns what came since its last call, or nothing after a moment."""
    reader = _confluent if has_confluent() else _kafka_python
    with reader(bootstrap_servers, topic) as poll:
        yield poll


@contextmanager
def _kafka_python(bootstrap_servers: str, topic: str) -> Iterator[Poll]:
    wait = round(WAIT_SECONDS * 1000)
    options = {"bootstrap_servers": bootstrap_servers, "enable_auto_commit": False, "fetch_max_wait_ms": wait}
    with closing(KafkaConsumer(**options)) as consumer:
        consumer.assign(_partitions(consumer, topic))
        consumer.seek_to_beginning()
        yield lambda: _arrived(consumer.poll(timeout_ms=wait))


def _arrived(polled: dict[TopicPartition, list[Any]]) -> list[Arrival]:
    now = time.time()
    records = [record for batch in polled.values() for record in batch]
    return [Arrival(now, record.key, _event_id(record.headers)) for record in records]


def _partitions(consumer: KafkaConsumer, topic: str) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic) or ()]


@contextmanager
def _confluent(bootstrap_servers: str, topic: str) -> Iterator[Poll]:
    from confluent_kafka import OFFSET_BEGINNING, Consumer  # noqa: PLC0415 - may not be installed
    from confluent_kafka import TopicPartition as Partition  # noqa: PLC0415

    options = {
        "bootstrap.servers": bootstrap_servers,
        "group.id": "bench",
        "enable.auto.commit": False,
        "fetch.wait.max.ms": round(WAIT_SECONDS * 1000),
        "socket.nagle.disable": True,
    }
    with closing(Consumer(options)) as consumer:
        partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        consumer.assign([Partition(topic, number, OFFSET_BEGINNING) for number in partitions])
        yield lambda: _polled(consumer)


def _polled(consumer: Any) -> list[Arrival]:
    """Take one record; `consume` would wait for as many as it is asked for."""
    record = consumer.poll(WAIT_SECONDS)
    if record is None or record.error():
        return []
    return [Arrival(time.time(), record.key(), _event_id(record.headers()))]


def _event_id(headers: list[tuple[str, bytes]] | None) -> str:
    return next((value.decode() for name, value in headers or () if name == "event_id"), "")
