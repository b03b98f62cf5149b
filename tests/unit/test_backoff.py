"""When a refused event is tried again."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.relaying import an_event, dice, ports_without_database, relay_settings

from outbox_tasks.errors import InvalidRecordError, NoRouteError, TopicMissingError
from outbox_tasks.ports import Ports
from outbox_tasks.publishing.kafka_python import KafkaPythonPublisher
from outbox_tasks.relay.backoff import full_jitter, settlement_of
from outbox_tasks.relay.publish import Fate

SETTINGS = relay_settings(
    "dbname=nowhere",
    routes={"order": "orders"},
    retry_base_seconds=2,
    retry_max_seconds=60,
    retry_attempts=5,
    misconfigured_seconds=33,
)


class Highest(random.Random):
    """Chance that always gives the most it may."""

    def uniform(self, a: float, b: float) -> float:
        """Return the upper bound."""
        assert a == 0
        return b


def ports() -> Ports:
    """Return what a settlement is made with, chance always giving the longest wait."""
    publisher = KafkaPythonPublisher(SETTINGS, clock=lambda: 0.0)
    return replace(ports_without_database(SETTINGS, publisher), chance=Highest())


@given(
    attempts=st.integers(min_value=0, max_value=100_000),
    base=st.floats(min_value=0.001, max_value=1000),
    most=st.floats(min_value=0.001, max_value=100_000),
    seed=st.integers(),
)
def test_full_jitter_stays_within_its_bounds(attempts: int, base: float, most: float, seed: int) -> None:
    """However often an event was refused, its wait is between nothing and the cap."""
    chance = dice(seed)
    wait = full_jitter(attempts=attempts, base_seconds=base, max_seconds=most, chance=chance)
    assert 0 <= wait <= min(most, base * 2.0 ** min(attempts, 64))


def test_the_upper_bound_doubles_up_to_the_cap() -> None:
    """The longest wait is the base, doubled with each earlier refusal, and never more than the cap."""
    waits = [full_jitter(attempts=attempts, base_seconds=2, max_seconds=60, chance=Highest()) for attempts in range(8)]
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60]


def test_waits_are_spread_over_the_whole_range() -> None:
    """Full jitter means the whole range from zero: keys refused together do not come back together."""
    chance = dice(1)
    waits = [full_jitter(attempts=3, base_seconds=1, max_seconds=60, chance=chance) for _ in range(1000)]
    assert min(waits) < 0.8
    assert max(waits) > 7.2
    assert sum(waits) / 1000 == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize(("attempts", "kind", "wait"), [(0, "refused", 2), (3, "refused", 16), (4, "exhausted", 32)])
def test_a_refusal_waits_by_its_attempts_and_the_last_one_exhausts(attempts: int, kind: str, wait: float) -> None:
    """A refused event waits longer each time, and is exhausted by the refusal that uses up its attempts."""
    event = an_event(attempts=attempts)
    (refusal,) = settlement_of(Fate(failed={"order/1": (event, InvalidRecordError("too large"))}), ports()).refused
    assert (refusal.event, refusal.kind, refusal.retry_seconds) == (event, kind, wait)
    assert (refusal.topic, refusal.reason) == ("orders", "too large")


@pytest.mark.parametrize("error", [TopicMissingError("orders"), NoRouteError(event_type="a", aggregate_type="b")])
def test_a_misconfigured_topic_waits_long_and_never_exhausts(error: Exception) -> None:
    """What is not the event's fault waits as long as is set for it, however many attempts were spent before."""
    (refusal,) = settlement_of(Fate(failed={"order/1": (an_event(attempts=99), error)}), ports()).refused
    assert (refusal.kind, refusal.retry_seconds) == ("misconfigured", 33)


def test_what_was_published_and_what_follows_is_passed_on() -> None:
    """A settlement has every published event and every follower of the batch's fate."""
    first, second = an_event(id=1), an_event(id=2)
    settlement = settlement_of(Fate(published=[first], followers=[second]), ports())
    assert (list(settlement.published), list(settlement.followers), list(settlement.refused)) == ([first], [second], [])
