"""What each error on the way to Kafka means for an event: the one table that decides."""

from enum import StrEnum

from kafka import errors as kafka

from outbox_tasks.errors import (
    BrokerUnavailableError,
    InvalidRecordError,
    MisconfiguredError,
    NoRouteError,
    TopicAilingError,
    TopicMissingError,
)
from outbox_tasks.publishing.publisher import NotSentError


class Verdict(StrEnum):
    """What follows from an error."""

    REFUSED = "refused"
    """This record will not do: it costs its event an attempt and blocks its key."""

    MISCONFIGURED = "misconfigured"
    """Its topic will not do: no attempt, its key is blocked and tried again after a long wait."""

    UNAUTHORIZED = "unauthorized"
    """This client will not do, whatever it sends: nothing is touched, everything waits, loudly."""

    UNAVAILABLE = "unavailable"
    """Nobody's fault: nothing is touched, everything waits."""


# Sources: "proto" is the error table of the Kafka protocol guide (https://kafka.apache.org/protocol#protocol_error_codes),
# "java" the retriable and fatal errors of the Java producer's documentation, "seen" an experiment (docs/decisions.md).
_REFUSED: tuple[type[BaseException], ...] = (
    InvalidRecordError,  # our own check before sending
    kafka.MessageSizeTooLargeError,  # proto 10; seen
    kafka.RecordListTooLargeError,  # proto 18
    kafka.InvalidTopicError,  # proto 17: a name that no topic may have
    kafka.InvalidRecordError,  # proto 87; seen for a null key on a compacted topic
    kafka.InvalidTimestampError,  # proto 32
    kafka.PolicyViolationError,  # proto 44
    kafka.UnsupportedForMessageFormatError,  # proto 43
    TypeError,  # kafka-python, of what it cannot serialize
    ValueError,  # kafka-python, of a name or a record it will not take
)

_MISCONFIGURED: tuple[type[BaseException], ...] = (
    NoRouteError,  # our own routes
    TopicMissingError,  # our own look at the topic
    TopicAilingError,  # likewise
    kafka.UnknownTopicOrPartitionError,  # proto 3: retried by the client until the delivery timeout
    kafka.UnknownTopicIdError,  # proto 100: the topic was made anew
    kafka.InconsistentTopicIdError,  # proto 103, likewise
    kafka.TopicAuthorizationFailedError,  # proto 29
)

_UNAUTHORIZED: tuple[type[BaseException], ...] = (
    MisconfiguredError,
    kafka.AuthorizationError,
    kafka.ClusterAuthorizationFailedError,  # proto 31: no idempotent writes
    kafka.TransactionalIdAuthorizationFailedError,  # proto 53
    kafka.GroupAuthorizationFailedError,  # proto 30
    kafka.DelegationTokenAuthorizationFailedError,  # proto 65
    kafka.DelegationTokenAuthDisabledError,  # proto 61
    kafka.DelegationTokenExpiredError,  # proto 66
    kafka.DelegationTokenNotFoundError,  # proto 62
    kafka.DelegationTokenOwnerMismatchError,  # proto 63
    kafka.DelegationTokenRequestNotAllowedError,  # proto 64
    kafka.IllegalSaslStateError,  # proto 34
    kafka.InvalidPrincipalTypeError,  # proto 67
    kafka.InvalidRequiredAcksError,  # proto 21
    kafka.PrincipalDeserializationFailureError,  # proto 97
    kafka.SaslAuthenticationFailedError,  # proto 58
    kafka.SecurityDisabledError,  # proto 54
    kafka.UnacceptableCredentialError,  # proto 93
    kafka.UnsupportedSaslMechanismError,  # proto 33
    kafka.KafkaConfigurationError,  # kafka-python, of settings that contradict
    kafka.UnrecognizedBrokerVersion,  # kafka-python
    kafka.UnsupportedCodecError,  # kafka-python, of a compression it has no library for
    kafka.UnsupportedCompressionTypeError,  # proto 76
    kafka.UnsupportedVersionError,  # proto 35
    kafka.IncompatibleBrokerVersion,  # kafka-python
)

_UNAVAILABLE: tuple[type[BaseException], ...] = (
    BrokerUnavailableError,
    NotSentError,
    OSError,  # the network itself
    kafka.RetriableError,  # everything the client would try again itself, timeouts among them
    kafka.UnknownError,  # proto -1, and codes this client does not know
    kafka.BrokerNotAvailableError,  # proto 8; not flagged retriable, though passing
    kafka.CorruptRecordError,  # proto 2: damaged on the way; likewise
    kafka.OutOfOrderSequenceNumberError,  # proto 45: this producer is spent; likewise
    kafka.UnknownProducerIdError,  # proto 59; likewise
    kafka.InvalidProducerEpochError,  # proto 47; likewise
    kafka.InvalidProducerIdMappingError,  # proto 49; likewise
    kafka.ProducerFencedError,  # proto 90; likewise
    kafka.DuplicateSequenceNumberError,  # proto 46; likewise
    kafka.IllegalStateError,  # kafka-python, of a producer closed under our hands
    kafka.KafkaProtocolError,  # kafka-python, of an answer it cannot read
    kafka.InvalidReceiveError,  # kafka-python, likewise
    kafka.StaleControllerEpochError,  # proto 11: a controller is being replaced
    kafka.StaleBrokerEpochError,  # proto 77
    kafka.LogDirNotFoundError,  # proto 57: a disk of the broker
    kafka.ReassignmentInProgressError,  # proto 60
    kafka.NewLeaderElectedError,  # proto 108
    kafka.QuotaViolationError,  # kafka-python, of its own metrics
    kafka.UnknownBrokerIdError,  # kafka-python, of stale metadata
    kafka.InvalidRequestError,  # proto 42: of a whole request, so no one record can be blamed
)

# Answers to requests a producer without transactions never makes. They blame nobody.
_NOT_OURS = (
    kafka.KafkaError,
    kafka.BrokerResponseError,
)

TABLE: dict[type[BaseException], Verdict] = {
    **dict.fromkeys(_NOT_OURS, Verdict.UNAVAILABLE),
    **dict.fromkeys(_UNAVAILABLE, Verdict.UNAVAILABLE),
    **dict.fromkeys(_UNAUTHORIZED, Verdict.UNAUTHORIZED),
    **dict.fromkeys(_MISCONFIGURED, Verdict.MISCONFIGURED),
    **dict.fromkeys(_REFUSED, Verdict.REFUSED),
}


def verdict_of(error: BaseException) -> Verdict:
    """Return the verdict of the nearest class of the error that the table knows.

    An error of no class there blames nobody: it is `UNAVAILABLE`.
    """
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), Verdict.UNAVAILABLE)


def describe(error: BaseException) -> str:
    """Return what to tell a person of an error: its class, where it is not ours, and its words."""
    silent = isinstance(error, kafka.BrokerResponseError) and not any(error.args)
    text = str(getattr(error, "description", "") if silent else error).replace("\0", "").strip()
    name = type(error).__name__
    ours = type(error).__module__.startswith("outbox_tasks")
    return text if ours or name in text else f"{name}: {text}".removesuffix(": ")
