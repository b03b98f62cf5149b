"""Follows topics from their end over kafka-python: what the broker has, not what the table says."""

from collections.abc import Iterator, Sequence
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError

from outbox_tasks.errors import BrokerUnavailableError, TopicMissingError
from outbox_tasks.publishing.arrival import Arrival
from outbox_tasks.publishing.kafka_config import client_config
from outbox_tasks.publishing.verdicts import describe
from outbox_tasks.settings import Settings


def tail(settings: Settings, topics: Sequence[str]) -> Iterator[Arrival]:
    """Yield records that arrive in topics from now on, without end.

    Raises:
        BrokerUnavailableError: no broker answers.
        TopicMissingError: one of the topics does not exist.
    """
    try:
        consumer = KafkaConsumer(**client_config(settings, of=KafkaConsumer), enable_auto_commit=False, group_id=None)
    except (KafkaError, OSError) as error:
        raise BrokerUnavailableError(f"no broker answers at {settings.bootstrap_servers}: {describe(error)}") from error
    try:
        consumer.assign([place for topic in topics for place in _places(consumer, topic)])
        consumer.seek_to_end()
        for record in consumer:
            yield _arrival(record)
    finally:
        consumer.close(autocommit=False)


def _places(consumer: KafkaConsumer, topic: str) -> list[TopicPartition]:
    partitions = consumer.partitions_for_topic(topic)
    if not partitions:
        raise TopicMissingError(topic)
    return [TopicPartition(topic, partition) for partition in sorted(partitions)]


def _arrival(record: Any) -> Arrival:
    place = (record.topic, record.partition, record.offset)
    return Arrival.of(place, milliseconds=record.timestamp, key=record.key, headers=record.headers)
