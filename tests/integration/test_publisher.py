"""The publisher on real brokers: what it gives back, how long it takes at most, and that it always recovers."""

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from kafka.errors import MessageSizeTooLargeError
from support.clients import BOTH, Client
from support.consuming import consume_all
from support.proxied import ProxiedBroker, behind_proxy
from support.relaying import (
    NO_BROKER,
    assert_consistent,
    blocked,
    dice,
    execute,
    leased_shards,
    numbered,
    put,
    relay,
    states,
    table,
)
from support.waiting import until

from outbox_tasks.deadline import Deadline
from outbox_tasks.errors import BrokerUnavailableError, MisconfiguredError, SettingsError, TopicMissingError
from outbox_tasks.ports import never
from outbox_tasks.publishing.arrival import Arrival
from outbox_tasks.publishing.factory import tail
from outbox_tasks.publishing.kafka_python import KafkaPythonPublisher
from outbox_tasks.publishing.publisher import NotSentError, Publisher, Record, Sent, TopicFacts
from outbox_tasks.relay.dispatch import dispatch
from outbox_tasks.relay.result import Status
from outbox_tasks.settings import Settings
from outbox_tasks.testing.services import ApacheKafka, Broker, TansuBroker, free_port, scratch_directory

# Whatever is to be quick has at least this long on a busy machine.
LENIENCE_SECONDS = 15.0


@pytest.fixture
def directory() -> Iterator[Path]:
    """Make a place for a broker of the test's own."""
    with scratch_directory("outbox-publisher-") as made:
        yield made


@pytest.fixture
def own_broker(directory: Path) -> Iterator[TansuBroker]:
    """Run a broker that a test may freeze."""
    with TansuBroker(directory / "broker") as broker:
        yield broker
        broker.thaw()


@pytest.fixture
def proxied(directory: Path) -> Iterator[ProxiedBroker]:
    """Run a broker behind a network that a test may break."""
    with behind_proxy(TansuBroker, directory / "proxied") as made:
        yield made
        made.proxy.heal()


def records(topic: str, *, keys: int = 5, each: int = 4, value: bytes = b"x") -> list[Record]:
    """Return records of some keys in turn."""
    return [
        Record(topic, f"key-{number % keys}".encode(), b"%d:%s" % (number // keys, value), [])
        for number in range(keys * each)
    ]


def send(publisher: Publisher, batch: list[Record], *, seconds: float = 30) -> Sent:
    """Send with a deadline that is far away."""
    return publisher.send(batch, deadline=Deadline.after(seconds), stopping=never)


def new_topic(broker: Broker, **config: str) -> str:
    """Create a topic for one test, `_` standing for `.` in the names of its settings."""
    name = f"topic-{uuid4().hex}"
    broker.create_topic(name, config={key.replace("_", "."): value for key, value in config.items()})
    return name


def test_what_is_sent_arrives_in_order(client: Client, broker: Broker, topic: str) -> None:
    """Every record is acknowledged, and each key's records lie in one partition, in order."""
    batch = records(topic, keys=20, each=30)
    with closing(client.publisher(broker)) as publisher:
        assert send(publisher, batch) == [None] * len(batch)
    found = consume_all(broker.bootstrap_servers, topic)
    for key in {record.key for record in batch}:
        mine = [record for record in found if record.key == key]
        assert [record.value for record in mine] == [record.value for record in batch if record.key == key]
        assert len({record.partition for record in mine}) == 1


def test_both_clients_choose_the_same_partitions(kafka: ApacheKafka) -> None:
    """Whichever client sends a key, it lies in the same partition: an empty one too, and keys of any bytes."""
    topic = new_topic(kafka)
    keys = [b"", *{chance.randbytes(chance.randint(1, 40)) for chance in [dice(7)] for _ in range(1000)}]
    batch = [Record(topic, key, b"x", []) for key in keys]
    for client in BOTH:
        with closing(client.publisher(kafka)) as publisher:
            assert send(publisher, batch) == [None] * len(batch)
    places: dict[bytes | None, list[int]] = {}
    for record in consume_all(kafka.bootstrap_servers, topic):
        places.setdefault(record.key, []).append(record.partition)
    assert places.keys() == set(keys)
    assert all(len(found) == len(BOTH) and len(set(found)) == 1 for found in places.values())
    assert {place for found in places.values() for place in found} == set(range(8))


def test_a_wait_ends_when_the_process_is_to_stop(client: Client, own_broker: TansuBroker) -> None:
    """A batch whose acknowledgements do not come is given up soon after the process was asked to stop."""
    topic = new_topic(own_broker)
    with closing(client.publisher(own_broker, delivery_seconds=60, lease_seconds=120)) as publisher:
        assert send(publisher, records(topic)) == [None] * 20
        own_broker.freeze()
        asked = iter([False, False, False])
        begun = time.monotonic()
        sent = publisher.send(records(topic), deadline=Deadline.after(60), stopping=lambda: next(asked, True))
        assert time.monotonic() - begun < LENIENCE_SECONDS
    assert {type(problem) for problem in sent} == {NotSentError}


def test_what_arrives_is_followed(client: Client, kafka: ApacheKafka) -> None:
    """`outbox tail` shows what arrives from now on, over the chosen client, with its key and event."""
    topic = new_topic(kafka)
    headers = [("event_id", b"an-id"), ("event_type", b"order_placed")]
    found: list[Arrival] = []

    def follow() -> None:
        arrivals = tail(client.settings(kafka), [topic])
        found.append(next(arrivals))
        arrivals.close()  # type: ignore[attr-defined]

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    with closing(client.publisher(kafka)) as publisher:
        until(
            lambda: send(publisher, [Record(topic, b"key", b"x", headers)]) and found,
            "the follower has seen a record",
            every_seconds=0.2,
        )
    follower.join(LENIENCE_SECONDS)
    (arrival,) = found
    assert (arrival.topic, arrival.key, arrival.event_type, arrival.event_id) == (topic, "key", "order_placed", "an-id")


@pytest.mark.parametrize("what", ["topic", "broker"])
def test_following_what_is_not_there_is_told(client: Client, kafka: ApacheKafka, what: str) -> None:
    """Following a topic that does not exist, or without a broker, ends in an error that says so."""
    settings = client.settings(kafka if what == "topic" else NO_BROKER, probe_seconds=1)
    with pytest.raises(TopicMissingError if what == "topic" else BrokerUnavailableError):
        next(tail(settings, [f"missing-{uuid4().hex}"]))


def test_facts_of_topics(client: Client, broker: Broker, topic: str) -> None:
    """A topic's facts tell its partitions, and limits where they are known; a missing one is told by an error."""
    missing = f"missing-{uuid4().hex}"
    with closing(client.publisher(broker)) as publisher:
        facts = publisher.topics.facts([topic, missing])
    known, lost = facts[topic], facts[missing]
    assert isinstance(known, TopicFacts)
    assert known.partitions == 8
    assert isinstance(lost, TopicMissingError)
    assert missing in str(lost)


def test_limits_of_a_topic_are_known_beside_a_missing_one(client: Client, kafka: ApacheKafka) -> None:
    """The limits of a topic are told even where another that is asked for does not exist."""
    topic = new_topic(kafka, max_message_bytes="12345", cleanup_policy="compact")
    with closing(client.publisher(kafka)) as publisher:
        known = publisher.topics.facts([f"missing-{uuid4().hex}", topic])[topic]
    assert known == TopicFacts(
        partitions=8, max_message_bytes=12_345, compacted=True, replicas=1, min_insync=1, unclean_election=False
    )


def test_facts_are_believed_for_a_while(client: Client, kafka: ApacheKafka) -> None:
    """Facts are asked for once, again when their time is over, and again after the producer was thrown away."""
    topic = new_topic(kafka, max_message_bytes="1000")
    clock = [0.0]
    publisher = client.publisher(kafka, topic_facts_seconds=60, clock=lambda: clock[0])

    def limit() -> int | None:
        facts = publisher.topics.facts([topic])[topic]
        assert isinstance(facts, TopicFacts)
        return facts.max_message_bytes

    with closing(publisher):
        assert limit() == 1000
        kafka.alter_topic(topic, {"max.message.bytes": "2000"})
        clock[0] = 59
        assert limit() == 1000
        clock[0] = 60
        assert limit() == 2000
        kafka.alter_topic(topic, {"max.message.bytes": "3000"})
        publisher.discard()
        assert limit() == 3000


def test_a_missing_topic_is_not_remembered(client: Client, broker: Broker) -> None:
    """A topic that was missing is there as soon as it was made."""
    topic = f"later-{uuid4().hex}"
    with closing(client.publisher(broker)) as publisher:
        assert isinstance(publisher.topics.facts([topic])[topic], TopicMissingError)
        broker.create_topic(topic)
        assert isinstance(publisher.topics.facts([topic])[topic], TopicFacts)


def test_a_condemned_topic_is_believed_for_its_time_only(client: Client) -> None:
    """What was found wrong with a topic while sending is told for as long as a misconfigured key waits."""
    clock = [0.0]
    publisher = client.publisher(NO_BROKER, misconfigured_seconds=30, clock=lambda: clock[0])
    problem = TopicMissingError("orders")
    publisher.topics.condemn("orders", problem)
    assert publisher.topics.facts([])["orders"] is problem
    clock[0] = 30
    assert "orders" not in publisher.topics.facts([])


def test_a_refused_record_is_told_and_the_next_producer_works(client: Client, kafka: ApacheKafka) -> None:
    """A record the broker refuses comes back as its error, spends the producer, and a new one sends on."""
    topic = new_topic(kafka, max_message_bytes="10000")
    batch = records(topic, keys=1, each=3)
    bad = Record(topic, b"bad", b"x" * 20_000, [])
    with closing(client.publisher(kafka)) as publisher:
        outcome = send(publisher, [*batch, bad])
        assert isinstance(outcome[3], MessageSizeTooLargeError)
        publisher.discard()
        assert send(publisher, batch) == [None] * 3


def test_after_a_refused_record_nothing_more_of_its_key_is_sent(client: Client, kafka: ApacheKafka) -> None:
    """What comes after a refused record in its partition does not reach the topic."""
    topic = new_topic(kafka, max_message_bytes="10000")
    bad = Record(topic, b"k", b"x" * 20_000, [])
    later = [Record(topic, b"k", b"later %d" % number, []) for number in range(200)]
    with closing(client.publisher(kafka)) as publisher:
        outcome = send(publisher, [bad, *later])
    assert all(problem is not None for problem in outcome)
    assert consume_all(kafka.bootstrap_servers, topic) == []


def test_a_failure_stops_the_client_by_itself(kafka: ApacheKafka) -> None:
    """Any failure ends the client's own thread before anybody asks, so that nothing later can pass what failed."""
    topic = new_topic(kafka, max_message_bytes="10000")
    with closing(KafkaPythonPublisher(Client("kafka-python").settings(kafka), clock=time.monotonic)) as publisher:
        publisher.open()
        producer = publisher._producer
        assert producer is not None
        assert send(publisher, [Record(topic, b"k", b"x" * 20_000, [])]) != [None]
        until(lambda: not producer._sender.is_alive(), "the client's thread has ended")


def test_batches_larger_than_a_topic_takes_are_split(client: Client, kafka: ApacheKafka) -> None:
    """Records that are each small enough arrive, however many of them the client puts into one batch."""
    topic = new_topic(kafka, max_message_bytes="10000")
    batch = records(topic, keys=3, each=60, value=b"x" * 1000)
    with closing(client.publisher(kafka)) as publisher:
        publisher.topics.facts([topic])  # as before every batch
        assert send(publisher, batch) == [None] * len(batch)


def test_what_the_client_itself_refuses_is_told(client: Client, tansu: Broker) -> None:
    """A record the client will not take comes back as an error, later ones of its key unsent, other keys sent."""
    topic = new_topic(tansu)
    too_large = Record(topic, b"bad", b"x" * 2000, [])
    one, two, three = (
        Record(topic, b"good", b"1", []),
        Record(topic, b"bad", b"2", []),
        Record(topic, b"good", b"3", []),
    )
    batch = [one, too_large, two, three]
    with closing(client.publisher(tansu, kafka={"max_request_size": 1000})) as publisher:
        first, refused, follower, last = send(publisher, batch)
    assert (first, last) == (None, None)
    assert isinstance(refused, MessageSizeTooLargeError)
    assert isinstance(follower, NotSentError)
    assert [record.value for record in consume_all(tansu.bootstrap_servers, topic)] == [b"1", b"3"]


def test_nothing_is_sent_after_the_deadline(client: Client, tansu: Broker) -> None:
    """A batch whose deadline has passed is not sent at all."""
    topic = new_topic(tansu)
    with closing(client.publisher(tansu)) as publisher:
        outcome = send(publisher, records(topic), seconds=0)
        assert all(isinstance(problem, NotSentError) for problem in outcome)
        # What follows in the same producer would be behind it, had it been sent after all.
        assert send(publisher, [Record(topic, b"after", b"after", [])]) == [None]
    assert [record.value for record in consume_all(tansu.bootstrap_servers, topic)] == [b"after"]


def test_a_topic_that_vanished_does_not_block_for_long(client: Client, kafka: ApacheKafka) -> None:
    """Sending to a topic that does not exist comes back within the probe time, not after kafka-python's minute."""
    missing = f"missing-{uuid4().hex}"
    with closing(client.publisher(kafka, probe_seconds=1)) as publisher:
        publisher.open()
        begun = time.monotonic()
        outcome = send(publisher, records(missing))
        took = time.monotonic() - begun
    assert None not in outcome
    assert took < LENIENCE_SECONDS


def test_opening_without_a_broker_fails_within_the_probe_time(client: Client) -> None:
    """With no broker there, opening fails as unavailable within the probe time."""
    publisher = client.publisher(NO_BROKER, probe_seconds=0.5)
    begun = time.monotonic()
    with pytest.raises(BrokerUnavailableError, match=NO_BROKER):
        publisher.open()
    assert time.monotonic() - begun < LENIENCE_SECONDS


def test_failed_attempts_leave_nothing_open(client: Client) -> None:
    """However often no broker answers, no thread is left behind, of Python or not."""
    publisher = client.publisher(NO_BROKER, probe_seconds=0.05)
    threads = psutil.Process().num_threads
    before = threads()
    for _ in range(20):
        with pytest.raises(BrokerUnavailableError):
            publisher.open()
    until(lambda: threads() <= before, "as many threads as before")


@pytest.mark.parametrize("broken", ["frozen", "black hole"])
def test_opening_a_broker_that_says_nothing_fails_within_the_probe_time(
    client: Client, proxied: ProxiedBroker, broken: str
) -> None:
    """A broker that takes connections and says nothing is unavailable within the probe time."""
    proxied.broker.freeze() if broken == "frozen" else proxied.proxy.blackhole()
    publisher = client.publisher(proxied.broker, probe_seconds=0.5)
    begun = time.monotonic()
    with pytest.raises(BrokerUnavailableError):
        publisher.open()
    assert time.monotonic() - begun < LENIENCE_SECONDS
    proxied.broker.thaw()


@pytest.mark.parametrize("protocol", ["SSL", "SASL_SSL"])
def test_a_broker_that_never_answers_a_tls_handshake_is_unavailable(
    client: Client, proxied: ProxiedBroker, protocol: str
) -> None:
    """With TLS too, a broker that says nothing is unavailable within the probe time."""
    proxied.proxy.blackhole()
    kafka = {"security_protocol": protocol, "sasl_mechanism": "PLAIN"}
    kafka |= {"sasl_plain_username": "relay", "sasl_plain_password": "hunter2"}
    publisher = client.publisher(proxied.broker, probe_seconds=0.5, kafka=kafka)
    failure: list[BaseException] = []

    def open_it() -> None:
        try:
            publisher.open()
        except BrokerUnavailableError as error:
            failure.append(error)

    # Beside the test, so that it fails rather than hangs.
    opening = threading.Thread(target=open_it, daemon=True)
    opening.start()
    opening.join(LENIENCE_SECONDS)
    assert failure, "open() does not come back"


@pytest.mark.parametrize(
    "kafka_settings",
    [
        {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN",
         "sasl_plain_username": "relay", "sasl_plain_password": "hunter2"},
        {"security_protocol": "SSL"},
        {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "UNHEARD-OF"},
        {"compression_type": "unheard-of"},
        {"linger_ms": 60_000},
    ],
)  # fmt: skip
# The client leaves sockets of failed handshakes to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_settings_a_broker_will_not_have_are_no_crash(
    client: Client, kafka: ApacheKafka, kafka_settings: dict[str, object]
) -> None:
    """Security or client settings that do not fit end in an error of ours, without the password in it."""
    with pytest.raises((BrokerUnavailableError, MisconfiguredError, SettingsError)) as caught:
        client.publisher(kafka, probe_seconds=1, kafka=kafka_settings).open()
    assert "hunter2" not in str(caught.value)
    del caught
    gc.collect()


# whole runs


def test_a_run_without_a_broker_touches_nothing(client: Client, database_url: str) -> None:
    """With no broker there a run says so, and leaves everything pending, unleased, with no attempt spent."""
    put(database_url, *numbered(["1", "2"], each=3))
    with relay(
        client.settings(NO_BROKER, database_url=database_url, probe_seconds=0.5, routes={"order": "orders"})
    ) as ports:
        result = dispatch(ports)
    assert result.as_dict()["status"] == "broker unavailable"
    assert NO_BROKER in str(result.reason)
    assert_untouched(database_url)


def assert_untouched(database_url: str) -> None:
    """Assert that everything is where it was, and costs nobody anything."""
    assert set(states(database_url)) == {"pending"}
    assert {row["attempts"] for row in table(database_url)} == {0}
    assert blocked(database_url) == {}
    assert leased_shards(database_url) == []
    assert_consistent(database_url)


def quick_settings(client: Client, database_url: str, broker: Broker, topic: str) -> Settings:
    """Return settings with which a run gives up soon, and believes a topic's facts all the same."""
    return client.settings(
        broker,
        database_url=database_url,
        routes={"order": topic},
        delivery_seconds=2,
        probe_seconds=1,
        topic_facts_seconds=600,
    )


def firsts(broker: Broker, topic: str) -> dict[bytes | None, list[bytes | None]]:
    """Return the first occurrences of each key's values in order."""
    found: dict[bytes | None, dict[bytes | None, None]] = {}
    for record in consume_all(broker.bootstrap_servers, topic):
        found.setdefault(record.key, {}).setdefault(record.value)
    return {key: list(values) for key, values in found.items()}


def expected(keys: list[str], *, each: int) -> dict[bytes | None, list[bytes | None]]:
    """Return the values of each key in order, as the topic should have them."""
    return {
        key.encode(): [b'{"key": "%s", "number": %d}' % (key.encode(), number) for number in range(each)]
        for key in keys
    }


KEYS = [str(number) for number in range(10)]


def test_a_run_against_a_broker_that_freezes_costs_nothing(
    client: Client, database_url: str, own_broker: TansuBroker
) -> None:
    """A broker frozen past the delivery timeout costs no attempt; thawed, the next run publishes all in order."""
    topic = new_topic(own_broker)
    put(database_url, *numbered(KEYS, each=1))
    with relay(quick_settings(client, database_url, own_broker, topic)) as ports:
        assert dispatch(ports).published == 10
        execute(database_url, "DELETE FROM outbox")
        put(database_url, *numbered(KEYS, each=8, start=1))
        own_broker.freeze()
        begun = time.monotonic()
        assert dispatch(ports).status is Status.UNAVAILABLE
        assert time.monotonic() - begun < 2 + LENIENCE_SECONDS
        assert_untouched(database_url)
        assert dispatch(ports).status is Status.UNAVAILABLE
        assert_untouched(database_url)
        own_broker.thaw()
        assert dispatch(ports).published == 80
    assert firsts(own_broker, topic) == expected(KEYS, each=9)


@pytest.mark.parametrize("how", ["cut", "black hole"])
def test_a_run_whose_network_breaks_costs_nothing(
    client: Client, database_url: str, proxied: ProxiedBroker, how: str
) -> None:
    """A network that refuses or swallows everything costs no attempt; healed, the next run publishes all in order."""
    topic = new_topic(proxied.broker)
    put(database_url, *numbered(KEYS, each=1))
    with relay(quick_settings(client, database_url, proxied.broker, topic)) as ports:
        assert dispatch(ports).published == 10
        execute(database_url, "DELETE FROM outbox")
        put(database_url, *numbered(KEYS, each=8, start=1))
        proxied.proxy.cut() if how == "cut" else proxied.proxy.blackhole()
        begun = time.monotonic()
        assert dispatch(ports).status is Status.UNAVAILABLE
        assert time.monotonic() - begun < 2 + LENIENCE_SECONDS
        assert_untouched(database_url)
        proxied.proxy.heal()
        assert dispatch(ports).published == 80
    assert firsts(proxied.broker, topic) == expected(KEYS, each=9)


def test_a_broker_that_comes_later_is_found(client: Client, database_url: str, directory: Path) -> None:
    """A run finds a broker that was not there at the run before, with the same publisher."""
    broker = TansuBroker(directory / "later", port=free_port())
    topic = "later"
    put(database_url, *numbered(KEYS, each=2))
    with relay(quick_settings(client, database_url, broker, topic)) as ports:
        assert dispatch(ports).status is Status.UNAVAILABLE
        with broker:
            broker.create_topic(topic)
            assert dispatch(ports).published == 20
            assert firsts(broker, topic) == expected(KEYS, each=2)


def test_a_producer_spent_by_a_refused_record_does_not_hinder_the_next_run(
    client: Client, database_url: str, kafka: ApacheKafka
) -> None:
    """After a run in which the broker refused a record the next run publishes, with the same publisher."""
    topic = new_topic(kafka)
    put(database_url, {"aggregate_id": "bad", "headers": {"padding": "x" * 20_000}}, *numbered(KEYS, each=2))
    with relay(client.settings(kafka, database_url=database_url, routes={"order": topic})) as ports:
        ports.publisher.topics.facts([topic])
        kafka.alter_topic(topic, {"max.message.bytes": "10000"})
        assert dispatch(ports).refused == 1
        put(database_url, *numbered(["new"], each=2))
        assert dispatch(ports).published == 2
    assert firsts(kafka, topic) == expected(KEYS, each=2) | expected(["new"], each=2)


def test_two_topics_one_of_which_vanishes_do_not_hinder_each_other(
    client: Client, database_url: str, kafka: ApacheKafka
) -> None:
    """A topic deleted after it was looked at is found out by the next run at the latest; the other goes on."""
    staying, going = new_topic(kafka), new_topic(kafka)
    put(database_url, *numbered(KEYS, each=1, topic=staying), *numbered(KEYS, each=1, topic=going))
    settings = client.settings(kafka, database_url=database_url, delivery_seconds=3, probe_seconds=1)
    with relay(settings) as ports:
        ports.publisher.topics.facts([staying, going])
        with kafka._admin() as admin:
            admin.delete_topics([going])
        results = [dispatch(ports) for _ in range(2)]
    assert sum(result.published for result in results) == 10
    assert all(key["kind"] == "misconfigured" for key in blocked(database_url).values())
    assert len(blocked(database_url)) == 10
    assert {row["attempts"] for row in table(database_url)} == {0}
    assert_consistent(database_url)
