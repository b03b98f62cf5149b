"""What is particular about confluent-kafka: what librdkafka does after a failure, and that nothing is left of it."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from confluent_kafka import KafkaException, Producer
from kafka.admin import KafkaAdminClient
from kafka.errors import MessageSizeTooLargeError, UnknownTopicOrPartitionError
from support.consuming import consume_all
from support.relaying import relay_settings
from support.waiting import until

from outbox_tasks.deadline import Deadline
from outbox_tasks.ports import never
from outbox_tasks.publishing.confluent import ConfluentPublisher
from outbox_tasks.publishing.confluent_batch import Batch
from outbox_tasks.publishing.confluent_config import Heard, producer_config
from outbox_tasks.publishing.publisher import NotSentError, Publisher, Record, Sent
from outbox_tasks.testing.services import ApacheKafka, Broker, TansuBroker, scratch_directory

LENIENCE_SECONDS = 10.0


@pytest.fixture
def own_broker() -> Iterator[TansuBroker]:
    """Run a broker that a test may freeze."""
    with scratch_directory("outbox-confluent-") as directory, TansuBroker(Path(directory) / "broker") as broker:
        yield broker
        broker.thaw()


def publisher_for(broker: Broker, **kafka: object) -> Publisher:
    """Return a publisher with more settings of librdkafka, `_` standing for `.` in their names."""
    named = {name.replace("_", "."): value for name, value in kafka.items()}
    settings = relay_settings("dbname=unused", broker, publisher="confluent-kafka", kafka=named)
    return ConfluentPublisher(settings, clock=time.monotonic)


def new_topic(broker: Broker, *, partitions: int = 8, **config: str) -> str:
    """Create a topic for one test, `_` standing for `.` in the names of its settings."""
    name = f"topic-{uuid4().hex}"
    named = {setting.replace("_", "."): value for setting, value in config.items()}
    broker.create_topic(name, partitions=partitions, config=named)
    return name


def send(publisher: Publisher, batch: list[Record], *, seconds: float = 30) -> Sent:
    """Send with a deadline that is far away."""
    return publisher.send(batch, deadline=Deadline.after(seconds), stopping=never)


def numbered(topic: str, count: int) -> list[Record]:
    """Return records of one key."""
    return [Record(topic, b"k", b"%d" % number, []) for number in range(count)]


def test_no_record_passes_one_that_was_refused(kafka: ApacheKafka) -> None:
    """Of records that all go in requests of their own, none behind a refused one reaches the topic."""
    topic = new_topic(kafka, partitions=1, max_message_bytes="10000")
    batch = numbered(topic, 400)
    batch[100] = Record(topic, b"k", b"x" * 20_000, [])
    with closing(publisher_for(kafka, batch_num_messages=1)) as publisher:
        outcome = send(publisher, batch)
        arrived = [record.value for record in consume_all(kafka.bootstrap_servers, topic)]
        assert arrived == [b"%d" % number for number in range(100)]
        assert outcome[:100] == [None] * 100
        assert isinstance(outcome[100], MessageSizeTooLargeError)
        assert all(isinstance(problem, NotSentError) for problem in outcome[101:])
        assert send(publisher, numbered(topic, 3)) == [None] * 3


def test_no_record_passes_one_that_was_refused_as_the_first_of_its_partition(kafka: ApacheKafka) -> None:
    """A record that the broker refuses before it knows the producer is not passed either."""
    topic = new_topic(kafka, partitions=1, max_message_bytes="10000")
    batch = [Record(topic, b"k", b"x" * 20_000, []), *numbered(topic, 400)]
    with closing(publisher_for(kafka, batch_num_messages=1)) as publisher:
        outcome = send(publisher, batch)
        assert consume_all(kafka.bootstrap_servers, topic) == []
        assert isinstance(outcome[0], MessageSizeTooLargeError)
        assert all(isinstance(problem, NotSentError) for problem in outcome[1:])
        assert send(publisher, numbered(topic, 3)) == [None] * 3


def test_the_client_lets_nothing_pass_a_refused_record_by_itself(kafka: ApacheKafka) -> None:
    """Before anybody hears of a refusal, the client has stopped for good: a gap cannot come of our being slow."""
    topic = new_topic(kafka, partitions=1, max_message_bytes="10000")
    settings = relay_settings("dbname=unused", kafka, publisher="confluent-kafka", kafka={"batch.num.messages": 1})
    producer = Producer(producer_config(settings, Heard()))
    for number in range(400):
        producer.produce(topic, b"x" * 20_000 if number == 100 else b"%d" % number, b"k")
    with pytest.raises(KafkaException, match="_GAPLESS_GUARANTEE"):
        until(lambda: producer.poll(1) and not len(producer), "all is sent, though it must not be")
    with pytest.raises(KafkaException, match="_FATAL"):
        producer.produce(topic, b"later", b"k")
    arrived = [record.value for record in consume_all(kafka.bootstrap_servers, topic)]
    assert arrived == [b"%d" % number for number in range(100)]


def test_mates_of_a_refused_record_that_were_on_their_way_are_not_sent_twice(kafka: ApacheKafka) -> None:
    """What other partitions acknowledge while a record is refused counts as acknowledged."""
    small, good = new_topic(kafka, max_message_bytes="10000"), new_topic(kafka)
    batch = [Record(small, b"k", b"x" * 20_000, [])]
    batch += [Record(good, b"k%d" % number, b"x", []) for number in range(40)]
    with closing(publisher_for(kafka)) as publisher:
        outcome = send(publisher, batch)
    assert isinstance(outcome[0], MessageSizeTooLargeError)
    assert len(consume_all(kafka.bootstrap_servers, good)) == outcome[1:].count(None)


def test_what_is_purged_at_the_deadline_may_land_but_nothing_passes_it(own_broker: TansuBroker) -> None:
    """What a broker that froze gets once it is back is in order, behind whatever landed of the batch it froze in."""
    topic = new_topic(own_broker, partitions=1)
    with closing(publisher_for(own_broker)) as publisher:
        assert send(publisher, numbered(topic, 1)) == [None]
        own_broker.freeze()
        begun = time.monotonic()
        outcome = send(publisher, numbered(topic, 3000), seconds=0.5)
        assert time.monotonic() - begun < LENIENCE_SECONDS
        assert {type(problem) for problem in outcome} == {NotSentError}
        publisher.discard()
        own_broker.thaw()
        assert send(publisher, numbered(topic, 3000)) == [None] * 3000
    arrived = dict.fromkeys(record.value for record in consume_all(own_broker.bootstrap_servers, topic))
    assert list(arrived) == [b"%d" % number for number in range(3000)]


def test_a_missing_topic_is_told_within_the_probe_time(kafka: ApacheKafka) -> None:
    """A topic that vanished after it was looked at is named as the culprit, long before the batch's deadline."""
    missing = f"missing-{uuid4().hex}"
    with closing(publisher_for(kafka)) as publisher:
        outcome = send(publisher, numbered(missing, 3))
    assert [type(problem) for problem in outcome] == [UnknownTopicOrPartitionError, NotSentError, NotSentError]
    assert missing in str(outcome[0])


def test_the_probe_asks_about_one_topic_and_makes_none(
    server_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Opening asks about one topic of the routes, not for all, and makes none where brokers make those they hear of."""
    caplog.set_level("DEBUG", "outbox_tasks.publishing.confluent_config")
    properties = {"auto.create.topics.enable": "true"}
    with ApacheKafka(server_directory / "creative-kafka", properties=properties) as creative:
        routes, kafka = {"order": "not-there-yet"}, {"debug": "metadata"}
        settings = relay_settings("dbname=unused", creative, publisher="confluent-kafka", kafka=kafka, routes=routes)
        with closing(ConfluentPublisher(settings, clock=time.monotonic)) as publisher:
            publisher.open()
        with closing(KafkaAdminClient(bootstrap_servers=creative.bootstrap_servers)) as admin:
            assert admin.list_topics() == []
    asked = [line for line in caplog.messages if "Request metadata for" in line]
    assert asked
    assert not [line for line in asked if "all topics" in line]


def test_a_batch_waits_for_no_linger(kafka: ApacheKafka) -> None:
    """The last records of a batch go out at once, however long the client would wait for more."""
    topic = new_topic(kafka)
    with closing(publisher_for(kafka, linger_ms=15_000)) as publisher:
        publisher.open()
        begun = time.monotonic()
        assert send(publisher, numbered(topic, 10)) == [None] * 10
        assert time.monotonic() - begun < LENIENCE_SECONDS


def test_a_batch_larger_than_the_clients_queue_goes_out(kafka: ApacheKafka) -> None:
    """A client that is full is served until it has room."""
    topic = new_topic(kafka, partitions=1)
    with closing(publisher_for(kafka, queue_buffering_max_messages=7)) as publisher:
        assert send(publisher, numbered(topic, 100)) == [None] * 100
    arrived = [record.value for record in consume_all(kafka.bootstrap_servers, topic)]
    assert arrived == [b"%d" % number for number in range(100)]


def test_a_full_client_is_waited_for_until_the_deadline_only(own_broker: TansuBroker) -> None:
    """Where there never is room, a batch comes back at its deadline, and its rest was not given to the client."""
    topic = new_topic(own_broker)
    with closing(publisher_for(own_broker, queue_buffering_max_messages=7)) as publisher:
        publisher.topics.facts([topic])
        publisher.open()
        own_broker.freeze()
        begun = time.monotonic()
        outcome = send(publisher, numbered(topic, 100), seconds=0.5)
        assert time.monotonic() - begun < LENIENCE_SECONDS
    assert {type(problem) for problem in outcome} == {NotSentError}


def test_a_producer_that_is_thrown_away_leaves_nothing(kafka: ApacheKafka) -> None:
    """After a refusal, and after a discard, the client's threads and sockets are gone."""
    topic = new_topic(kafka, max_message_bytes="10000")
    me = psutil.Process()
    publisher = publisher_for(kafka)
    held = (me.num_threads(), me.num_fds())
    for number in range(5):
        publisher.topics.facts([topic])
        assert send(publisher, numbered(topic, 3)) == [None] * 3
        assert send(publisher, [Record(topic, b"k", b"x" * 20_000, [])]) != [None]
        until(lambda: (me.num_threads(), me.num_fds()) <= held, f"as little as before, refusal {number}")
        publisher.open()
        publisher.discard()
        until(lambda: (me.num_threads(), me.num_fds()) <= held, f"as little as before, discard {number}")


def test_where_the_client_did_not_tell_all_nothing_counts_as_acknowledged() -> None:
    """A record of which nothing was heard is not acknowledged where some were never told of."""
    batch = Batch()
    assert isinstance(batch._outcome(0, "orders", why="time ran out", told=False), NotSentError)
    assert batch._outcome(0, "orders", why="time ran out", told=True) is None
