"""Chooses the Kafka client: the one place that knows both. confluent-kafka is imported only where it is chosen."""

import importlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from outbox_tasks.deadline import Clock
from outbox_tasks.errors import SettingsError
from outbox_tasks.publishing import tail as kafka_python_tail
from outbox_tasks.publishing.arrival import Arrival
from outbox_tasks.publishing.kafka_python import KafkaPythonPublisher
from outbox_tasks.publishing.publisher import Publisher
from outbox_tasks.settings import Settings


def new_publisher(settings: Settings, *, clock: Clock = time.monotonic) -> Publisher:
    """Return the publisher that the settings choose; nothing is opened yet.

    Raises:
        SettingsError: its client is not installed, or does not know what `outbox_kafka` has.
    """
    if settings.publisher == "kafka-python":
        return KafkaPythonPublisher(settings, clock=clock)
    made: Publisher = _of_confluent("confluent").ConfluentPublisher(settings, clock=clock)
    return made


def tail(settings: Settings, topics: Sequence[str]) -> Iterator[Arrival]:
    """Return the records that arrive in topics from now on, without end, over the client that the settings choose.

    Raises:
        BrokerUnavailableError: no broker answers.
        SettingsError: the client is not installed, or does not know what `outbox_kafka` has.
        TopicMissingError: one of the topics does not exist.
    """
    if settings.publisher == "kafka-python":
        return kafka_python_tail.tail(settings, topics)
    arrivals: Iterator[Arrival] = _of_confluent("confluent_tail").tail(settings, topics)
    return arrivals


def _of_confluent(module: str) -> Any:
    """Import a module of ours that needs confluent-kafka."""
    try:
        return importlib.import_module(f"outbox_tasks.publishing.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "confluent_kafka":
            raise
        raise SettingsError(
            "outbox_publisher is confluent-kafka, which is not installed: pip install outbox-tasks[confluent]"
        ) from error
