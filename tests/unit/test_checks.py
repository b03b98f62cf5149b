"""What is found out before anything is sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatchBuilder

from outbox_tasks.errors import InvalidRecordError
from outbox_tasks.publishing.checks import check
from outbox_tasks.publishing.publisher import Limits, Record, TopicFacts

ROOMY = Limits(max_request_bytes=1_048_576, compressed=False)
FACTS = TopicFacts(partitions=8, max_message_bytes=1_048_588, compacted=False)


def of(value: bytes | None = b"x", key: bytes | None = b"k", headers: list[tuple[str, bytes]] | None = None) -> Record:
    """Return a record."""
    return Record("orders", key, value, headers or [])


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Make records of all sizes."""
    headers = draw(st.lists(st.tuples(st.text(max_size=40), st.binary(max_size=300)), max_size=8))
    return of(draw(st.binary(max_size=3000)), draw(st.binary(min_size=1, max_size=300)), headers)


@given(record=records())
def test_what_passes_is_no_larger_than_kafka_will_find_it(record: Record) -> None:
    """A record that passes a limit is within it as the client encodes it, in a batch of its own."""
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=0, is_transactional=False, producer_id=1, producer_epoch=0, base_sequence=0,
        batch_size=1_000_000,
    )  # fmt: skip
    builder.append(0, 1_700_000_000_000, record.key, record.value, record.headers)
    encoded = len(builder.build())
    too_small = TopicFacts(partitions=1, max_message_bytes=encoded - 1, compacted=False)
    with pytest.raises(InvalidRecordError, match=r"max\.message\.bytes of topic 'orders'"):
        check(record, too_small, ROOMY)
    estimate = DefaultRecordBatchBuilder.estimate_size_in_bytes(record.key, record.value, record.headers)
    with pytest.raises(InvalidRecordError, match="max_request_size"):
        check(record, FACTS, Limits(max_request_bytes=estimate - 1, compressed=False))


@given(record=records())
def test_what_fits_with_room_to_spare_passes(record: Record) -> None:
    """A record is not refused for more than a small allowance over its plain size."""
    room = record.size + 200 + 10 * len(record.headers)
    facts = TopicFacts(partitions=1, max_message_bytes=room, compacted=False)
    assert check(record, facts, Limits(max_request_bytes=room, compressed=False)) is record


def test_a_compressing_producer_leaves_the_topics_limit_to_the_broker() -> None:
    """Where records are compressed only the broker can tell whether one fits its topic."""
    small = TopicFacts(partitions=1, max_message_bytes=100, compacted=False)
    record = of(b"x" * 1000)
    assert check(record, small, Limits(max_request_bytes=1_048_576, compressed=True)) is record


def test_a_limit_that_is_not_known_refuses_nothing() -> None:
    """Where the broker does not tell its limits it alone judges."""
    record = of(b"x" * 1_000_000, key=None)
    assert check(record, TopicFacts(partitions=1), ROOMY) is record


def test_a_compacted_topic_takes_no_record_without_a_key() -> None:
    """A record without a key does not go to a compacted topic; one with a key does."""
    compacted = TopicFacts(partitions=1, max_message_bytes=None, compacted=True)
    with pytest.raises(InvalidRecordError, match="'orders' is compacted"):
        check(of(key=None), compacted, ROOMY)
    assert check(of(key=b""), compacted, ROOMY).key == b""


def test_a_tombstone_needs_a_key() -> None:
    """A tombstone without a key is refused; with one it passes."""
    with pytest.raises(InvalidRecordError, match="tombstone"):
        check(of(None, key=None), FACTS, ROOMY)
    assert check(of(None), FACTS, ROOMY).value is None
