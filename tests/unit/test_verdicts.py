"""What each error means for an event, held against lists sorted by hand."""

import inspect
from collections.abc import Iterator

import pytest
from kafka import errors as kafka

from outbox_tasks.errors import (
    BrokerUnavailableError,
    InvalidRecordError,
    MisconfiguredError,
    NoRouteError,
    TopicMissingError,
)
from outbox_tasks.publishing.publisher import NotSentError
from outbox_tasks.publishing.verdicts import TABLE, Verdict, describe, verdict_of

# Every class of kafka.errors, sorted by hand. When the library gets a new one, find out what the broker or the client
# means by it, put it into the table of `verdicts` if its base class decides wrongly, and then into one of these.
REFUSED = {
    "InvalidRecordError",
    "InvalidTimestampError",
    "InvalidTopicError",
    "MessageSizeTooLargeError",
    "PolicyViolationError",
    "RecordListTooLargeError",
    "UnsupportedForMessageFormatError",
}
MISCONFIGURED = {
    "InconsistentTopicIdError",
    "TopicAuthorizationFailedError",
    "UnknownTopicIdError",
    "UnknownTopicOrPartitionError",
}
UNAUTHORIZED = {
    "AuthorizationError",
    "ClusterAuthorizationFailedError",
    "DelegationTokenAuthDisabledError",
    "DelegationTokenAuthorizationFailedError",
    "DelegationTokenExpiredError",
    "DelegationTokenNotFoundError",
    "DelegationTokenOwnerMismatchError",
    "DelegationTokenRequestNotAllowedError",
    "GroupAuthorizationFailedError",
    "IllegalSaslStateError",
    "IncompatibleBrokerVersion",
    "InvalidPrincipalTypeError",
    "InvalidRequiredAcksError",
    "KafkaConfigurationError",
    "PrincipalDeserializationFailureError",
    "SaslAuthenticationFailedError",
    "SecurityDisabledError",
    "TransactionalIdAuthorizationFailedError",
    "UnacceptableCredentialError",
    "UnrecognizedBrokerVersion",
    "UnsupportedCodecError",
    "UnsupportedCompressionTypeError",
    "UnsupportedSaslMechanismError",
    "UnsupportedVersionError",
}
UNAVAILABLE = {
    "BrokerIdNotRegisteredError",
    "BrokerNotAvailableError",
    "BrokerResponseError",
    "Cancelled",
    "CommitFailedError",
    "ConcurrentTransactionsError",
    "CoordinatorLoadInProgressError",
    "CoordinatorNotAvailableError",
    "CorrelationIdError",
    "CorruptRecordError",
    "DuplicateBrokerRegistrationError",
    "DuplicateResourceError",
    "DuplicateSequenceNumberError",
    "DuplicateVoterError",
    "ElectionNotNeededError",
    "EligibleLeadersNotAvailableError",
    "FeatureUpdateFailedError",
    "FencedInstanceIdError",
    "FencedLeaderEpochError",
    "FencedMemberEpochError",
    "FencedStateEpochError",
    "FetchSessionIdNotFoundError",
    "FetchSessionTopicIdError",
    "GroupIdNotFoundError",
    "GroupMaxSizeReachedError",
    "GroupSubscribedToTopicError",
    "IllegalArgumentError",
    "IllegalGenerationError",
    "IllegalStateError",
    "InconsistentClusterIdError",
    "InconsistentGroupProtocolError",
    "InconsistentVoterSetError",
    "IneligibleReplicaError",
    "InvalidCommitOffsetSizeError",
    "InvalidConfigurationError",
    "InvalidFetchRequestError",
    "InvalidFetchSessionEpochError",
    "InvalidGroupIdError",
    "InvalidMetadataError",
    "InvalidPartitionsError",
    "InvalidProducerEpochError",
    "InvalidProducerIdMappingError",
    "InvalidReceiveError",
    "InvalidRecordStateError",
    "InvalidRegistrationError",
    "InvalidReplicationAssignmentError",
    "InvalidReplicationFactorError",
    "InvalidRequestError",
    "InvalidSessionTimeoutError",
    "InvalidShareSessionEpochError",
    "InvalidTransactionTimeoutError",
    "InvalidTxnStateError",
    "InvalidUpdateVersionError",
    "InvalidVoterKeyError",
    "KafkaConnectionError",
    "KafkaError",
    "KafkaProtocolError",
    "KafkaStorageError",
    "KafkaTimeoutError",
    "LeaderNotAvailableError",
    "ListenerNotFoundError",
    "LogDirNotFoundError",
    "LogTruncationError",
    "MemberIdRequiredError",
    "MetadataEmptyBrokerList",
    "MismatchedEndpointTypeError",
    "NetworkExceptionError",
    "NewLeaderElectedError",
    "NoError",
    "NoOffsetForPartitionError",
    "NoReassignmentInProgressError",
    "NodeNotReadyError",
    "NonEmptyGroupError",
    "NotControllerError",
    "NotCoordinatorError",
    "NotEnoughReplicasAfterAppendError",
    "NotEnoughReplicasError",
    "NotLeaderForPartitionError",
    "OffsetMetadataTooLargeError",
    "OffsetMovedToTieredStorageError",
    "OffsetNotAvailableError",
    "OffsetOutOfRangeError",
    "OperationNotAttemptedError",
    "OutOfOrderSequenceNumberError",
    "PositionOutOfRangeError",
    "PreferredLeaderNotAvailableError",
    "ProducerFencedError",
    "QuotaViolationError",
    "ReassignmentInProgressError",
    "RebalanceInProgressError",
    "RecordTooLargeError",
    "ReplicaNotAvailableError",
    "RequestTimedOutError",
    "ResourceNotFoundError",
    "RetriableError",
    "ShareSessionNotFoundError",
    "SnapshotNotFoundError",
    "StaleBrokerEpochError",
    "StaleControllerEpochError",
    "StaleMemberEpochError",
    "StaleMetadata",
    "TelemetryTooLargeError",
    "ThrottlingQuotaExceededError",
    "TooManyInFlightRequests",
    "TopicAlreadyExistsError",
    "TopicDeletionDisabledError",
    "TransactionAbortableError",
    "TransactionAbortedError",
    "TransactionCoordinatorFencedError",
    "TransactionalIdNotFoundError",
    "UnjoinedGroupException",
    "UnknownBrokerIdError",
    "UnknownControllerIdError",
    "UnknownError",
    "UnknownLeaderEpochError",
    "UnknownMemberIdError",
    "UnknownProducerIdError",
    "UnknownSubscriptionIdError",
    "UnreleasedInstanceIdError",
    "UnstableOffsetCommitError",
    "UnsupportedAssignorError",
    "UnsupportedEndpointTypeError",
    "VoterNotFoundError",
}

SORTED = {
    Verdict.REFUSED: REFUSED,
    Verdict.MISCONFIGURED: MISCONFIGURED,
    Verdict.UNAUTHORIZED: UNAUTHORIZED,
    Verdict.UNAVAILABLE: UNAVAILABLE,
}

# "Refusals of the record itself" of the design, but for the two local ones.
REFUSALS_OF_THE_DESIGN = {
    "MessageSizeTooLargeError",
    "RecordListTooLargeError",
    "InvalidTopicError",
    "InvalidRecordError",
    "InvalidTimestampError",
    "PolicyViolationError",
    "UnsupportedForMessageFormatError",
}

# "Not flagged retriable though passing" of the design, and what follows a delivery that was given up.
PASSING_THOUGH_NOT_RETRIABLE = {
    "UnknownError",
    "BrokerNotAvailableError",
    "CorruptRecordError",
    "OutOfOrderSequenceNumberError",
    "UnknownProducerIdError",
    "InvalidProducerEpochError",
}


def subclasses(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    """Yield a class and all that derive from it."""
    yield kind
    for derived in kind.__subclasses__():
        yield from subclasses(derived)


def library_errors() -> dict[str, type[BaseException]]:
    """Return every error class of the library by name; those it makes at run time are not members of its module."""
    members = {kind for _, kind in inspect.getmembers(kafka, inspect.isclass) if issubclass(kind, BaseException)}
    found = members | {kind for kind in subclasses(kafka.KafkaError) if kind.__name__ != "UnrecognizedBrokerError"}
    return {kind.__name__: kind for kind in found}


def verdict_on(kind: type[BaseException]) -> Verdict:
    """Return the verdict on a class of errors."""
    # Some cannot be made without arguments; the class alone decides.
    return verdict_of(kind.__new__(kind))


def test_every_error_of_the_library_was_sorted_by_hand() -> None:
    """A class that the library adds, or drops, makes this fail until somebody has decided what it means."""
    by_hand = [name for names in SORTED.values() for name in names]
    assert sorted(by_hand) == sorted(library_errors())


@pytest.mark.parametrize("verdict", list(Verdict))
def test_every_error_has_the_verdict_it_was_sorted_under(verdict: Verdict) -> None:
    """The table decides as the lists do."""
    found = {name for name, kind in library_errors().items() if verdict_on(kind) is verdict}
    assert found == SORTED[verdict]


def test_the_table_has_no_error_twice_with_two_verdicts() -> None:
    """No error class of the library stands in two of the lists."""
    assert sum(len(names) for names in SORTED.values()) == len(set().union(*SORTED.values()))


def test_only_the_record_itself_is_refused() -> None:
    """What costs an event an attempt is exactly what the design calls a refusal of the record itself."""
    assert REFUSED == REFUSALS_OF_THE_DESIGN
    ours = {kind for kind, verdict in TABLE.items() if verdict is Verdict.REFUSED} - set(library_errors().values())
    assert ours == {InvalidRecordError, TypeError, ValueError}


def test_what_passes_by_itself_blames_nobody() -> None:
    """Everything the client calls retriable, and what passes though it does not call it so, costs no event anything."""
    retriable = {name for name, kind in library_errors().items() if issubclass(kind, kafka.RetriableError)}
    assert retriable - MISCONFIGURED <= UNAVAILABLE
    assert PASSING_THOUGH_NOT_RETRIABLE <= UNAVAILABLE


def test_a_code_the_library_does_not_know_blames_nobody() -> None:
    """An error code of a newer broker, for which the library makes a class at run time, is nobody's fault."""
    assert verdict_of(kafka.for_code(31_999)("new")) is Verdict.UNAVAILABLE


@pytest.mark.parametrize("error", [RuntimeError("?"), AssertionError("?"), KeyError("?"), OSError(), TimeoutError()])
def test_an_error_nobody_thought_of_blames_nobody(error: BaseException) -> None:
    """What stands nowhere in the table leaves every event where it is."""
    assert verdict_of(error) is Verdict.UNAVAILABLE


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (InvalidRecordError("too large"), Verdict.REFUSED),
        (TypeError("?"), Verdict.REFUSED),
        (ValueError("?"), Verdict.REFUSED),
        (NoRouteError(event_type="a", aggregate_type="b"), Verdict.MISCONFIGURED),
        (TopicMissingError("orders"), Verdict.MISCONFIGURED),
        (MisconfiguredError("?"), Verdict.UNAUTHORIZED),
        (BrokerUnavailableError("?"), Verdict.UNAVAILABLE),
        (NotSentError("?"), Verdict.UNAVAILABLE),
    ],
)
def test_our_own_errors_have_verdicts(error: BaseException, verdict: Verdict) -> None:
    """Each error of our own on the way to Kafka has the verdict the design gives it."""
    assert verdict_of(error) is verdict


def test_a_description_says_what_kind_of_error_it_was() -> None:
    """An error of others is described by its class and words, ours by its words, and NUL never reaches PostgreSQL."""
    assert describe(ValueError("bad")) == "ValueError: bad"
    assert describe(ValueError()) == "ValueError"
    assert describe(TopicMissingError("orders")).startswith("topic 'orders' does not exist")
    assert describe(ValueError("a\0b")) == "ValueError: ab"
    assert describe(kafka.MessageSizeTooLargeError("x")).count("MessageSizeTooLargeError") == 1
