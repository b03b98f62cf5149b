"""Hands a batch to librdkafka and waits for its acknowledgement, without work for each record that arrives."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from outbox_tasks.deadline import Deadline
from outbox_tasks.publishing.confluent_errors import error_of
from outbox_tasks.publishing.confluent_started import Started
from outbox_tasks.publishing.publisher import NotSentError, Record, Sent, Stopping
from outbox_tasks.publishing.verdicts import Verdict, verdict_of

_LOOK_UP_SECONDS = 0.05
"""How often a wait looks up to see whether it shall stop."""

_PURGE_SECONDS = 1.0
"""How long purged records may take to be told; some 2 ms for 3,000 (docs/decisions.md)."""

_GRACE_SECONDS = 0.2
"""How long, after a record failed, the acknowledgements of those that are on their way are waited for."""

_NOT_TAKEN = (KafkaException, TypeError, ValueError)
"""What the client raises instead of taking a record."""

Failures = dict[int, KafkaError]
"""What went wrong, by the record's place in its batch."""

_LEFT = NotSentError("a record before it failed")
"""What becomes of a record that was never given to the client."""


class Report:
    """Notes the failure of one record. Made once, used for the same place in every batch."""

    __slots__ = ("_failures", "_place")

    def __init__(self, place: int, failures: Failures) -> None:
        self._place = place
        self._failures = failures

    def __call__(self, error: KafkaError | None, _message: Message) -> None:
        """Note a failure; called by the client, for failures alone."""
        if error is not None:
            self._failures[self._place] = error


class Batch:
    """Sends one batch after the other; `spent` says that the producer of the last one is of no more use.

    `started` is what the producer has begun: set anew with it.

    With `delivery.report.only.error` the client calls back for failures alone. A batch is acknowledged when the client
    has nothing left of it and no record failed: what arrives costs nothing more.
    """

    def __init__(self) -> None:
        self.spent = False
        self._failures: Failures = {}
        self._reports: list[Report] = []
        self.started = Started()

    def send(self, wait: "Wait", records: Sequence[Record], *, partitions: Mapping[str, int]) -> Sent:
        """Send records; returns one entry for each, None for acknowledged. `partitions` is how many each topic has."""
        wait.failures = self._failures
        self._failures.clear()
        self._reports += [Report(place, self._failures) for place in range(len(self._reports), len(records))]
        sent: Sent = [_LEFT] * len(records)
        first = self.started.first_places(records, partitions)
        rest = sorted(set(range(len(records))).difference(first)) if first else range(len(records))
        why = (first and self._send_some(records, first, sent, wait)) or self._send_some(records, rest, sent, wait)
        self.spent = bool(why)
        if not why:
            return sent
        told = wait.purge()
        judge = partial(self._outcome, why=why, told=told)
        return [
            problem or judge(place, record.topic)
            for place, (problem, record) in enumerate(zip(sent, records, strict=True))
        ]

    def _send_some(self, records: Sequence[Record], places: Iterable[int], sent: Sent, wait: "Wait") -> str | None:
        """Send the records in some places; returns None once all that were taken are acknowledged, else why not."""
        self._hand_over(records, places, sent, wait)
        return wait.until_all_arrived()

    def _hand_over(self, records: Sequence[Record], places: Iterable[int], sent: Sent, wait: "Wait") -> None:
        """Give records to the client; once one of a key is not taken, no later one of that key is given."""
        produce: Callable[..., None] = wait.producer.produce  # typed too narrowly for headers of bytes
        reports, stopped = self._reports, wait.stopped
        for place in places:
            topic, key, value, headers = records[place]
            if stopped and (topic, key) in stopped:
                continue
            try:
                produce(topic, value=value, key=key, headers=headers, on_delivery=reports[place])
            except BufferError:
                sent[place] = wait.for_room(records[place], reports[place])
            except _NOT_TAKEN as error:
                sent[place] = _problem_of(error, topic)
            else:
                sent[place] = None
                continue
            problem = sent[place]
            if problem is not None and verdict_of(problem) is not Verdict.REFUSED:
                wait.broken = True
                return
            if problem is not None:
                stopped.add((topic, key))

    def _outcome(self, place: int, topic: str, *, why: str, told: bool) -> BaseException | None:
        """Return what became of a record of a batch that was purged. Where not all was told, nothing has arrived."""
        failure = self._failures.get(place)
        if failure is None:
            return None if told else NotSentError(why)
        problem = error_of(failure, topic=topic)
        return NotSentError(why) if isinstance(problem, NotSentError) else problem


class Wait:
    """Serves a producer until a batch is done, something fails, time is out, or the process is to stop.

    `stopped` are the topics and keys of which a record was not taken.
    """

    def __init__(self, producer: Producer, *, deadline: Deadline, stopping: Stopping) -> None:
        self.producer = producer
        self.broken = False
        self.failures: Failures = {}
        self.stopped: set[tuple[str, bytes | None]] = set()
        self._deadline = deadline
        self._stopping = stopping

    def until_all_arrived(self) -> str | None:
        """Return None once all is acknowledged, else why it was not waited for."""
        while len(self.producer):
            why = self._why_not()
            if why is not None:
                return why
            self._serve(self.producer.flush, self._deadline)
        return self._why_failed()

    def for_room(self, record: Record, report: Report) -> BaseException | None:
        """Give a record to a client that is full, once it has room; returns why it does not take it."""
        topic, key, value, headers = record
        produce: Callable[..., None] = self.producer.produce
        while (why := self._why_not()) is None:
            self._serve(self.producer.flush, self._deadline)
            try:
                produce(topic, value=value, key=key, headers=headers, on_delivery=report)
            except BufferError:
                continue
            except _NOT_TAKEN as error:
                return _problem_of(error, topic)
            return None
        return NotSentError(why)

    def purge(self) -> bool:
        """Take back all that is not acknowledged; returns whether the client has told of every record.

        Where a record failed, what is on its way to other partitions may arrive first, so as not to be sent twice.
        """
        if self._why_failed() is not None:
            self.producer.purge(in_flight=False)
            self._empty(self._deadline.within(_GRACE_SECONDS))
        self.producer.purge()
        self._empty(Deadline.after(_PURGE_SECONDS))
        return not len(self.producer)

    def _empty(self, end: Deadline) -> None:
        while len(self.producer) and not end.passed:
            self._serve(self.producer.poll, end)

    def _serve(self, serve: Callable[[float], int], end: Deadline) -> None:
        """Let the client work and call back for a moment: `poll`, or `flush`, which sends at once what lingers."""
        try:
            serve(min(_LOOK_UP_SECONDS, end.left()))
        except KafkaException:  # it has ended itself, to leave no gap; what failed is told for each record
            self.broken = True

    def _why_not(self) -> str | None:
        """Return why it is of no use to wait any longer."""
        if self._deadline.passed:
            return "not acknowledged in time"
        if self._stopping():
            return "asked to stop before it was acknowledged"
        return self._why_failed()

    def _why_failed(self) -> str | None:
        return "a record of its batch failed" if self.failures or self.broken else None


def _problem_of(error: BaseException, topic: str) -> BaseException:
    return error_of(error.args[0], topic=topic) if isinstance(error, KafkaException) else error
