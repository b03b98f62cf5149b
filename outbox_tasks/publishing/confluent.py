"""The publisher on confluent-kafka: idempotent, gapless, acknowledged by all, thrown away after any failure."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox_tasks.deadline import Clock, Deadline
from outbox_tasks.errors import BrokerUnavailableError, MisconfiguredError
from outbox_tasks.publishing.confluent_batch import Batch, Wait
from outbox_tasks.publishing.confluent_config import Heard, client_config, producer_config
from outbox_tasks.publishing.confluent_errors import error_of
from outbox_tasks.publishing.confluent_started import Started
from outbox_tasks.publishing.confluent_topics import ask
from outbox_tasks.publishing.publisher import Limits, NotSentError, Record, Sent, Stopping, TopicFacts
from outbox_tasks.publishing.topic_facts import Facts, TopicBook
from outbox_tasks.publishing.verdicts import Verdict, describe, verdict_of
from outbox_tasks.settings import Settings

BATCH_OVERHEAD = 512
"""Bytes by which a request's batch stays below what its topic takes: more than the headers of a batch have."""


class ConfluentPublisher:
    """A `Publisher` on `confluent_kafka.Producer`. Made in the child that uses it; not shared between threads."""

    def __init__(self, settings: Settings, *, clock: Clock) -> None:
        self._settings = settings
        self._heard = Heard()
        self._config = producer_config(settings, self._heard)
        self._producer: Producer | None = None
        self._batch_bytes: int = self._config["batch.size"]
        self._batch = Batch()
        self.topics = TopicBook(self._ask, settings=settings, clock=clock)

    @property
    def limits(self) -> Limits:
        compression = self._config.get("compression.type", "none")
        return Limits(
            max_request_bytes=self._config["message.max.bytes"],
            compressed=compression != "none",
            named="message.max.bytes",
        )

    def open(self) -> None:
        if self._producer is not None and not _is_well(self._producer):
            self._drop()
        if self._producer is None:
            self._producer, self._batch.started = self._connect(), Started()

    def send(self, records: Sequence[Record], *, deadline: Deadline, stopping: Stopping) -> Sent:
        partitions = self._partitions({record.topic for record in records})
        self.open()
        if deadline.passed:
            return [NotSentError("it was too late to send")] * len(records)
        assert self._producer is not None
        within = deadline.within(self._settings.delivery_seconds)
        wait = Wait(self._producer, deadline=within, stopping=stopping)
        sent = self._batch.send(wait, records, partitions=partitions)
        if self._batch.spent:
            self._drop()
        return sent

    def _partitions(self, topics: Collection[str]) -> dict[str, int]:
        """Return how many partitions topics have; of one nothing is known of, one."""
        known = self.topics.facts(topics)
        return {topic: facts.partitions if isinstance(facts := known[topic], TopicFacts) else 1 for topic in topics}

    def discard(self) -> None:
        self._drop()
        self.topics.forget()
        self._batch_bytes = self._config["batch.size"]

    def close(self) -> None:
        self.discard()

    def _drop(self) -> None:
        """Let the producer go without waiting: what is in flight may land, and then is a duplicate."""
        producer, self._producer = self._producer, None
        if producer is not None:
            with suppress(KafkaException):  # of records nobody waits for any more
                producer.purge()
                producer.poll(0)

    def _ask(self, topics: Sequence[str]) -> dict[str, Facts]:
        config = client_config(self._settings, self._heard)
        found = ask(config, topics, seconds=self._settings.probe_seconds)
        limits = [known.max_message_bytes for known in found.values() if isinstance(known, TopicFacts)]
        self._fit(min((limit for limit in limits if limit is not None), default=self._batch_bytes))
        return found

    def _fit(self, limit: int) -> None:
        """Make batches no larger than any topic takes: librdkafka does not split those that are refused."""
        if limit < self._batch_bytes + BATCH_OVERHEAD:
            self._batch_bytes = max(1, limit - BATCH_OVERHEAD)
            self._drop()  # nothing is in flight between two calls of send

    def _connect(self) -> Producer:
        self._heard.errors.clear()
        try:
            producer = Producer(self._config | {"batch.size": self._batch_bytes})
        except KafkaException as error:
            raise self._misfit(describe(error_of(error.args[0]))) from None
        problem = _probe(producer, topics=self._settings.routes.values(), seconds=self._settings.probe_seconds)
        if problem is None:
            return producer
        problems = [*self._heard.errors.values(), problem]
        reasons = "; ".join(dict.fromkeys(describe(error_of(error)) for error in problems))
        if any(_is_rejection(error) for error in problems):
            raise self._misfit(reasons)
        raise BrokerUnavailableError(f"no broker answers at {self._settings.bootstrap_servers}: {reasons}")

    def _misfit(self, reasons: str) -> MisconfiguredError:
        return MisconfiguredError(f"Kafka will not have this client at {self._settings.bootstrap_servers}: {reasons}")


def _probe(producer: Producer, *, topics: Iterable[str], seconds: float) -> KafkaError | None:
    """Return why no broker answers, None if one does. The client tells more to its callbacks meanwhile.

    Asked about one of our topics, for a cluster may have thousands; whatever is said of that one is an answer.
    """
    try:
        producer.list_topics(next(iter(topics), None), timeout=seconds)
    except KafkaException as failure:
        problem: KafkaError = failure.args[0]
        with suppress(KafkaException):
            producer.poll(0)
        return problem
    return None


def _is_well(producer: Producer) -> bool:
    """Say whether a producer has not failed meanwhile, and have it tell what it has to tell; no round trip."""
    try:
        producer.poll(0)
    except KafkaException:
        return False
    return True


def _is_rejection(error: KafkaError) -> bool:
    """Say whether an error means that the brokers answer, but not to this client."""
    untrusted = error.code() == KafkaError._SSL and "certificate" in error.str()  # noqa: SLF001 - that is its name
    return untrusted or verdict_of(error_of(error)) is Verdict.UNAUTHORIZED
