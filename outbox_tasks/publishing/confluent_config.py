"""What librdkafka's clients are given: our settings, and those of `outbox_kafka` in librdkafka's own names."""

import logging
import math
import re
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox_tasks.errors import SettingsError
from outbox_tasks.settings import Settings

log = logging.getLogger(__name__)

# The source of names and defaults: https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md
DEFAULTS: dict[str, Any] = {
    "linger.ms": 5,
    # One that suits what brokers take unless told otherwise, where librdkafka's own is below it.
    "message.max.bytes": 1_048_576,
    "batch.size": 1_000_000,
    "queue.buffering.max.messages": 1_000_000,
    "queue.buffering.max.kbytes": 1_048_576,
    "allow.auto.create.topics": False,
    "reconnect.backoff.max.ms": 1000,
    "log.connection.close": False,
}

ALIASES = {"queue.buffering.max.ms": "linger.ms", "compression.codec": "compression.type"}
"""Second names of settings that are calculated with."""

NUMBERS = ("batch.size", "message.max.bytes")
"""Settings that are calculated with."""

_SHORTEST_TIMEOUT, _LONGEST_TIMEOUT = 10, 300_000
"""What `socket.timeout.ms` may be (the same source)."""

_MOST_REASONS = 10

_TOLD_WHEN_OPENING = "Failed to create producer"
"""Begins what librdkafka says of settings that are right one by one: files that are missing, say."""

_AGE = re.compile(r" \(after \d+ms in state \w+(, \d+ identical error\(s\) suppressed)?\)")


class Heard:
    """Listens to a client: notes why connections fail, each reason once, and passes its log on, quietly."""

    def __init__(self) -> None:
        self.errors: dict[str, KafkaError] = {}

    def error(self, error: KafkaError) -> None:
        """Note an error; that all brokers are down says nothing new."""
        text = _AGE.sub("", error.str())
        new = error.code() != KafkaError._ALL_BROKERS_DOWN  # noqa: SLF001 - that is its name
        if new and len(self.errors) < _MOST_REASONS:
            self.errors.setdefault(text, error)
        log.debug("%s", text)

    def log(self, _level: int, message: str, *arguments: object) -> None:
        """Pass on what a logger is given. What matters of it reaches a run's report in other ways."""
        log.debug(message, *arguments)


def client_config(settings: Settings, heard: Heard) -> dict[str, Any]:
    """Return the settings of any client: its address, its times, and all of `outbox_kafka`."""
    milliseconds = max(1000, round(settings.probe_seconds * 1000))
    theirs = {ALIASES.get(name, name): value for name, value in settings.kafka.items()}
    return {"socket.connection.setup.timeout.ms": milliseconds} | DEFAULTS | theirs | {
        "bootstrap.servers": settings.bootstrap_servers,
        "client.id": settings.client_id,
        "error_cb": heard.error,
        "logger": heard,
    }  # fmt: skip


def producer_config(settings: Settings, heard: Heard) -> dict[str, Any]:
    """Return the producer's settings. What the guarantees rest on comes last and cannot be changed.

    Raises:
        SettingsError: `outbox_kafka` has an unknown name, or a wrong value.
    """
    base = client_config(settings, heard)
    numbers = {name: _number(name, base[name]) for name in NUMBERS} | {"linger.ms": _linger(base["linger.ms"])}
    delivery = round(settings.delivery_seconds * 1000)
    # Half of it, so that a request without an answer is sent once more before its records are given up.
    request = min(max(_SHORTEST_TIMEOUT, delivery // 2), _LONGEST_TIMEOUT)
    config = base | numbers | {
        "acks": "all",
        "enable.idempotence": True,
        "enable.gapless.guarantee": True,
        "partitioner": "murmur2_random",
        "delivery.report.only.error": True,
        # Twice as long as we wait: then we purge all. Records that time out one by one may be passed by later ones,
        # for the gapless guarantee does not cover them.
        "message.timeout.ms": 2 * delivery,
        "request.timeout.ms": request,
        "socket.timeout.ms": request,
        "topic.metadata.propagation.max.ms": round(settings.probe_seconds * 1000),
    }  # fmt: skip
    _check(config)
    return config


def _number(name: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise SettingsError(f"outbox_kafka has {name} {value!r}: it is to be a whole number") from None


def _linger(value: object) -> float:
    try:
        milliseconds = float(str(value))
    except ValueError:
        milliseconds = math.nan
    if not math.isfinite(milliseconds):  # librdkafka would take nan
        raise SettingsError(f"outbox_kafka has linger.ms {value!r}: it is to be a number")
    return milliseconds


def _check(config: dict[str, Any]) -> None:
    """Have librdkafka read the settings, in a client that has nowhere to connect to."""
    try:
        Producer(config | {"bootstrap.servers": ""})
    except KafkaException as error:
        text = error.args[0].str().strip()
        if not text.startswith(_TOLD_WHEN_OPENING):
            dots = ", whose names have dots, not underscores" if "_" in text else ""
            raise SettingsError(f"outbox_kafka will not do for librdkafka{dots}: {text}") from None
    except (TypeError, ValueError) as error:
        raise SettingsError(f"outbox_kafka will not do for confluent-kafka: {error}") from None
