"""What becomes of each event of a batch, for any events and any failures."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from hypothesis import example, given, settings
from hypothesis import strategies as st
from kafka import errors as kafka
from support.relaying import Steps, an_event, ports_without_database, relay_settings

from outbox_tasks.deadline import Deadline
from outbox_tasks.errors import BrokerUnavailableError, MisconfiguredError, TopicMissingError
from outbox_tasks.event import Event
from outbox_tasks.publishing.publisher import Limits, NotSentError, Record, Sent, Stopping, TopicFacts
from outbox_tasks.relay.publish import Fate, Problem, publish

ROUTES = {"to-a": "a", "to-b": "b", "to-missing": "missing", "to-forbidden": "forbidden", "to-gone": "gone"}
SETTINGS = relay_settings("dbname=nowhere", routes=ROUTES)

LIMIT = 200
LIMITS = Limits(max_request_bytes=10 * LIMIT, compressed=False)
FACTS: dict[str, TopicFacts | Problem] = {
    "a": TopicFacts(partitions=1, max_message_bytes=LIMIT, compacted=False),
    "b": TopicFacts(partitions=1, max_message_bytes=LIMIT, compacted=True),
    "missing": TopicMissingError("missing"),
    "forbidden": kafka.TopicAuthorizationFailedError("forbidden"),
    # It was there when it was asked for, and is not when a record comes.
    "gone": TopicFacts(partitions=1),
}

OVERSIZE, POISON = b"x" * LIMIT, b"poison"


class Draft(NamedTuple):
    """An event to be: its key, where it goes, what it holds."""

    key: int
    event_type: str = "to-a"
    value: bytes | None = b"{}"
    keyless: bool = False

    @property
    def is_guilty(self) -> bool:
        """Whether Kafka, or a check, will not have it, whatever else happens."""
        return (
            self.event_type in {"to-missing", "to-forbidden", "to-gone", "nowhere"}
            or self.value in {OVERSIZE, POISON}
            or (self.keyless and (self.event_type == "to-b" or self.value is None))
        )

    @property
    def only_the_broker_knows(self) -> bool:
        """Whether it passes all checks and is bad all the same."""
        poisons = self.value == POISON and self.event_type in {"to-a", "to-b"} and not self.keyless
        return poisons or (self.event_type == "to-gone" and not self.keyless)


@dataclass
class Accident:
    """What goes wrong with one call of `send` though no record is to blame.

    From record `at` on: raised, nothing more sent (`lost`), or sent but not acknowledged (`unheard`).
    """

    kind: str
    at: int


@dataclass
class MemoryPublisher:
    """A broker with a client that keeps the Protocol's promises and no others.

    A record that is refused takes `mates` of the records after it down with it, as part of one batch, and spends the
    client: until it is discarded nothing is sent any more.
    """

    clock: Steps
    accidents: list[Accident | None] = field(default_factory=list)
    facts_accident: Exception | None = None
    mates: int = 0
    landed: list[Record] = field(default_factory=list)
    condemned: list[str] = field(default_factory=list)
    spent: bool = False
    disturbed: bool = False
    calls: int = 0
    limits: Limits = LIMITS

    @property
    def topics(self) -> Self:
        """Be what knows of topics too."""
        return self

    def open(self) -> None:
        """Be ready."""

    def facts(self, topics: Collection[str]) -> Mapping[str, TopicFacts | Problem]:
        """Tell what is known."""
        if self.facts_accident is not None:
            self.disturbed = True
            raise self.facts_accident
        return {topic: FACTS[topic] for topic in topics}

    def pardon(self, topics: Iterable[str]) -> None:
        """Do nothing: nothing was remembered."""

    def condemn(self, topic: str, problem: Problem) -> None:
        """Note what was found out about a topic."""
        assert isinstance(problem, kafka.UnknownTopicOrPartitionError)
        self.condemned.append(topic)

    def send(self, records: Sequence[Record], *, deadline: Deadline, stopping: Stopping) -> Sent:
        """Send in order, gapless per key."""
        self.calls += 1
        accident = self.accidents.pop(0) if self.accidents else None
        if accident is not None and accident.kind == "away":
            self.disturbed = True
            raise BrokerUnavailableError("no broker answers")
        if accident is not None and accident.kind == "rejected":
            self.disturbed = True
            raise MisconfiguredError("wrong password")
        call = _Call(self, accident, deadline, stopping, spent=self.spent)
        return [call.send(number, record) for number, record in enumerate(records)]

    def discard(self) -> None:
        """Start afresh."""
        self.spent = False

    def close(self) -> None:
        """Give back."""


@dataclass
class _Call:
    """One call of `send`."""

    publisher: MemoryPublisher
    accident: Accident | None
    deadline: Deadline
    stopping: Stopping
    spent: bool
    stopped: set[tuple[str, bytes | None]] = field(default_factory=set)
    mates: int = 0

    def send(self, number: int, record: Record) -> Problem | None:
        """Send one record, or say what came instead."""
        place = (record.topic, record.key)
        problem = self._problem(number, record, place)
        if problem is not None:
            self.stopped.add(place)
            self.publisher.spent = True
        return problem

    def _problem(self, number: int, record: Record, place: tuple[str, bytes | None]) -> Problem | None:
        if self.spent:
            return _of_kafka("KafkaError", "this producer is spent")
        if place in self.stopped:
            return NotSentError("a record before it failed")
        if self.deadline.passed or self.stopping():
            self.publisher.disturbed = True
            return NotSentError("no time")
        if self.mates:
            self.mates -= 1
            return _of_kafka("KafkaError", "part of a batch with a bad record")
        return self._befallen(number, record) or self._judged(record)

    def _befallen(self, number: int, record: Record) -> Problem | None:
        if self.accident is None or number < self.accident.at:
            return None
        self.publisher.disturbed = True
        if self.accident.kind == "unheard" and record.topic != "gone" and record.value != POISON:
            self.publisher.landed.append(record)
        return _of_kafka("KafkaTimeoutError", "no answer")

    def _judged(self, record: Record) -> Problem | None:
        if record.value == POISON:
            self.mates = self.publisher.mates
            return _of_kafka("InvalidRecordError", "the broker refuses it")
        if record.topic == "gone":
            return _of_kafka("UnknownTopicOrPartitionError", "gone")
        self.publisher.landed.append(record)
        return None


drafts = st.builds(
    Draft,
    key=st.integers(0, 3),
    # Mostly good ones, so that there is something for a bad one to spoil.
    event_type=st.sampled_from(["to-a"] * 6 + ["to-b"] * 3 + ["to-missing", "to-forbidden", "to-gone", "nowhere"]),
    value=st.sampled_from([b"{}"] * 8 + [None, OVERSIZE, POISON]),
    keyless=st.sampled_from([False] * 8 + [True]),
)
accidents = st.none() | st.builds(
    Accident, kind=st.sampled_from(["away", "rejected", "lost", "unheard"]), at=st.integers(0, 5)
)
facts_accidents = st.sampled_from([None] * 9 + [BrokerUnavailableError("away"), MisconfiguredError("no")])


@dataclass
class Outcome:
    """A batch, what became of it, and what the broker got."""

    drafts: Sequence[Draft]
    events: Sequence[Event]
    fate: Fate
    publisher: MemoryPublisher

    def by_key(self) -> Iterable[list[Event]]:
        """Yield the events of each key in order."""
        keys: defaultdict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            keys[event.ordering_key].append(event)
        return keys.values()

    def failed(self) -> list[Event]:
        """Return the events found guilty."""
        return [event for event, _ in self.fate.failed.values()]

    def placed(self) -> list[Event]:
        """Return the events that are not left where they were."""
        return [*self.fate.published, *self.failed(), *self.fate.followers]

    def is_guilty(self, event: Event) -> bool:
        """Say whether an event was made to fail."""
        return self.drafts[event.id - 1].is_guilty


@dataclass
class Given:
    """A batch and everything that goes wrong."""

    drafts: list[Draft]
    blocked: frozenset[int] = frozenset()
    accidents: list[Accident | None] = field(default_factory=list)
    facts_accident: Exception | None = None
    mates: int = 0
    stops_after: int | None = None
    late_after: int | None = None

    def happen(self) -> Outcome:
        """Publish the batch."""
        clock = Steps([0.0])
        publisher = MemoryPublisher(clock, list(self.accidents), self.facts_accident, self.mates)
        looks = [0]

        def stopping() -> bool:
            looks[0] += 1
            if looks[0] == self.late_after:
                clock.move(100)
            return self.stops_after is not None and looks[0] > self.stops_after

        events = [_event(number, draft, self.blocked) for number, draft in enumerate(self.drafts, start=1)]
        ports = ports_without_database(SETTINGS, publisher, stopping=stopping)
        fate = publish(events, ports, deadline=Deadline.after(10, clock=clock))
        return Outcome(self.drafts, events, fate, publisher)


def _event(number: int, draft: Draft, blocked: Collection[int]) -> Event:
    key = "" if draft.keyless else str(draft.key)
    return an_event(
        id=number,
        ordering_key=f"order/{key}",
        event_type=draft.event_type,
        key=key.encode() or None,
        value=draft.value,
        blocked=draft.key in blocked and not draft.keyless,
    )


batches = st.builds(
    Given,
    drafts=st.lists(drafts, max_size=14),
    blocked=st.frozensets(st.integers(0, 3), max_size=1),
    accidents=st.lists(accidents, max_size=4),
    facts_accident=facts_accidents,
    mates=st.integers(0, 4),
    stops_after=st.none() | st.integers(0, 12),
    late_after=st.none() | st.integers(1, 12),
)
calm_batches = st.builds(
    Given,
    drafts=st.lists(drafts, max_size=14),
    blocked=st.frozensets(st.integers(0, 3), max_size=1),
    mates=st.integers(0, 4),
)
thorough = settings(max_examples=200, deadline=None)

GOOD, BAD = Draft(0), Draft(0, value=POISON)


@thorough
@given(batch=batches)
@example(batch=Given([GOOD, BAD, GOOD], mates=1))
def test_of_each_key_a_prefix_is_published_and_at_most_the_next_one_fails(batch: Given) -> None:
    """Of each key the first so many are published, at most the next one fails, and what is behind that one follows."""
    outcome = batch.happen()
    published, failed, followers = outcome.fate.published, outcome.failed(), outcome.fate.followers
    if not outcome.placed() and outcome.fate.down is not None:
        return  # no broker was there to begin with: not even followers are sorted out
    for events in outcome.by_key():
        sent = [event for event in events if event in published]
        guilty = [event for event in events if event in failed]
        assert sent == events[: len(sent)]
        assert guilty in ([], events[len(sent) : len(sent) + 1])
        behind = events if events[0].blocked else events[len(sent) + 1 :] if guilty else []
        assert [event for event in events if event in followers] == behind


@thorough
@given(batch=batches)
def test_no_event_is_in_two_places(batch: Given) -> None:
    """No event is published and failed, or either and a follower, or anything twice."""
    outcome = batch.happen()
    placed = [event.id for event in outcome.placed()]
    assert len(placed) == len(set(placed))
    assert set(placed) <= {event.id for event in outcome.events}


@thorough
@given(batch=batches)
def test_nobody_innocent_fails(batch: Given) -> None:
    """Whatever happens to its batch-mates or to the broker, only an event that cannot be sent ever fails."""
    outcome = batch.happen()
    assert [event for event in outcome.failed() if not outcome.is_guilty(event)] == []


@thorough
@given(batch=batches)
def test_what_is_published_has_reached_the_broker(batch: Given) -> None:
    """An event counts as published only if the broker has it, and nothing it has was found guilty before."""
    outcome = batch.happen()
    landed = {_event_id(record) for record in outcome.publisher.landed}
    assert {str(event.event_id) for event in outcome.fate.published} <= landed


@thorough
@given(batch=batches)
@example(batch=Given([Draft(0, value=OVERSIZE), GOOD]))
def test_first_occurrences_reach_the_broker_in_order_and_without_a_gap(batch: Given) -> None:
    """Of each key and topic the broker gets so many of the first events, in order; only repetitions come later."""
    outcome = batch.happen()
    ids = {str(event.event_id): event.id for event in outcome.events}
    due: defaultdict[tuple[str | None, str], list[int]] = defaultdict(list)
    for event in outcome.events:
        due[ROUTES.get(event.event_type), event.ordering_key].append(event.id)
    came: defaultdict[tuple[str | None, str], dict[int, None]] = defaultdict(dict)
    for record in outcome.publisher.landed:
        event = outcome.events[ids[_event_id(record)] - 1]
        came[record.topic, event.ordering_key].setdefault(event.id)
    for place, first in came.items():
        assert list(first) == due[place][: len(first)]


@thorough
@given(batch=batches)
def test_what_has_no_place_has_a_reason(batch: Given) -> None:
    """An event is left where it is only if the run says why sending stopped, and only if something did stop it."""
    outcome = batch.happen()
    assert len(outcome.placed()) == len(outcome.events) or outcome.fate.down is not None
    assert outcome.fate.down is None or outcome.publisher.disturbed


@thorough
@given(batch=calm_batches)
@example(batch=Given([BAD, Draft(1), Draft(2)], mates=2))
def test_with_a_broker_that_works_everything_innocent_is_published(batch: Given) -> None:
    """Where nothing but bad events goes wrong, every event with no bad one before it in its key is published."""
    outcome = batch.happen()
    expected: list[Event] = []
    for events in outcome.by_key():
        if not events[0].blocked:
            bad = next((place for place, event in enumerate(events) if outcome.is_guilty(event)), len(events))
            expected += events[:bad]
    assert [event.id for event in outcome.fate.published] == sorted(event.id for event in expected)
    assert outcome.fate.down is None


@thorough
@given(batch=batches, kind=st.sampled_from(["away", "rejected"]))
def test_a_broker_that_is_away_fails_nobody(batch: Given, kind: str) -> None:
    """While no broker answers, only events fail that a check would refuse in any case."""
    batch.accidents = [Accident(kind, 0)] * (len(batch.drafts) + 1)
    outcome = batch.happen()
    assert outcome.fate.published == []
    assert [event for event in outcome.failed() if outcome.drafts[event.id - 1].only_the_broker_knows] == []


def test_a_broker_that_goes_away_is_asked_no_more() -> None:
    """Once no broker answers while the guilty is looked for, the rest of the batch is not tried one by one."""
    drafts = [BAD, *(Draft(key) for key in range(1, 10))]
    outcome = Given(drafts, mates=9, accidents=[None, Accident("away", 0)]).happen()
    assert outcome.publisher.calls == 2
    assert outcome.placed() == []
    assert isinstance(outcome.fate.down, BrokerUnavailableError)


def test_a_topic_that_is_gone_is_asked_once() -> None:
    """A topic that a record finds missing is not tried again for each of its events, and is remembered as such."""
    outcome = Given([Draft(key, "to-gone") for key in range(4)]).happen()
    assert len(outcome.fate.failed) == 4
    assert outcome.publisher.condemned == ["gone"]


def _of_kafka(name: str, words: str) -> Problem:
    error: Problem = getattr(kafka, name)(words)
    return error


def _event_id(record: Record) -> str:
    return dict(record.headers)["event_id"].decode()
