"""What librdkafka's errors mean for an event: the same table decides, and every code was sorted by hand."""

import pytest
from confluent_kafka import KafkaError
from kafka import errors as kafka

from outbox_tasks.publishing.confluent_errors import LOCAL, error_of
from outbox_tasks.publishing.publisher import NotSentError
from outbox_tasks.publishing.verdicts import Verdict, describe, verdict_of

# librdkafka's own errors whose verdict is more than "nobody's fault", sorted by hand.
SORTED = {
    "_INVALID_ARG": Verdict.REFUSED,
    "_UNKNOWN_TOPIC": Verdict.MISCONFIGURED,
    "_UNKNOWN_PARTITION": Verdict.MISCONFIGURED,
    "_AUTHENTICATION": Verdict.UNAUTHORIZED,
    "_NOT_CONFIGURED": Verdict.UNAUTHORIZED,
    "_NOT_IMPLEMENTED": Verdict.UNAUTHORIZED,
    "_UNKNOWN_PROTOCOL": Verdict.UNAUTHORIZED,
    "_UNSUPPORTED_FEATURE": Verdict.UNAUTHORIZED,
}

CODES = {
    name: code
    for name in dir(KafkaError)
    if name.strip("_").isupper() and isinstance(code := getattr(KafkaError, name), int)
}
"""Every error code the library knows."""

BROKERS = sorted(code for name, code in CODES.items() if not name.startswith("_") and code)
OURS = sorted(name for name in CODES if name.startswith("_"))


def test_every_error_of_the_library_was_sorted_by_hand() -> None:
    """A code that the library adds makes this fail until somebody has decided what it means."""
    assert len(CODES) > 150
    assert set(OURS) <= LOCAL.keys()


@pytest.mark.parametrize("name", OURS)
def test_librdkafkas_own_errors_have_the_verdict_they_were_sorted_under(name: str) -> None:
    """Of librdkafka's own errors only those sorted by hand blame anybody."""
    error = error_of(KafkaError(CODES[name]), topic="orders")
    assert verdict_of(error) is SORTED.get(name, Verdict.UNAVAILABLE)
    assert "'orders'" in describe(error)


@pytest.mark.parametrize("code", BROKERS)
def test_both_clients_give_a_brokers_error_the_same_verdict(code: int) -> None:
    """A code of the broker becomes the very class that kafka-python makes of it."""
    error = error_of(KafkaError(code))
    theirs = kafka.for_code(code)("")
    assert verdict_of(error) is verdict_of(theirs)
    assert type(error).__name__ == type(theirs).__name__


@pytest.mark.parametrize("code", [31_999, -999])
def test_a_code_nobody_knows_blames_nobody(code: int) -> None:
    """An error code of a newer broker, or of a newer library, is nobody's fault."""
    assert verdict_of(error_of(KafkaError(code))) is Verdict.UNAVAILABLE


@pytest.mark.parametrize("name", ["_PURGE_QUEUE", "_PURGE_INFLIGHT"])
def test_what_we_took_back_ourselves_was_not_sent(name: str) -> None:
    """A record purged after another failed is left alone, like those that the client was not given."""
    assert isinstance(error_of(KafkaError(CODES[name])), NotSentError)
