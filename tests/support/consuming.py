"""The consumer's view: a topic read back whole, to be compared with what was meant to be in it."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic

from kafka import KafkaConsumer, TopicPartition


@dataclass(frozen=True, kw_only=True)
class ConsumedRecord:
    """One record as a consumer sees it; a `value` of None is a tombstone."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes]
    timestamp_ms: int


def consume_all(
    bootstrap_servers: str, topic: str, *, timeout: timedelta = timedelta(seconds=30)
) -> list[ConsumedRecord]:
    """Read at least all that is in the topic at the time of the call; sorted by partition and offset.

    Raises:
        LookupError: there is no such topic.
        TimeoutError: the end was not reached in time.
    """
    deadline = monotonic() + timeout.total_seconds()
    # No group: groups take tens of seconds to form on Tansu, and nobody shares the reading.
    with closing(KafkaConsumer(bootstrap_servers=bootstrap_servers, enable_auto_commit=False)) as consumer:
        ends = _rewind(consumer, topic)
        records: list[ConsumedRecord] = []
        while behind := [part.partition for part, end in ends.items() if consumer.position(part) < end]:
            if monotonic() > deadline:
                raise TimeoutError(f"{topic}: not at the end of partitions {behind} after {timeout}")
            records += _poll(consumer, wait=timedelta(milliseconds=200))
        records += _fetched_already(consumer)
    return sorted(records, key=lambda record: (record.partition, record.offset))


def payloads(records: Iterable[ConsumedRecord]) -> dict[str, list[int]]:
    """Return the numbers of each key as they came, of payloads that have a `key` and a `number`."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for record in records:
        payload = json.loads(record.value or b"null")
        found[payload["key"]].append(payload["number"])
    return dict(found)


def _rewind(consumer: KafkaConsumer, topic: str) -> dict[TopicPartition, int]:
    partitions = [TopicPartition(topic, number) for number in sorted(consumer.partitions_for_topic(topic) or ())]
    if not partitions:
        raise LookupError(f"topic {topic!r} does not exist")
    consumer.assign(partitions)
    consumer.seek_to_beginning(*partitions)
    return dict(consumer.end_offsets(partitions))


def _fetched_already(consumer: KafkaConsumer) -> list[ConsumedRecord]:
    """Take the rest of the last batch, whose first record is the end that Tansu reports."""
    records: list[ConsumedRecord] = []
    while more := _poll(consumer, wait=timedelta(0)):
        records += more
    return records


def _poll(consumer: KafkaConsumer, *, wait: timedelta) -> list[ConsumedRecord]:
    return [
        ConsumedRecord(
            partition=record.partition,
            offset=record.offset,
            key=record.key,
            value=record.value,
            headers=dict(record.headers),
            timestamp_ms=record.timestamp,
        )
        for batch in consumer.poll(timeout_ms=wait // timedelta(milliseconds=1)).values()
        for record in batch
    ]
