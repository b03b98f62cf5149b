"""What librdkafka's errors are called in kafka-python, so that one table of verdicts decides for both clients."""

from confluent_kafka import KafkaError
from kafka import errors as kafka

from outbox_tasks.publishing.publisher import NotSentError

# By the names of rdkafka.h (rd_kafka_resp_err_t), whose comments are quoted where they decide. Those above zero are the
# broker's own codes, the same for every client; these are librdkafka's, below zero.
LOCAL: dict[str, type[BaseException]] = {
    # "Purged in queue", "Purged in flight": by us, once something else had failed
    "_PURGE_QUEUE": NotSentError,
    "_PURGE_INFLIGHT": NotSentError,
    # The time ran out, or there was no room
    "_MSG_TIMED_OUT": kafka.KafkaTimeoutError,  # "Produced message timed out"
    "_TIMED_OUT": kafka.KafkaTimeoutError,  # "Operation timed out"
    "_TIMED_OUT_QUEUE": kafka.KafkaTimeoutError,  # "Timed out while waiting in queue"
    "_QUEUE_FULL": kafka.KafkaTimeoutError,  # "Queue is full"
    "_WAIT_COORD": kafka.KafkaTimeoutError,  # "Waiting for coordinator"
    "_WAIT_CACHE": kafka.KafkaTimeoutError,  # "Wait for cache"
    # The network
    "_TRANSPORT": kafka.KafkaConnectionError,  # "Broker transport failure"
    "_ALL_BROKERS_DOWN": kafka.KafkaConnectionError,
    "_RESOLVE": kafka.KafkaConnectionError,  # "Failed to resolve host"
    "_SSL": kafka.KafkaConnectionError,  # "SSL error"; certificates that are refused are told when opening
    "_NODE_UPDATE": kafka.KafkaConnectionError,  # "Broker node update"
    "_UNKNOWN_BROKER": kafka.KafkaConnectionError,
    "_DESTROY_BROKER": kafka.KafkaConnectionError,
    # This client
    "_AUTHENTICATION": kafka.SaslAuthenticationFailedError,
    "_UNSUPPORTED_FEATURE": kafka.UnsupportedVersionError,  # "not supported by the broker"
    "_UNKNOWN_PROTOCOL": kafka.UnsupportedVersionError,
    "_NOT_CONFIGURED": kafka.KafkaConfigurationError,  # "Functionality not configured"
    "_NOT_IMPLEMENTED": kafka.KafkaConfigurationError,  # "Not implemented", as a codec it was built without
    # This topic
    "_UNKNOWN_TOPIC": kafka.UnknownTopicOrPartitionError,  # "Permanent: Topic does not exist in cluster"
    "_UNKNOWN_PARTITION": kafka.UnknownTopicOrPartitionError,  # "Permanent: Partition does not exist in cluster"
    "_ISR_INSUFF": kafka.NotEnoughReplicasError,  # "Insufficient ISR count"
    # This record: only what the client does not even take is called so
    "_INVALID_ARG": ValueError,  # "Invalid argument or configuration"
    # This producer is spent
    "_FATAL": kafka.IllegalStateError,  # "Fatal error"
    "_GAPLESS_GUARANTEE": kafka.IllegalStateError,  # "Gap-less ordering would not be guaranteed if proceeding"
    "_STATE": kafka.IllegalStateError,  # "Erroneous state"
    "_INCONSISTENT": kafka.IllegalStateError,  # "Inconsistent state or data"
    "_DESTROY": kafka.IllegalStateError,  # "Broker is going away"
    "_FENCED": kafka.ProducerFencedError,
    # Damaged on the way
    "_BAD_MSG": kafka.CorruptRecordError,  # "Received message is incorrect"
    "_BAD_COMPRESSION": kafka.CorruptRecordError,
    "_UNDERFLOW": kafka.KafkaProtocolError,  # "Buffer underflow"
    # This machine
    "_CRIT_SYS_RESOURCE": OSError,
    "_FS": OSError,
    "_INTR": OSError,
    # Of consumers, of an admin's requests, or within the client: they blame nobody
    **dict.fromkeys(
        (
            "_APPLICATION", "_ASSIGNMENT_LOST", "_ASSIGN_PARTITIONS", "_AUTO_OFFSET_RESET", "_CONFLICT",
            "_EXISTING_SUBSCRIPTION", "_FAIL", "_INVALID_DIFFERENT_RECORD", "_INVALID_TYPE", "_IN_PROGRESS",
            "_KEY_DESERIALIZATION", "_KEY_SERIALIZATION", "_LOG_TRUNCATION", "_MAX_POLL_EXCEEDED", "_NOENT", "_NOOP",
            "_NO_OFFSET", "_OUTDATED", "_PARTIAL", "_PARTITION_EOF", "_PREV_IN_PROGRESS", "_READ_ONLY", "_RETRY",
            "_REVOKE_PARTITIONS", "_UNKNOWN_GROUP", "_VALUE_DESERIALIZATION", "_VALUE_SERIALIZATION",
        ),
        kafka.KafkaError,
    ),
}  # fmt: skip
"""librdkafka's own errors, by name."""


def error_of(error: KafkaError, *, topic: str | None = None) -> BaseException:
    """Return an error as kafka-python would have raised it, about a topic or in general.

    One that is not known is a plain `kafka.KafkaError`.
    """
    local = error.name().startswith("_")
    kind: type[BaseException] = LOCAL.get(error.name(), kafka.KafkaError) if local else kafka.for_code(error.code())
    return kind(error.str() if topic is None else f"topic {topic!r}: {error.str()}")
