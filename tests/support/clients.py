"""The two Kafka clients the relay can work with, for tests that must pass on either."""

import time
from dataclasses import dataclass
from typing import Any

import pytest

from outbox_tasks.deadline import Clock
from outbox_tasks.publishing.factory import new_publisher
from outbox_tasks.publishing.publisher import Publisher
from outbox_tasks.settings import PublisherName, Settings
from outbox_tasks.testing.services import Broker
from support.relaying import relay_settings

_LIBRDKAFKAS = {
    "compression_type": "compression.type",
    "linger_ms": "linger.ms",
    "max_request_size": "message.max.bytes",
    "sasl_mechanism": "sasl.mechanism",
    "sasl_plain_password": "sasl.password",
    "sasl_plain_username": "sasl.username",
    "security_protocol": "security.protocol",
}
"""What kafka-python's settings are called in librdkafka."""


@dataclass(frozen=True)
class Client:
    """One of the clients; settings for it are written in kafka-python's names."""

    name: PublisherName

    def named(self, kafka: dict[str, object]) -> dict[str, object]:
        """Return settings of `outbox_kafka` in the client's own names."""
        return kafka if self.name == "kafka-python" else {_LIBRDKAFKAS[name]: kafka[name] for name in kafka}

    def settings(self, broker: Broker | str, *, database_url: str = "dbname=unused", **changed: Any) -> Settings:
        """Return settings for a broker; without a database where none is needed."""
        kafka = changed.pop("kafka", {})
        assert isinstance(kafka, dict)
        return relay_settings(database_url, broker, publisher=self.name, kafka=self.named(kafka), **changed)

    def publisher(self, broker: Broker | str, *, clock: Clock = time.monotonic, **changed: Any) -> Publisher:
        """Return a publisher that has not connected yet."""
        return new_publisher(self.settings(broker, **changed), clock=clock)


BOTH = (Client("kafka-python"), Client("confluent-kafka"))

on_brokers_and_clients = pytest.mark.parametrize(
    ("broker", "client"),
    [("tansu", BOTH[0]), ("kafka", BOTH[0]), ("kafka", BOTH[1])],
    indirect=True,
    ids=["tansu-kafka-python", "kafka-kafka-python", "kafka-confluent-kafka"],
)
"""The default client on both brokers, and the other on the one whose behaviour counts."""
