"""The publisher on kafka-python: idempotent, acknowledged by all, thrown away after any failure."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kafka import KafkaAdminClient, KafkaProducer, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.errors import KafkaError, UnknownTopicOrPartitionError, for_code
from kafka.future import Future

from outbox_tasks.deadline import Clock, Deadline
from outbox_tasks.errors import BrokerUnavailableError, MisconfiguredError, TopicMissingError
from outbox_tasks.publishing.kafka_config import client_config, producer_config
from outbox_tasks.publishing.last_words import last_words
from outbox_tasks.publishing.partitions import key_hash
from outbox_tasks.publishing.publisher import Limits, NotSentError, Record, Sent, Stopping
from outbox_tasks.publishing.topic_facts import Facts, Partition, TopicBook, facts_of
from outbox_tasks.publishing.verdicts import Verdict, describe, verdict_of
from outbox_tasks.settings import Settings

log = logging.getLogger(__name__)

_LOOK_UP_SECONDS = 0.1
"""How often a wait for acknowledgements looks up to see whether it shall stop."""

_JOIN_SECONDS = 1.0

_REJECTIONS = ("SaslAuthenticationFailed", "CERTIFICATE_VERIFY_FAILED")
"""What the client's log says where credentials, or certificates, are wrong."""

Handed = Any | BaseException
"""The client's future of a record, or why it did not take it."""


class KafkaPythonPublisher:
    """A `Publisher` on `kafka.KafkaProducer`. Made in the child that uses it; not shared between threads."""

    def __init__(self, settings: Settings, *, clock: Clock) -> None:
        self._settings = settings
        self._config = producer_config(settings)
        self._producer: KafkaProducer | None = None
        self.topics = TopicBook(self._ask, settings=settings, clock=clock)

    @property
    def limits(self) -> Limits:
        config = self._config
        return Limits(max_request_bytes=config["max_request_size"], compressed=config["compression_type"] is not None)

    def open(self) -> None:
        if self._producer is None:
            self._producer = self._connect(
                KafkaProducer, client_config(self._settings, of=KafkaProducer) | self._config
            )

    def send(self, records: Sequence[Record], *, deadline: Deadline, stopping: Stopping) -> Sent:
        self.open()
        if deadline.passed:
            return [NotSentError("it was too late to send")] * len(records)
        futures = self._hand_over(records)
        self._await([future for future in futures if isinstance(future, Future)], deadline, stopping)
        return [_outcome(future, stopping) for future in futures]

    def discard(self) -> None:
        producer, self._producer = self._producer, None
        self.topics.forget()
        if producer is not None:
            _force_close(producer)

    def close(self) -> None:
        self.discard()

    def _hand_over(self, records: Sequence[Record]) -> list[Handed]:
        """Give records to the client; once one of a key is not taken, no later one of that key is given."""
        assert self._producer is not None
        hand, stop = Hand(self._producer), partial(_stop, self._producer)
        handed: list[Handed] = []
        stopped: set[tuple[str, bytes | None]] = set()
        for record in records:
            if stopped and record[:2] in stopped:
                handed.append(NotSentError("a record before it failed"))
                continue
            try:
                # Any failure stops the client at once, from its own thread, before it drains what comes later: else,
                # with another producer epoch, later records of the key could pass the failed one.
                handed.append(hand(record).add_errback(stop))
            except (KafkaError, TypeError, ValueError, AssertionError) as error:
                handed.append(_untaken(error))
                if verdict_of(handed[-1]) is not Verdict.REFUSED:
                    return handed + [NotSentError("the client took no more")] * (len(records) - len(handed))
                stopped.add(record[:2])
        return handed

    def _await(self, futures: Sequence[Any], deadline: Deadline, stopping: Stopping) -> None:
        """Wait until all is acknowledged, something fails, the deadline has passed or somebody asks to stop.

        Flushing sends at once what would otherwise linger, and waits per batch, not per record.
        """
        assert self._producer is not None
        while not (all(future.is_done for future in futures) or deadline.passed or stopping()):
            with suppress(KafkaError):  # the futures keep it
                self._producer.flush(timeout=min(_LOOK_UP_SECONDS, deadline.left()))

    def _ask(self, topics: Sequence[str]) -> dict[str, Facts]:
        admin = self._connect(KafkaAdminClient, client_config(self._settings, of=KafkaAdminClient))
        try:
            described = admin.describe_topics(list(topics))
            limits = _limits(admin, topics)
        except KafkaError as error:
            raise BrokerUnavailableError(f"brokers did not describe topics: {describe(error)}") from error
        finally:
            admin.close()
        return {topic["name"]: _facts_of(topic, limits.get(topic["name"], {})) for topic in described}

    def _connect(self, client: type[Any], config: dict[str, Any]) -> Any:
        with last_words() as words:
            try:
                return client(**config)
            except (KafkaError, OSError, ValueError, RuntimeError, TypeError) as error:
                self.discard()
                reasons = "; ".join([describe(error), *words, *self._hints(words)])
                where = f"{self._settings.bootstrap_servers}: {reasons}"
                if isinstance(error, KafkaError | OSError) and not _is_rejected(error, words):
                    raise BrokerUnavailableError(f"no broker answers at {where}") from error
                raise MisconfiguredError(f"Kafka will not have this client at {where}") from error

    def _hints(self, words: Sequence[str]) -> Iterator[str]:
        """Say what a hung-up connection may mean: the client often misses the answer that comes just before it."""
        if "sasl_mechanism" in self._settings.kafka and any("disconnected" in word for word in words):
            yield "this is also how brokers end a connection with wrong credentials"


def _is_rejected(error: BaseException, words: Sequence[str]) -> bool:
    """Say whether the brokers answer, but not to this client."""
    return verdict_of(error) is Verdict.UNAUTHORIZED or any(sign in word for sign in _REJECTIONS for word in words)


class Hand:
    """Puts records into a producer's buffer: what `KafkaProducer.send` does with them, less what is known of ours.

    `send` looks at the types of every record and at its exact size, and hashes its key anew: nearly half its time.
    Large records and those without a key go through it all the same.
    """

    def __init__(self, producer: KafkaProducer) -> None:
        self._producer = producer
        self._append = producer._accumulator.append  # noqa: SLF001 - see the class
        self._looked_at = producer.config["max_request_size"] // 2
        self._places: dict[str, list[TopicPartition]] = {}

    def __call__(self, record: Record) -> Any:
        """Return the client's future of a record; raises what the client raises."""
        topic, key, value, headers = record
        if key is None or record.size > self._looked_at:
            return self._producer.send(topic, value=value, key=key, headers=headers)
        places = self._places.get(topic) or self._places_of(topic)
        place = places[key_hash(key) % len(places)]
        future, full, _new, _abort = self._append(place, None, key, value, headers)
        if full:
            self._producer._sender.wakeup()  # noqa: SLF001 - as `send` does
        return future

    def _places_of(self, topic: str) -> list[TopicPartition]:
        partitions = sorted(self._producer.partitions_for(topic))
        self._places[topic] = [TopicPartition(topic, partition) for partition in partitions]
        return self._places[topic]


def _untaken(error: BaseException) -> BaseException:
    return ValueError(f"the client will not take it: {error}") if isinstance(error, AssertionError) else error


def _stop(producer: KafkaProducer, _error: BaseException) -> None:
    producer._sender.force_close()  # noqa: SLF001 - close() flushes first, which waits for what cannot come


def _outcome(future: Handed, stopping: Stopping) -> BaseException | None:
    """Return None for an acknowledged record, else what came instead."""
    if isinstance(future, BaseException):
        return future
    if not future.is_done:
        return NotSentError("asked to stop before it was acknowledged" if stopping() else "not acknowledged in time")
    error: BaseException | None = future.exception
    return error


def _force_close(producer: KafkaProducer) -> None:
    """Close without waiting for what is in flight: it may land, and then is a duplicate of what is sent again."""
    producer._sender.force_close()  # noqa: SLF001 - see _stop
    producer._sender.join(_JOIN_SECONDS)  # noqa: SLF001
    with suppress(KafkaError):  # of records nobody waits for any more
        producer.close(timeout=0)


def _limits(admin: KafkaAdminClient, topics: Sequence[str]) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Return the settings of topics, or nothing where the broker does not tell: then it alone judges records."""
    # All settings, not the two by name: Tansu, the broker of the demo, hangs up on names.
    resources = [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in topics]
    try:
        limits: Mapping[str, Any] = admin.describe_configs(resources, config_filter="all")["topic"]
    except KafkaError as error:
        log.info("the brokers do not tell the limits of %s: %s", ", ".join(topics), describe(error))
        return {}
    return limits


def _facts_of(topic: Mapping[str, Any], limits: Mapping[str, Mapping[str, Any]]) -> Facts:
    code = topic["error_code"]
    if code == UnknownTopicOrPartitionError.errno:
        return TopicMissingError(topic["name"])
    if code:
        error: BaseException = for_code(code)(f"topic {topic['name']!r}")
        return error
    partitions = [
        Partition(
            number=partition["partition_index"],
            led=partition["leader_id"] >= 0,
            replicas=len(partition["replica_nodes"]),
            in_sync=len(partition["isr_nodes"]),
        )
        for partition in topic["partitions"]
    ]
    return facts_of(topic["name"], partitions, {name: limit["value"] for name, limit in limits.items()})
