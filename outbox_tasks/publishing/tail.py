"""Follows topics from their end: what the broker has, not what the table says."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError

from outbox_tasks.errors import BrokerUnavailableError, TopicMissingError
from outbox_tasks.publishing.kafka_config import client_config
from outbox_tasks.publishing.routes import EVENT_ID_HEADER, EVENT_TYPE_HEADER
from outbox_tasks.publishing.verdicts import describe
from outbox_tasks.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A record that arrived: where, when, and which event it is. The payload is not looked at."""

    topic: str
    partition: int
    offset: int
    time: datetime
    key: str
    event_type: str
    event_id: str

    def as_line(self) -> str:
        """Return one line for a terminal."""
        where = f"{self.topic}/{self.partition}@{self.offset}"
        return f"{self.time:%H:%M:%S.%f}  {where:<30} {self.key:<24} {self.event_type:<24} {self.event_id}"


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
    headers = {name: value.decode(errors="replace") for name, value in record.headers}
    return Arrival(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        time=datetime.fromtimestamp(record.timestamp / 1000, tz=UTC),
        key="-" if record.key is None else record.key.decode(errors="replace"),
        event_type=headers.get(EVENT_TYPE_HEADER, "-"),
        event_id=headers.get(EVENT_ID_HEADER, "-"),
    )
