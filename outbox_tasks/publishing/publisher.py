"""The seam to Kafka: what a publisher takes, gives back and promises."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from outbox_tasks.deadline import Deadline

Stopping = Callable[[], bool]
"""Whether the process has been asked to stop."""


class Record(NamedTuple):
    """What goes to Kafka. Bytes as they are; `key` None lets Kafka choose a partition, `value` None is a tombstone."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]

    @property
    def size(self) -> int:
        """Bytes of key, value and headers together."""
        size = len(self.key or b"") + len(self.value or b"")
        for name, value in self.headers:
            size += len(name.encode()) + len(value)
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicFacts:
    """What is known of a topic; None where the broker does not tell."""

    partitions: int
    max_message_bytes: int | None = None
    compacted: bool | None = None
    replicas: int | None = None
    min_insync: int | None = None
    unclean_election: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a producer sends at all: the largest record in bytes, and whether it compresses.

    `named` is what the client calls the first.
    """

    max_request_bytes: int
    compressed: bool
    named: str = "max_request_size"


class NotSentError(Exception):
    """A record was left alone: one before it, of the same key, failed, or time ran out."""


Sent = list[BaseException | None]
"""One entry a record, in the order given: None for acknowledged by all in-sync replicas, else why it is not."""


class Topics(Protocol):
    """What a publisher knows of topics; it forgets what the brokers told when the publisher is discarded."""

    def facts(self, topics: Collection[str]) -> Mapping[str, TopicFacts | BaseException]:
        """Tell what is known of each topic, or what is wrong with it.

        Raises:
            BrokerUnavailableError: no broker answered.
        """

    def condemn(self, topic: str, problem: BaseException) -> None:
        """Have `facts` tell this problem of a topic for a while, so that not every batch finds it out anew."""

    def pardon(self, topics: Iterable[str]) -> None:
        """Forget what is known of topics: they are asked about again."""


class Publisher(Protocol):
    """Sends records in order, gapless per key: once one fails, no later one of its partition is sent.

    After any failure a publisher may be of no more use: `discard` it, the next call starts afresh.
    """

    @property
    def limits(self) -> Limits:
        """What this publisher sends at all."""

    @property
    def topics(self) -> Topics:
        """What is known of topics."""

    def open(self) -> None:
        """Be ready to send.

        Raises:
            BrokerUnavailableError: no broker answered within the probe time.
            MisconfiguredError: it answered, but will not have us.
        """

    def send(self, records: Sequence[Record], *, deadline: Deadline, stopping: Stopping) -> Sent:
        """Send records and wait for their acknowledgement, until the deadline or until asked to stop."""

    def discard(self) -> None:
        """Throw the connection to Kafka away, without waiting for anything in flight; `open` makes a new one."""

    def close(self) -> None:
        """Give everything back."""
