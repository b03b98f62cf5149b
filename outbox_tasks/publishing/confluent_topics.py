"""Asks brokers about topics over confluent-kafka's admin client."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType, TopicDescription
from kafka.errors import UnknownTopicOrPartitionError

from outbox_tasks.errors import BrokerUnavailableError, TopicMissingError
from outbox_tasks.publishing.confluent_errors import error_of
from outbox_tasks.publishing.topic_facts import Facts, Partition, Told, facts_of
from outbox_tasks.publishing.verdicts import describe

log = logging.getLogger(__name__)


def ask(config: Mapping[str, Any], topics: Sequence[str], *, seconds: float) -> dict[str, Facts]:
    """Return the facts of each topic, or what is wrong with it; `seconds` is for each of two requests.

    Raises:
        BrokerUnavailableError: no broker answered.
    """
    admin = AdminClient(dict(config))
    described = admin.describe_topics(TopicCollection(list(topics)), request_timeout=seconds)
    found = {topic: _described(topic, future) for topic, future in described.items()}
    there = [topic for topic, description in found.items() if isinstance(description, TopicDescription)]
    told = _told(admin, there, seconds=seconds)
    return {topic: _facts_of(topic, description, told.get(topic, {})) for topic, description in found.items()}


def _described(topic: str, future: "Future[TopicDescription]") -> TopicDescription | BaseException:
    try:
        return future.result()
    except KafkaException as failure:
        error = failure.args[0]
        if error.code() < 0:
            reason = describe(error_of(error))
            raise BrokerUnavailableError(f"brokers did not describe topics: {reason}") from failure
        known = error_of(error, topic=topic)
        return TopicMissingError(topic) if isinstance(known, UnknownTopicOrPartitionError) else known


def _told(admin: AdminClient, topics: Sequence[str], *, seconds: float) -> dict[str, Told]:
    """Return the settings of topics, or nothing where the broker does not tell: then it alone judges records."""
    if not topics:
        return {}
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
    told: dict[str, Told] = {}
    for resource, future in admin.describe_configs(resources, request_timeout=seconds).items():
        try:
            told[resource.name] = {name: entry.value for name, entry in future.result().items()}
        except KafkaException as error:
            log.info("the brokers do not tell the limits of %s: %s", resource.name, describe(error_of(error.args[0])))
    return told


def _facts_of(topic: str, description: TopicDescription | BaseException, told: Told) -> Facts:
    if isinstance(description, BaseException):
        return description
    partitions = [
        Partition(
            number=partition.id,
            led=partition.leader is not None and partition.leader.id >= 0,
            replicas=len(partition.replicas),
            in_sync=len(partition.isr),
        )
        for partition in description.partitions
    ]
    return facts_of(topic, partitions, told)
