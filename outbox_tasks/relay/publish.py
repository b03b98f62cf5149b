"""Publishes a batch and tells what became of each event: check, send, and after a failure find the guilty."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outbox_tasks.deadline import Deadline
from outbox_tasks.errors import BrokerUnavailableError, InvalidRecordError, MisconfiguredError, NoRouteError
from outbox_tasks.event import Event
from outbox_tasks.ports import Ports
from outbox_tasks.publishing.checks import check
from outbox_tasks.publishing.publisher import NotSentError, Record, Sent, TopicFacts
from outbox_tasks.publishing.routes import record_of, topic_of
from outbox_tasks.publishing.verdicts import Verdict, verdict_of

BLOCKING = (Verdict.REFUSED, Verdict.MISCONFIGURED)
"""Verdicts that block a key; the others leave everything where it is."""

Problem = BaseException


@dataclass(slots=True)
class Fate:
    """What became of the events of a batch. Of each key: some published, at most one failed, the rest followers.

    Events in none of these were not acknowledged, and nobody is to blame: they stay where they are, and so does
    all that comes after them in their key. `down` says why sending stopped altogether, if it did.
    """

    published: list[Event] = field(default_factory=list)
    failed: dict[str, tuple[Event, Problem]] = field(default_factory=dict)
    followers: list[Event] = field(default_factory=list)
    stuck: set[str] = field(default_factory=set)
    down: Problem | None = None

    def passes(self, event: Event) -> bool:
        """Say whether an event's turn has come: all before it in its key are published. Notes followers."""
        if event.blocked or event.ordering_key in self.failed:
            self.followers.append(event)
            return False
        return event.ordering_key not in self.stuck

    def take(self, event: Event, problem: Problem | None) -> None:
        """Note what became of an event whose turn it was."""
        if problem is None:
            self.published.append(event)
        elif verdict_of(problem) in BLOCKING:
            self.failed[event.ordering_key] = (event, problem)
        else:
            self.stuck.add(event.ordering_key)
            self.down = self._more_telling(problem)

    def _more_telling(self, problem: Problem) -> Problem:
        """Return the first reason that is more than a record left alone because of another."""
        return problem if self.down is None or isinstance(self.down, NotSentError) else self.down


@dataclass(slots=True)
class Item:
    """An event with its record, or with what is wrong with it; neither where its key is blocked already."""

    event: Event
    record: Record | None = None
    problem: Problem | None = None


def publish(events: Sequence[Event], ports: Ports, *, deadline: Deadline) -> Fate:
    """Send events to Kafka in the order given, gapless per key whatever goes wrong.

    Where a batch fails because of a record, what failed is sent again one by one, to tell the guilty from its mates.
    """
    try:
        items = _plan(events, ports)
        failed = _send(_sendable(items), ports, deadline)
    except (BrokerUnavailableError, MisconfiguredError) as error:
        ports.publisher.discard()
        return Fate(down=error)
    if not failed:
        return _judge(items)
    ports.publisher.discard()
    if any(verdict_of(problem) in BLOCKING for problem in failed):
        return _judge(items, again=SendAgain(ports, deadline))
    return _judge(items)


def _plan(events: Sequence[Event], ports: Ports) -> list[Item]:
    """Make the records, and find out before anything is sent which of them will not do."""
    topics = [None if event.blocked else _topic(event, ports) for event in events]
    facts = ports.publisher.topics.facts({topic for topic in topics if isinstance(topic, str)})
    return [_item(event, topic, facts, ports) for event, topic in zip(events, topics, strict=True)]


def _topic(event: Event, ports: Ports) -> str | NoRouteError:
    try:
        return topic_of(event, ports.settings.routes)
    except NoRouteError as error:
        return error


def _item(
    event: Event, topic: str | NoRouteError | None, facts: Mapping[str, TopicFacts | Problem], ports: Ports
) -> Item:
    if not isinstance(topic, str):
        return Item(event, problem=topic)
    known = facts[topic]
    if not isinstance(known, TopicFacts):
        return Item(event, problem=known)
    try:
        return Item(event, check(record_of(event, topic), known, ports.publisher.limits))
    except InvalidRecordError as error:
        return Item(event, problem=error)


def _sendable(items: Sequence[Item]) -> list[Item]:
    """Return the items that have a record and nothing wrong before them in their key."""
    wrong: set[str] = set()
    sendable: list[Item] = []
    for item in items:
        if item.record is None:
            wrong.add(item.event.ordering_key)
        elif item.event.ordering_key not in wrong:
            sendable.append(item)
    return sendable


def _send(items: Sequence[Item], ports: Ports, deadline: Deadline) -> list[Problem]:
    """Send all at once, noting at each item what went wrong; returns all that did."""
    records = [item.record for item in items if item.record is not None]
    if not records:
        return []
    for item, problem in zip(items, _sent(records, ports, deadline), strict=True):
        item.problem = problem
    return [item.problem for item in items if item.problem is not None]


def _sent(records: Sequence[Record], ports: Ports, deadline: Deadline) -> Sent:
    return ports.publisher.send(records, deadline=deadline, stopping=ports.stopping)


class SendAgain:
    """Sends a record on its own, to learn whether it is to blame; asks a topic that will not do only once."""

    def __init__(self, ports: Ports, deadline: Deadline) -> None:
        self._ports = ports
        self._deadline = deadline
        self._topics: dict[str, Problem] = {}
        self._down: Problem | None = None

    def __call__(self, record: Record) -> Problem | None:
        """Return what is wrong with the record itself, or what kept it from being sent."""
        known = self._down or self._topics.get(record.topic)
        if known is not None:
            return known
        problem = self._send(record)
        if problem is not None:
            self._learn(record.topic, problem)
        return problem

    def _send(self, record: Record) -> Problem | None:
        try:
            (problem,) = _sent([record], self._ports, self._deadline)
        except (BrokerUnavailableError, MisconfiguredError) as error:
            return error
        return problem

    def _learn(self, topic: str, problem: Problem) -> None:
        self._ports.publisher.discard()
        verdict = verdict_of(problem)
        if verdict is Verdict.MISCONFIGURED:
            self._topics[topic] = problem
            self._ports.publisher.topics.condemn(topic, problem)
        elif verdict is not Verdict.REFUSED:
            self._down = problem


def _judge(items: Sequence[Item], *, again: SendAgain | None = None) -> Fate:
    """Decide, event by event in order, what became of each; `again` tells of a failed record whether it is guilty."""
    fate = Fate()
    for item in items:
        if not fate.passes(item.event):
            continue
        if item.record is not None and item.problem is not None and again is not None:
            item.problem = again(item.record)
        fate.take(item.event, item.problem)
    return fate
