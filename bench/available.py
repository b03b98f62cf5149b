"""What this checkout and this machine can do: publishers, clients of Kafka."""

from importlib.util import find_spec

from outbox_tasks.settings import Settings

KAFKA_PYTHON = "kafka-python"
CONFLUENT = "confluent-kafka"


def has_confluent() -> bool:
    """Say whether the confluent client is installed."""
    return find_spec("confluent_kafka") is not None


def can_choose_publisher() -> bool:
    """Say whether there is more than kafka-python to publish with."""
    return "publisher" in Settings.model_fields


def publishers() -> list[str]:
    """Return the publishers that can be measured."""
    return [KAFKA_PYTHON, CONFLUENT] if can_choose_publisher() and has_confluent() else [KAFKA_PYTHON]


def publisher_settings(publisher: str) -> dict[str, str]:
    """Return the settings that choose a publisher."""
    return {"publisher": publisher} if can_choose_publisher() else {}
