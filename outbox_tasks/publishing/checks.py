"""Finds out, before anything is sent, what Kafka would refuse."""

from outbox_tasks.errors import InvalidRecordError
from outbox_tasks.publishing.publisher import Limits, Record, TopicFacts

BATCH_OVERHEAD = 61
"""Bytes of a record batch's own header (Kafka protocol, message format version 2)."""

RECORD_OVERHEAD = 32
"""Upper bound of a record's lengths, deltas and attributes, headers apart (the same source)."""

HEADER_OVERHEAD = 10
"""Upper bound of the two lengths of a header (the same source)."""


def check(record: Record, facts: TopicFacts, limits: Limits) -> Record:
    """Return the record if it can be sent to its topic.

    Raises:
        InvalidRecordError: it cannot. A compressed record may fit where its plain size does not: there only the
            broker can tell.
    """
    size = record.size + BATCH_OVERHEAD + RECORD_OVERHEAD + HEADER_OVERHEAD * len(record.headers)
    _check_size(size, limits.max_request_bytes, f"the producer's {limits.named} (set it in outbox_kafka)")
    if facts.max_message_bytes is not None and not limits.compressed:
        _check_size(size, facts.max_message_bytes, f"max.message.bytes of topic {record.topic!r}")
    if record.key is None and facts.compacted:
        raise InvalidRecordError(f"topic {record.topic!r} is compacted and takes no record without a key: give a key")
    if record.key is None and record.value is None:
        raise InvalidRecordError("a tombstone without a key deletes nothing: give the event a partition key")
    return record


def _check_size(size: int, limit: int, name: str) -> None:
    if size > limit:
        raise InvalidRecordError(f"the record is about {size} bytes, over {limit}, {name}: raise it, or send less")
