"""Topics that are missing or forbidden, events without a route, wrong credentials: on a real Apache Kafka."""

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from uuid import UUID, uuid4

import pytest
from kafka import KafkaAdminClient
from kafka.admin import ACL, ACLFilter, ACLOperation, ACLPermissionType, ResourcePattern, ResourceType
from support.clients import Client
from support.consuming import consume_all
from support.model import blocked, let_time_pass, opened, state_of, write_event

from outbox_tasks.deadline import Deadline
from outbox_tasks.ports import Ports
from outbox_tasks.publishing.factory import new_publisher
from outbox_tasks.publishing.publisher import Limits, Publisher, Record, Sent, Stopping, TopicFacts
from outbox_tasks.relay.dispatch import dispatch
from outbox_tasks.relay.result import Result, Status
from outbox_tasks.relay.retry import retry
from outbox_tasks.settings import Settings
from outbox_tasks.store import blocked_keys
from outbox_tasks.store.connection import Connection, connect
from outbox_tasks.testing.services import ApacheKafka, free_port
from outbox_tasks.testing.services.kafka_jars import missing_tools
from outbox_tasks.testing.services.places import LOOPBACK

RELAY = "User:relay"
PASSWORD = "a-throw-away-password"
INTERVAL = 30.0
KEYS = [f"key-{number}" for number in range(6)]


@dataclass(frozen=True, kw_only=True)
class GuardedKafka:
    """A broker with access control: who comes in by SASL as `relay` may do what no rule denies."""

    broker: ApacheKafka
    sasl_port: int

    def settings(self, client: Client, *, password: str = PASSWORD) -> dict[str, object]:
        """Return the relay's settings for it."""
        kafka: dict[str, object] = {
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": "PLAIN",
            "sasl_plain_username": "relay",
            "sasl_plain_password": password,
        }
        return {
            "bootstrap_servers": f"{LOOPBACK}:{self.sasl_port}",
            "kafka": client.named(kafka),
            "publisher": client.name,
        }

    def forbid(self, topic: str, *, looking: bool) -> None:
        """Deny the relay writing to a topic; `looking` at it may be allowed."""
        rules = [_rule(topic, ACLOperation.WRITE, ACLPermissionType.DENY)]
        if looking:
            seen = (ACLOperation.DESCRIBE, ACLOperation.DESCRIBE_CONFIGS)
            rules += [_rule(topic, operation, ACLPermissionType.ALLOW) for operation in seen]
        with closing(KafkaAdminClient(bootstrap_servers=self.broker.bootstrap_servers)) as admin:
            assert not admin.create_acls(rules)["failed"]

    def allow(self, topic: str) -> None:
        """Let everybody do everything with a topic again."""
        everything = ACLFilter(None, None, ACLOperation.ANY, ACLPermissionType.ANY, _named(topic))
        with closing(KafkaAdminClient(bootstrap_servers=self.broker.bootstrap_servers)) as admin:
            admin.delete_acls([everything])


def _named(topic: str) -> ResourcePattern:
    return ResourcePattern(ResourceType.TOPIC, topic)


def _rule(topic: str, operation: ACLOperation, permission: ACLPermissionType) -> ACL:
    return ACL(RELAY, "*", operation, permission, _named(topic))


@pytest.fixture(scope="module")
def guarded(server_directory: Path) -> Iterator[GuardedKafka]:
    """Run a broker with access control; tests come in by its first listener, as nobody, who may do everything."""
    if missing_tools():
        pytest.skip(f"Apache Kafka needs {' and '.join(missing_tools())}, which are not installed")
    port, controller, sasl = free_port(), free_port(), free_port()
    listeners = f"PLAINTEXT://{LOOPBACK}:{port},SASL_PLAINTEXT://{LOOPBACK}:{sasl}"
    login = "org.apache.kafka.common.security.plain.PlainLoginModule"
    properties = {
        "controller.quorum.voters": f"1@{LOOPBACK}:{controller}",
        "listeners": f"{listeners},CONTROLLER://{LOOPBACK}:{controller}",
        "advertised.listeners": listeners,
        "listener.security.protocol.map": ("PLAINTEXT:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT"),
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": f'{login} required user_relay="{PASSWORD}";',
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
        "super.users": "User:ANONYMOUS",
    }
    with ApacheKafka(server_directory / "guarded-kafka", port=port, properties=properties) as broker:
        yield GuardedKafka(broker=broker, sasl_port=sasl)


class CountingPublisher:
    """A real publisher, which notes what it is asked to send and to tell."""

    def __init__(self, real: Publisher) -> None:
        self._real = real
        self.sent: list[list[Record]] = []
        self.asked: list[set[str]] = []
        # All but the two below goes straight to the real one.
        self.open, self.discard, self.close = real.open, real.discard, real.close
        self.condemn, self.pardon = real.topics.condemn, real.topics.pardon

    @property
    def limits(self) -> Limits:
        """Return the real one's."""
        return self._real.limits

    @property
    def topics(self) -> Self:
        """Note what is asked of topics here."""
        return self

    def facts(self, topics: Collection[str]) -> Mapping[str, TopicFacts | BaseException]:
        """Note the topics."""
        self.asked.append(set(topics))
        return self._real.topics.facts(topics)

    def send(self, records: Sequence[Record], *, deadline: Deadline, stopping: Stopping) -> Sent:
        """Note the records."""
        self.sent.append(list(records))
        return self._real.send(records, deadline=deadline, stopping=stopping)


@dataclass(kw_only=True)
class Relay:
    """One process of the relay, whose clock a test can move."""

    eye: Connection
    connection: Connection
    publisher: CountingPublisher
    settings: Settings
    clock: "MovableClock"

    def run(self, loop: Callable[[Ports], Result]) -> Result:
        """Run a loop once."""
        return loop(
            Ports(
                connection=self.connection,
                publisher=self.publisher,
                settings=self.settings,
                owner="test",
                clock=self.clock,
            )
        )

    def wait(self, seconds: float) -> None:
        """Let time pass, for this process and for blocked keys."""
        self.clock.ahead += seconds
        let_time_pass(self.eye, seconds=seconds)

    def write(self, topic: str | None, *, keys: Sequence[str] = KEYS, aggregate_type: str = "order") -> list[UUID]:
        """Commit two events of each key."""
        return [
            write_event(self.eye, key, topic=topic, aggregate_type=aggregate_type) for _ in range(2) for key in keys
        ]

    def states(self, events: Sequence[UUID]) -> set[str]:
        """Return where events are."""
        return {state_of(self.eye, event_id) for event_id in events}

    def attempts(self) -> int:
        """Return how many attempts were spent on all events."""
        row = self.eye.execute("SELECT sum(attempts) FROM outbox").fetchone()
        assert row is not None
        return int(row[0])

    def due_within(self, seconds: float) -> list[str]:
        """Return the blocked keys that are tried again within a time."""
        waits = {key: entry.due_seconds for key, entry in blocked(self.eye).items()}
        return [key for key, wait in waits.items() if wait is not None and wait <= seconds]


@dataclass
class MovableClock:
    """The monotonic clock, some seconds ahead."""

    ahead: float = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return time.monotonic() + self.ahead


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Something wrong with where events are to go: their topic, what its reason names, and how it is put right."""

    topic: str | None
    names: str
    mend: Callable[[Relay], None]
    aggregate_type: str = "order"


MakeRelay = Callable[..., Relay]


@pytest.fixture
def open_relay(database_url: str) -> Iterator[MakeRelay]:
    """Open relays, and close them in the end."""
    opened_relays: list[Relay] = []

    def open_one(**changes: object) -> Relay:
        settings = Settings.model_validate({"database_url": database_url, "misconfigured_seconds": INTERVAL, **changes})
        clock = MovableClock()
        relay = Relay(
            eye=eye,
            connection=connect(settings),
            publisher=CountingPublisher(new_publisher(settings, clock=clock)),
            settings=settings,
            clock=clock,
        )
        opened_relays.append(relay)
        return relay

    with opened(database_url) as eye:
        yield open_one
    for relay in opened_relays:
        relay.publisher.close()
        relay.connection.close()


@pytest.fixture
def relay(open_relay: MakeRelay, guarded: GuardedKafka, client: Client) -> Relay:
    """Open the relay of most tests."""
    return open_relay(**guarded.settings(client))


@pytest.fixture
def good_topic(guarded: GuardedKafka) -> str:
    """Create a topic that has nothing wrong with it."""
    name = f"good-{uuid4().hex}"
    guarded.broker.create_topic(name)
    return name


@pytest.fixture(params=["missing", "hidden", "forbidden", "no route"])
def trouble(request: pytest.FixtureRequest, guarded: GuardedKafka, good_topic: str) -> Trouble:
    """Make one kind of trouble."""
    name = f"bad-{uuid4().hex}"
    if request.param == "missing":
        return Trouble(topic=name, names=name, mend=lambda _: guarded.broker.create_topic(name))
    if request.param in ("hidden", "forbidden"):
        guarded.broker.create_topic(name)
        guarded.forbid(name, looking=request.param == "forbidden")
        return Trouble(topic=name, names=name, mend=lambda _: guarded.allow(name))

    def add_route(relay: Relay) -> None:
        relay.settings = relay.settings.model_copy(update={"routes": {"stray": good_topic}})

    return Trouble(topic=None, names="'stray'", mend=add_route, aggregate_type="stray")


def test_a_bad_topic_blocks_its_own_keys_alone(
    relay: Relay, trouble: Trouble, good_topic: str, guarded: GuardedKafka
) -> None:
    """Events of other topics go out in the same run; keys of a bad one are blocked, with its name and no attempt."""
    bad = relay.write(trouble.topic, aggregate_type=trouble.aggregate_type)
    good = relay.write(good_topic)
    relay.run(dispatch)
    assert relay.states(good) == {"published"}
    assert len(consume_all(guarded.broker.bootstrap_servers, good_topic)) == len(good)
    assert relay.states(bad) == {"held"}
    assert relay.attempts() == 0
    found = blocked(relay.eye)
    assert found.keys() == {f"{trouble.topic or trouble.aggregate_type}/{key}" for key in KEYS}
    assert {entry.kind for entry in found.values()} == {"misconfigured"}
    assert all(trouble.names in entry.reason for entry in found.values())


def test_one_key_is_tried_for_all_and_all_go_on(relay: Relay, trouble: Trouble) -> None:
    """Of the keys of a bad topic one is tried an interval; once that works, all are published in the same run."""
    events = relay.write(trouble.topic, aggregate_type=trouble.aggregate_type)
    relay.run(dispatch)
    assert len(relay.due_within(INTERVAL)) == 1
    for _ in range(2):
        relay.wait(INTERVAL + 1)
        relay.publisher.sent.clear()
        probed = relay.due_within(0)
        assert len(probed) == 1
        relay.run(retry)
        assert {record.key for records in relay.publisher.sent for record in records} <= {
            key.rpartition("/")[2].encode() for key in probed
        }
        assert len(blocked(relay.eye)) == len(KEYS)
        assert len(relay.due_within(INTERVAL)) == 1
    assert relay.states(events) == {"held"}
    trouble.mend(relay)
    relay.wait(INTERVAL + 1)
    assert len(relay.due_within(0)) == 1
    relay.run(retry)
    assert relay.states(events) == {"published"}
    assert blocked(relay.eye) == {}
    assert relay.attempts() == 0


def test_later_events_of_a_forbidden_topic_cost_other_topics_nothing(
    relay: Relay, guarded: GuardedKafka, good_topic: str
) -> None:
    """A topic that turned out to be forbidden is not asked again by the batches that follow."""
    forbidden = f"forbidden-{uuid4().hex}"
    guarded.broker.create_topic(forbidden)
    guarded.forbid(forbidden, looking=True)
    relay.write(forbidden, keys=["first"])
    relay.run(dispatch)
    relay.publisher.sent.clear()
    bad, good = relay.write(forbidden, keys=["second"]), relay.write(good_topic)
    relay.run(dispatch)
    assert {record.topic for records in relay.publisher.sent for record in records} == {good_topic}
    assert (relay.states(bad), relay.states(good)) == ({"held"}, {"published"})


def test_a_person_who_put_a_topic_right_need_not_wait(relay: Relay, trouble: Trouble) -> None:
    """`outbox retry KEY` right after the repair publishes the key, and with it all that waited for the same."""
    events = relay.write(trouble.topic, aggregate_type=trouble.aggregate_type)
    relay.run(dispatch)
    trouble.mend(relay)
    assert blocked_keys.retry_now(relay.connection, key=f"{trouble.topic or trouble.aggregate_type}/{KEYS[-1]}")
    relay.run(retry)
    assert relay.states(events) == {"published"}


def test_fellows_go_on_though_the_tried_event_is_refused_for_itself(relay: Relay, guarded: GuardedKafka) -> None:
    """A probe that the topic, there at last, refuses for its own size lets the other keys go on all the same."""
    topic = f"late-{uuid4().hex}"
    header = {"padding": "x" * 2000}
    big = write_event(relay.eye, "a-big", topic=topic)
    relay.eye.execute(
        "UPDATE outbox SET headers = jsonb_build_object('padding', %s::text) WHERE event_id = %s",
        (header["padding"], big),
    )
    others = relay.write(topic)
    relay.run(dispatch)
    assert relay.due_within(INTERVAL) == [f"{topic}/a-big"]
    guarded.broker.create_topic(topic, config={"max.message.bytes": "1000"})
    relay.wait(INTERVAL + 1)
    relay.run(retry)
    assert blocked(relay.eye)[f"{topic}/a-big"].kind == "refused"
    relay.wait(INTERVAL + 1)
    relay.run(retry)
    assert relay.states(others) == {"published"}


def test_wrong_credentials_leave_everything_where_it_is(
    open_relay: MakeRelay, guarded: GuardedKafka, good_topic: str, client: Client
) -> None:
    """A relay that the broker will not have touches no event, says so, and goes on once its password is right.

    Whether the broker's word or its hanging up is noticed first is a race within kafka-python; either way the
    reason names credentials.
    """
    wrong = open_relay(**guarded.settings(client, password="wrong"))
    events = wrong.write(good_topic)
    result = wrong.run(dispatch)
    seen_by_chance = (Status.UNAVAILABLE,) if client.name == "kafka-python" else ()
    assert result.status in (Status.UNAUTHORIZED, *seen_by_chance)
    assert re.search("SaslAuthenticationFailed|wrong credentials", result.reason or "")
    assert wrong.states(events) == {"pending"}
    assert wrong.attempts() == 0
    assert blocked(wrong.eye) == {}
    open_relay(**guarded.settings(client)).run(dispatch)
    assert wrong.states(events) == {"published"}


def test_a_topic_that_takes_nothing_stops_no_other(relay: Relay, guarded: GuardedKafka, good_topic: str) -> None:
    """A topic with too few in-sync replicas is an outage first, then its own keys' trouble, and goes on by itself."""
    ailing = f"ailing-{uuid4().hex}"
    guarded.broker.create_topic(ailing, config={"min.insync.replicas": "2"})
    stuck = relay.write(ailing)
    assert relay.run(dispatch).status is Status.UNAVAILABLE
    assert relay.states(stuck) == {"pending"}
    relay.wait(relay.settings.delivery_seconds + 1)
    good = relay.write(good_topic)
    assert relay.run(dispatch).status is Status.DONE
    assert relay.states(good) == {"published"}
    assert relay.states(stuck) == {"held"}
    assert relay.attempts() == 0
    guarded.broker.alter_topic(ailing, {"min.insync.replicas": "1"})
    relay.wait(INTERVAL + 1)
    relay.run(retry)
    assert relay.states(stuck) == {"published"}
