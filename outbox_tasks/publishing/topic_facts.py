"""What is known of topics, for a while: the memory that publishers on any client share, and how facts are read."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from outbox_tasks.deadline import Clock, Deadline
from outbox_tasks.errors import BrokerUnavailableError, TopicAilingError
from outbox_tasks.publishing.publisher import TopicFacts
from outbox_tasks.settings import Settings

Facts = TopicFacts | BaseException
"""What is known of a topic, or what is wrong with it."""

Ask = Callable[[Sequence[str]], Mapping[str, Facts]]
"""Asks the brokers about topics."""

Told = Mapping[str, str | None]
"""Settings of a topic as the brokers tell them; empty where they do not."""

T = TypeVar("T")


class Partition(NamedTuple):
    """Who has a partition: whether it has a leader, and how many replicas there are and are in sync."""

    number: int
    led: bool
    replicas: int
    in_sync: int


class TopicBook:
    """Remembers what the brokers told of topics, and what was found out while sending."""

    def __init__(self, ask: Ask, *, settings: Settings, clock: Clock) -> None:
        self._ask = ask
        self._settings = settings
        self._clock = clock
        self._facts: dict[str, TopicFacts] = {}
        self._facts_end = Deadline.after(0, clock=clock)
        self._condemned: dict[str, tuple[BaseException, Deadline]] = {}
        self._ailing: dict[str, Deadline] = {}

    def facts(self, topics: Collection[str]) -> Mapping[str, Facts]:
        """Tell what is known of each topic; asks the brokers about those of which nothing is.

        Raises:
            BrokerUnavailableError: no broker answered.
        """
        if self._facts_end.passed:
            self._facts.clear()
            self._facts_end = Deadline.after(self._settings.topic_facts_seconds, clock=self._clock)
        unknown = sorted(set(topics) - self._facts.keys())
        asked = self._ask(unknown) if unknown else {}
        found = {topic: self._with_patience(topic, facts) for topic, facts in asked.items()}
        self._facts |= {topic: facts for topic, facts in found.items() if isinstance(facts, TopicFacts)}
        return self._facts | found | self._still_condemned()

    def condemn(self, topic: str, problem: BaseException) -> None:
        """Tell this problem of a topic for a while."""
        self._condemned[topic] = (problem, Deadline.after(self._settings.misconfigured_seconds, clock=self._clock))

    def pardon(self, topics: Iterable[str]) -> None:
        """Forget what is known of topics, good or bad."""
        for topic in topics:
            self._condemned.pop(topic, None)
            self._facts.pop(topic, None)

    def forget(self) -> None:
        """Forget what the brokers told; what was found out while sending stands."""
        self._facts.clear()

    def _with_patience(self, topic: str, facts: Facts) -> Facts:
        """Take a topic that takes nothing for an outage first: brokers that restart look like that for a moment."""
        if not isinstance(facts, TopicAilingError):
            self._ailing.pop(topic, None)
            return facts
        end = Deadline.after(self._settings.delivery_seconds, clock=self._clock)
        return facts if self._ailing.setdefault(topic, end).passed else BrokerUnavailableError(str(facts))

    def _still_condemned(self) -> dict[str, Facts]:
        self._condemned = {topic: entry for topic, entry in self._condemned.items() if not entry[1].passed}
        return {topic: problem for topic, (problem, _) in self._condemned.items()}


def facts_of(topic: str, partitions: Sequence[Partition], told: Told) -> Facts:
    """Return the facts of a topic that is there, or why it takes nothing now."""
    min_insync = _if_told(told, "min.insync.replicas", int)
    problem = _ailment(partitions, min_insync)
    if problem is not None:
        return TopicAilingError(topic, problem)
    return TopicFacts(
        partitions=len(partitions),
        max_message_bytes=_if_told(told, "max.message.bytes", int),
        compacted=_if_told(told, "cleanup.policy", lambda policy: "compact" in policy),
        replicas=min((partition.replicas for partition in partitions), default=None),
        min_insync=min_insync,
        unclean_election=_if_told(told, "unclean.leader.election.enable", lambda text: text == "true"),
    )


def _ailment(partitions: Sequence[Partition], min_insync: int | None) -> str | None:
    """Return why acknowledged writes to some partition cannot succeed now, None if they can."""
    for partition in partitions:
        number, in_sync = partition.number, partition.in_sync
        if not partition.led:
            return f"has no leader for partition {number}"
        if min_insync is not None and in_sync < min_insync:
            return f"has {in_sync} in-sync replicas of partition {number}, min.insync.replicas is {min_insync}"
    return None


def _if_told(told: Told, name: str, read: Callable[[str], T]) -> T | None:
    text = told.get(name)
    return None if text is None else read(text)
