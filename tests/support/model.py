"""A Kafka in memory behind the publisher's seam, for tests about the tables: it refuses, forbids, goes down and kills.

All else in such a test is real: the loops, every statement, PostgreSQL.
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, Self
from uuid import UUID

import psycopg
from kafka import errors

from outbox_tasks.deadline import Deadline
from outbox_tasks.errors import BrokerUnavailableError, TopicMissingError
from outbox_tasks.ports import Ports
from outbox_tasks.publishing.publisher import Limits, NotSentError, Record, Sent, Stopping, TopicFacts
from outbox_tasks.settings import Settings
from outbox_tasks.store.connection import Connection, connect

Moment = Literal["planning", "halfway", "sent"]
"""When a publisher lets something else happen: before anything is sent, after half of it was, after all of it was."""

_numbers = count()


class DeathError(BaseException):
    """Ends a run as SIGKILL would: nothing in the package catches it, and nothing is released."""


@dataclass(kw_only=True)
class Kafka:
    """What all publishers of a test share: what arrived, in order, and what is wrong at present.

    A process dies when it is about to send a `deadly` event, before any of its batch is sent.
    """

    arrived: list[UUID] = field(default_factory=list)
    deadly: set[UUID] = field(default_factory=set)
    refused: set[UUID] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    forbidden: set[str] = field(default_factory=set)
    is_down: bool = False

    def mend(self) -> None:
        """Put everything right; what is deadly remains so."""
        self.refused.clear()
        self.missing.clear()
        self.forbidden.clear()
        self.is_down = False


class ModelPublisher:
    """A `Publisher` to a `Kafka` in memory, as touchy as the real client: after a failure it is spent until discarded.

    `meanwhile` makes something happen, once, at a moment of the next batch; after that moment the publisher sends
    nothing more of its own accord if `late`, as a run does whose lease is about to end. `asked` has what each call of
    `send` was given, `planned` what topics each batch wanted to know of.
    """

    def __init__(self, kafka: Kafka) -> None:
        self._kafka = kafka
        self._meanwhile: dict[Moment, Callable[[], object]] = {}
        self._is_spent = False
        self.late = False
        self.asked: list[list[UUID]] = []
        self.planned: list[set[str]] = []

    @property
    def limits(self) -> Limits:
        """Return generous ones."""
        return Limits(max_request_bytes=1_000_000, compressed=False)

    @property
    def topics(self) -> Self:
        """Be what knows of topics too."""
        return self

    def meanwhile(self, moment: Moment, happens: Callable[[], object]) -> None:
        """Have something happen at this moment of the next batch."""
        self._meanwhile[moment] = happens

    def renew(self) -> None:
        """Be the publisher of another process, to which nothing happens."""
        self._meanwhile.clear()
        self._is_spent = False
        self.late = False

    def open(self) -> None:
        """Connect, if there is something to connect to."""
        if self._kafka.is_down:
            raise BrokerUnavailableError("the model's broker is down")

    def facts(self, topics: Collection[str]) -> Mapping[str, TopicFacts | BaseException]:
        """Tell which topics are there."""
        self._let("planning")
        self.planned.append(set(topics))
        self.open()
        return {topic: self._fact(topic) for topic in topics}

    def send(self, records: Sequence[Record], *, deadline: Deadline, stopping: Stopping) -> Sent:
        """Send records until one will not do."""
        assert not self._is_spent, "a publisher was used after a failure without being discarded"
        self.open()
        self.asked.append([event_id_of(record) for record in records])
        if self._kafka.deadly.intersection(self.asked[-1]):
            raise DeathError
        sent: Sent = []
        for place, record in enumerate(records):
            if place == len(records) // 2:
                self._let("halfway")
            sent.append(self._send(record, stop=deadline.passed or stopping()))
        self._let("sent")
        return sent

    def condemn(self, topic: str, problem: BaseException) -> None:
        """Forget it at once: this client asks the broker anew."""

    def pardon(self, topics: Iterable[str]) -> None:
        """Do nothing: nothing was remembered."""

    def discard(self) -> None:
        """Be as new."""
        self._is_spent = False

    def close(self) -> None:
        """Be as new."""
        self.discard()

    def _fact(self, topic: str) -> TopicFacts | BaseException:
        return TopicMissingError(topic) if topic in self._kafka.missing else TopicFacts(partitions=1)

    def _let(self, moment: Moment) -> None:
        happens = self._meanwhile.pop(moment, None)
        if happens is not None:
            happens()

    def _send(self, record: Record, *, stop: bool) -> BaseException | None:
        if self._is_spent or self.late or stop:
            return NotSentError("the model left it alone")
        problem = self._problem(record)
        if problem is None:
            self._kafka.arrived.append(event_id_of(record))
        self._is_spent = problem is not None
        return problem

    def _problem(self, record: Record) -> BaseException | None:
        problem: BaseException | None = None
        if self._kafka.is_down:
            problem = errors.KafkaTimeoutError("the model's broker is down")
        elif record.topic in self._kafka.forbidden:
            problem = errors.TopicAuthorizationFailedError(record.topic)
        elif event_id_of(record) in self._kafka.refused:
            problem = errors.MessageSizeTooLargeError("the model refuses this event")
        return problem


def event_id_of(record: Record) -> UUID:
    """Return the id a record carries."""
    return UUID(dict(record.headers)["event_id"].decode())


@dataclass(frozen=True, kw_only=True)
class Actor:
    """One process: a connection and a publisher of its own; each `ports` is another run."""

    connection: Connection
    publisher: ModelPublisher
    settings: Settings

    def ports(self, **changes: object) -> Ports:
        """Return the ports of the next run, with some settings changed; its chance is the same every time."""
        return Ports(
            connection=self.connection,
            publisher=self.publisher,
            settings=self.settings.model_copy(update=changes),
            owner=f"run-{next(_numbers)}",
            chance=random.Random(1),  # noqa: S311 - jitter
        )


@contextmanager
def actor(settings: Settings, kafka: Kafka) -> Iterator[Actor]:
    """Open a process of a test."""
    with connect(settings) as connection:
        yield Actor(connection=connection, publisher=ModelPublisher(kafka), settings=settings)


@contextmanager
def opened(database_url: str) -> Iterator[Connection]:
    """Open the connection a test looks and meddles through."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


def write_event(
    connection: Connection, key: str, *, topic: str | None = "good", payload: str = "{}", aggregate_type: str = "order"
) -> UUID:
    """Commit one event; returns its id."""
    row = connection.execute(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, topic, payload)"
        " VALUES (%s, %s, 'changed', %s, %s::jsonb) RETURNING event_id",
        (aggregate_type, key, topic, payload),
    ).fetchone()
    assert row is not None
    event_id = row[0]
    assert isinstance(event_id, UUID)
    return event_id


def keys_by_shard(connection: Connection, *, topic: str = "good", shards: int = 2, keys: int = 2) -> list[list[str]]:
    """Return `keys` keys of the topic for each of so many shards."""
    rows = connection.execute(
        "SELECT array_agg('key-' || n ORDER BY n) FROM generate_series(1, 1000) AS n"
        " GROUP BY hashtextextended(%s || '/key-' || n, 0) & 63 ORDER BY min(n) LIMIT %s",
        (topic, shards),
    ).fetchall()
    return [row[0][:keys] for row in rows]


def state_of(connection: Connection, event_id: UUID) -> str:
    """Return where an event is: its state, or what became of it as a dead letter."""
    row = connection.execute(
        "SELECT state FROM outbox WHERE event_id = %(id)s UNION ALL"
        " SELECT coalesce(resolution, 'dead') FROM outbox_dead_letter"
        "  WHERE event_id = %(id)s AND resolution IS DISTINCT FROM 'redriven'",
        {"id": event_id},
    ).fetchall()
    assert len(row) == 1, f"event {event_id} is in {len(row)} places"
    return str(row[0][0])


@dataclass(frozen=True, kw_only=True)
class ShardLease:
    """What the table says of a shard."""

    token: UUID | None
    takeovers: int
    suspect: UUID | None


def shard_of(connection: Connection, event_id: UUID) -> ShardLease:
    """Return the lease of an event's shard."""
    row = connection.execute(
        "SELECT s.lease_token, s.takeovers, s.suspect FROM outbox_shard AS s JOIN outbox AS o USING (shard)"
        " WHERE o.event_id = %s",
        (event_id,),
    ).fetchone()
    assert row is not None
    return ShardLease(token=row[0], takeovers=row[1], suspect=row[2])


@dataclass(frozen=True, kw_only=True)
class Blocked:
    """What the table says of a blocked key; `due_seconds` from now it is tried again."""

    kind: str
    event_id: UUID
    reason: str
    due_seconds: float | None
    takeovers: int


def blocked(connection: Connection) -> dict[str, Blocked]:
    """Return the blocked keys."""
    rows = connection.execute(
        "SELECT ordering_key, kind, event_id, reason,"
        " extract(epoch FROM retry_at - clock_timestamp())::float8, takeovers FROM outbox_blocked_key"
    ).fetchall()
    return {
        row[0]: Blocked(kind=row[1], event_id=row[2], reason=row[3], due_seconds=row[4], takeovers=row[5])
        for row in rows
    }


def let_leases_end(connection: Connection) -> None:
    """Let the time of every lease be over, as if its machine were lost."""
    connection.execute("UPDATE outbox_shard SET leased_until = clock_timestamp() WHERE lease_token IS NOT NULL")
    connection.execute("UPDATE outbox_blocked_key SET leased_until = clock_timestamp() WHERE lease_token IS NOT NULL")


def let_time_pass(connection: Connection, *, seconds: float = 1e9) -> None:
    """Move what blocked keys wait for so much nearer."""
    connection.execute(
        "UPDATE outbox_blocked_key SET retry_at = retry_at - %s * interval '1 second' WHERE retry_at IS NOT NULL",
        (seconds,),
    )
