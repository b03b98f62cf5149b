"""A script: sends the events of a table with a bare Kafka client, `python -m bench.raw`; the ceiling of each client."""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
from kafka import KafkaProducer

from bench.script import answer, await_go
from outbox_tasks.publishing.kafka_config import client_config, producer_config
from outbox_tasks.settings import Settings

MESSAGES = """
SELECT aggregate_id, convert_to(payload::text, 'UTF8'), event_id::text, event_type FROM outbox ORDER BY id
"""

ACKNOWLEDGED_SECONDS = 120

WARM_EVENTS = 1_000
"""Sent elsewhere before anything is measured, so that the client is connected."""

Message = tuple[bytes, bytes, list[tuple[str, bytes]]]
"""Key, value and headers, as the relay sends them."""

Send = Callable[[str, list[Message]], None]
"""Sends messages to a topic and returns when all are acknowledged."""


def main() -> None:
    """Send everything once, and tell how long it took."""
    parser = argparse.ArgumentParser(prog="python -m bench.raw", description=__doc__)
    for name in ("--database-url", "--bootstrap-servers", "--topic", "--warm-topic"):
        parser.add_argument(name, required=True)
    parser.add_argument("--client", choices=sorted(CLIENTS), required=True)
    given = parser.parse_args()
    messages = read_messages(given.database_url)
    with CLIENTS[given.client](given.bootstrap_servers) as send:
        send(given.warm_topic, messages[:WARM_EVENTS])
        await_go()
        started, cpu = time.time(), time.process_time()
        send(given.topic, messages)
        answer({"started": started, "ended": time.time(), "cpu_seconds": time.process_time() - cpu})


def read_messages(database_url: str) -> list[Message]:
    """Return the messages of a table, in order."""
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(MESSAGES).fetchall()
    return [
        (key.encode(), bytes(value), [("event_id", event_id.encode()), ("event_type", event_type.encode())])
        for key, value, event_id, event_type in rows
    ]


def relay_settings(bootstrap_servers: str) -> dict[str, Any]:
    """Return the settings of the relay's own kafka-python producer."""
    settings = Settings(database_url="postgresql://nowhere/nothing", bootstrap_servers=bootstrap_servers)
    return client_config(settings, of=KafkaProducer) | producer_config(settings)


@contextmanager
def _as_the_relay(bootstrap_servers: str) -> Iterator[Send]:
    with _kafka_python(relay_settings(bootstrap_servers)) as send:
        yield send


@contextmanager
def _by_default(bootstrap_servers: str) -> Iterator[Send]:
    options = {"bootstrap_servers": bootstrap_servers, "acks": "all", "enable_idempotence": True}
    with _kafka_python(options) as send:
        yield send


@contextmanager
def _kafka_python(options: dict[str, Any]) -> Iterator[Send]:
    with closing(KafkaProducer(**options)) as producer:

        def send(topic: str, messages: list[Message]) -> None:
            producer.partitions_for(topic)
            futures = [producer.send(topic, key=key, value=value, headers=more) for key, value, more in messages]
            for future in futures:
                future.get(timeout=ACKNOWLEDGED_SECONDS)

        yield send


@contextmanager
def _confluent(bootstrap_servers: str) -> Iterator[Send]:
    from confluent_kafka import Producer  # noqa: PLC0415 - may not be installed

    producer = Producer({
        "bootstrap.servers": bootstrap_servers,
        "acks": "all",
        "enable.idempotence": True,
        "linger.ms": 5,
        "partitioner": "murmur2_random",
        "queue.buffering.max.messages": 10_000_000,
        "queue.buffering.max.kbytes": 2_000_000,
    })  # fmt: skip
    yield lambda topic, messages: _send_confluent(producer, topic, messages)


def _send_confluent(producer: Any, topic: str, messages: list[Message]) -> None:
    failures: list[object] = []

    def delivered(error: object, _message: object) -> None:
        if error is not None:
            failures.append(error)

    for key, value, headers in messages:
        producer.produce(topic, key=key, value=value, headers=headers, on_delivery=delivered)
        producer.poll(0)
    if producer.flush(ACKNOWLEDGED_SECONDS) or failures:
        raise SystemExit(f"not acknowledged: {failures[:1] or 'in time'}")


CLIENTS = {"kafka-python": _as_the_relay, "kafka-python-defaults": _by_default, "confluent-kafka": _confluent}


if __name__ == "__main__":
    main()
