"""Follows topics from their end over confluent-kafka, with the settings its producer has."""

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

from confluent_kafka import OFFSET_END, Consumer, KafkaException, Message, TopicPartition

from outbox_tasks.errors import BrokerUnavailableError, TopicMissingError
from outbox_tasks.publishing.arrival import Arrival
from outbox_tasks.publishing.confluent_config import Heard, client_config, producer_config
from outbox_tasks.publishing.confluent_errors import error_of
from outbox_tasks.publishing.verdicts import describe
from outbox_tasks.settings import Settings

_LOOK_UP_SECONDS = 0.5
"""How long a wait for records cannot be interrupted."""


def tail(settings: Settings, topics: Sequence[str]) -> Iterator[Arrival]:
    """Yield records that arrive in topics from now on, without end.

    Raises:
        BrokerUnavailableError: no broker answers.
        SettingsError: `outbox_kafka` has an unknown name, or a wrong value.
        TopicMissingError: one of the topics does not exist.
    """
    heard = Heard()
    producer_config(settings, heard)  # says what is wrong with them
    # The client wants a group, though it neither joins it nor commits anything.
    config = client_config(settings, heard) | {"group.id": settings.client_id, "enable.auto.commit": False}
    with closing(Consumer(config)) as consumer:
        try:
            consumer.assign([place for topic in topics for place in _places(consumer, topic, settings)])
        except KafkaException as failure:
            with suppress(KafkaException):
                consumer.poll(0)  # hears why
            reasons = "; ".join(describe(error_of(error)) for error in [*heard.errors.values(), failure.args[0]])
            where = settings.bootstrap_servers
            raise BrokerUnavailableError(f"no broker answers at {where}: {reasons}") from failure
        while True:
            message = consumer.poll(_LOOK_UP_SECONDS)
            if message is not None and message.error() is None:
                yield _arrival(message)


def _places(consumer: Consumer, topic: str, settings: Settings) -> list[TopicPartition]:
    found = consumer.list_topics(topic, timeout=settings.probe_seconds).topics[topic]
    if found.error is not None or not found.partitions:
        raise TopicMissingError(topic)
    return [TopicPartition(topic, partition, OFFSET_END) for partition in sorted(found.partitions)]


def _arrival(message: Message) -> Arrival:
    place = (str(message.topic()), int(message.partition() or 0), int(message.offset() or 0))
    headers: Any = message.headers()
    key: Any = message.key()
    return Arrival.of(place, milliseconds=message.timestamp()[1], key=key, headers=headers or [])
