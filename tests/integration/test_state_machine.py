"""Whatever happens in whatever order, an event is in exactly one place, in order, and arrives: a state machine."""

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.model import (
    Actor,
    DeathError,
    Kafka,
    Moment,
    actor,
    keys_by_shard,
    let_leases_end,
    let_time_pass,
    opened,
    state_of,
    write_event,
)

from outbox_tasks.ports import Ports
from outbox_tasks.relay.dead_letter import dead_letter
from outbox_tasks.relay.dispatch import dispatch
from outbox_tasks.relay.redrive import redrive as redrive_run
from outbox_tasks.relay.retry import retry
from outbox_tasks.settings import Settings
from outbox_tasks.store import dead_letters, leases
from outbox_tasks.store.connection import Connection
from outbox_tasks.store.dead_letters import Filter

EXPLORE = os.environ.get("TEST_EXPLORE") == "1"
"""Look for new counter-examples, at random and for long, and make them small, instead of going the same ways."""

SETTINGS = settings(
    derandomize=not EXPLORE,
    database=None,
    max_examples=1500 if EXPLORE else 100,
    phases=[Phase.generate, Phase.shrink] if EXPLORE else [Phase.generate],
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

MOMENTS: tuple[Moment, ...] = ("planning", "halfway", "sent")
ACTIONS = ("die", "lose machine", "take over", "retry", "bury", "redrive", "discard", "append", "break", "put right")
PLANS = st.dictionaries(
    st.sampled_from(MOMENTS), st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=2), max_size=2
)
"""What happens while a run is at work, and when."""

KEYS = st.sampled_from([0, 0, 0, 1, 2, 3])
"""Whose events: mostly one key's, since order is a matter of one key."""

ROUNDS = 40
"""Far more rounds of all tasks than any backlog of an example needs."""

SMALL: dict[str, Any] = {"batch_size": 1, "shards_per_run": 64, "retry_attempts": 2}
SLOW: dict[str, Any] = {
    "retry_base_seconds": 1e6,
    "retry_max_seconds": 1e6,
    "misconfigured_seconds": 1e6,
    "lease_seconds": 1e6,
}
"""Nothing comes to its time by itself: a replay must find what the first try found."""

CLEAN = """
DELETE FROM outbox;
DELETE FROM outbox_blocked_key;
DELETE FROM outbox_dead_letter;
UPDATE outbox_shard SET lease_token = NULL, lease_owner = NULL, leased_until = NULL, takeovers = 0, suspect = NULL
"""
PLACES = """
SELECT event_id, state, ordering_key, attempts FROM outbox
 UNION ALL
SELECT event_id, coalesce(resolution, 'dead'), ordering_key, attempts FROM outbox_dead_letter
 WHERE resolution IS DISTINCT FROM 'redriven'
"""
BLOCKED = "SELECT ordering_key, kind, event_id, retry_at IS NOT NULL FROM outbox_blocked_key"


@dataclass(frozen=True, kw_only=True)
class World:
    """What all examples share: the connections of two processes and of an onlooker, the broker, and four keys.

    Two keys go to topic `good`, and share a shard; one goes to topic `shaky`; one has a topic only by a route.
    """

    eye: Connection
    one: Actor
    other: Actor
    kafka: Kafka
    keys: Sequence[tuple[str | None, str]]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an event was found."""

    state: str
    ordering_key: str
    attempts: int


class Outbox(RuleBasedStateMachine):
    """Writers, tasks, people, accidents and repairs, one after the other and in the midst of each other."""

    def __init__(self, world: World, policy: str) -> None:
        super().__init__()
        self.world = world
        self.policy = policy
        self.committed: dict[UUID, int] = {}
        self.ever_refused: set[UUID] = set()
        self.ever_dead: set[UUID] = set()
        self.has_died = False
        self.has_route = True
        world.eye.execute(CLEAN)
        world.kafka.mend()
        world.kafka.arrived.clear()

    # writers

    @initialize(keys=st.lists(KEYS, min_size=1, max_size=8))
    def begin(self, keys: list[int]) -> None:
        """Start with something to do."""
        for key in keys:
            self._append(key)

    @rule(key=KEYS, events=st.integers(1, 5))
    def append(self, key: int, events: int) -> None:
        """Commit events of a key."""
        for _ in range(events):
            self._append(key)

    @rule(key=KEYS, held=st.integers(0, 2), pending=st.integers(1, 3), plan=PLANS)
    def append_bad_one(self, key: int, held: int, pending: int, plan: Mapping[Moment, list[str]]) -> None:
        """Commit an event that the broker refuses and some behind it; once its key is blocked, dispatch some more."""
        bad = self._append(key)
        self.world.kafka.refused.add(bad)
        self.ever_refused.add(bad)
        self.append(key, held)
        self._run(dispatch, {})
        self.append(key, pending)
        self._run(dispatch, plan)

    # tasks

    @rule(plan=PLANS)
    def run_dispatch(self, plan: Mapping[Moment, list[str]]) -> None:
        """Run a dispatch, with whatever happens meanwhile."""
        self._run(dispatch, plan)

    @rule(plan=PLANS)
    def run_retry(self, plan: Mapping[Moment, list[str]]) -> None:
        """Run a retry, with whatever happens meanwhile."""
        self._run(retry, plan)

    @rule(task=st.sampled_from([dispatch, retry]), times=st.integers(2, 5), moment=st.sampled_from(MOMENTS))
    def crash_loop(self, task: Callable[[Ports], object], times: int, moment: Moment) -> None:
        """Have runs die, one after the other."""
        for _ in range(times):
            self._run(task, {moment: ["die"]})

    @rule()
    def run_dead_letter(self) -> None:
        """Make dead letters of what is exhausted."""
        dead_letter(self._ports(self.world.one))

    @rule()
    def time_passes(self) -> None:
        """Let every wait and every lease be over."""
        let_leases_end(self.world.eye)
        let_time_pass(self.world.eye)

    # people

    @precondition(lambda self: self._open_letters())
    @rule(which=st.integers(0, 9))
    def redrive(self, which: int) -> None:
        """Put one dead letter back."""
        letters = self._open_letters()
        wanted = Filter(ids=[letters[which % len(letters)]])
        redrive_run(self._ports(self.world.one), wanted=wanted, reason="put right")

    @precondition(lambda self: self._open_letters())
    @rule(which=st.integers(0, 9))
    def discard(self, which: int) -> None:
        """Give one dead letter up."""
        letters = self._open_letters()
        dead_letters.discard(self.world.eye, [letters[which % len(letters)]], reason="no use")

    # accidents and repairs

    @precondition(lambda self: self._unpublished())
    @rule(which=st.integers(0, 29))
    def refuse(self, which: int) -> None:
        """Have the broker refuse an event from now on that it has not got."""
        candidates = self._unpublished()
        event_id = candidates[which % len(candidates)]
        self.world.kafka.refused.add(event_id)
        self.ever_refused.add(event_id)

    @rule(trouble=st.sampled_from(["missing", "forbidden", "no route"]))
    def go_wrong(self, trouble: str) -> None:
        """Have a topic vanish or be forbidden, or a route be forgotten, until it is put right."""
        match trouble:
            case "missing":
                self.world.kafka.missing.add("shaky")
            case "forbidden":
                self.world.kafka.forbidden.add("shaky")
            case _:
                self.has_route = False

    @rule()
    def outage(self) -> None:
        """Run everything while the broker is down."""
        for task in (dispatch, retry):
            self.world.kafka.is_down = True
            self._run(task, {})

    @rule()
    def mend(self) -> None:
        """Put all of that right."""
        self.world.kafka.mend()
        self.has_route = True

    # what must hold

    @invariant()
    def every_event_is_in_one_place(self) -> None:
        """Nothing is lost, nothing is in two places, nothing came from nowhere."""
        rows = self.world.eye.execute(PLACES).fetchall()
        assert sorted(row[0] for row in rows) == sorted(self.committed)

    @invariant()
    def what_is_called_published_arrived(self) -> None:
        """Only what reached the topic is marked published."""
        published = {event_id for event_id, place in self._places().items() if place.state == "published"}
        assert published <= set(self.world.kafka.arrived)

    @invariant()
    def order_holds(self) -> None:
        """First occurrences of a key come in the order of writing; under `skip`, those that were never dead letters."""
        self.ever_dead.update(row[0] for row in self.world.eye.execute("SELECT event_id FROM outbox_dead_letter"))
        exempt = self.ever_dead if self.policy == "skip" else set()
        came: defaultdict[int, list[UUID]] = defaultdict(list)
        for event_id in dict.fromkeys(self.world.kafka.arrived):
            if event_id not in exempt:
                came[self.committed[event_id]].append(event_id)
        places = {event_id: place for place, event_id in enumerate(self.committed)}
        for events in came.values():
            assert events == sorted(events, key=places.__getitem__)

    @invariant()
    def blocked_keys_make_sense(self) -> None:
        """No event is held without a blocked key, and what each blocked key waits for can come to pass."""
        places = self._places()
        blocked = {row[0]: row[1:] for row in self.world.eye.execute(BLOCKED)}
        assert {place.ordering_key for place in places.values() if place.state == "held"} <= blocked.keys()
        for key, (kind, event_id, has_time) in blocked.items():
            assert has_time == (kind in ("refused", "misconfigured"))
            if kind == "exhausted":
                assert places[event_id].state == "held"
            if kind == "dead":
                assert self.policy == "block"
                assert (places[event_id].state, places[event_id].ordering_key) == ("dead", key)
        if self.policy == "block":
            waiting = {place.ordering_key for place in places.values() if place.state == "dead"}
            assert waiting <= {key for key, (kind, _, _) in blocked.items() if kind in ("exhausted", "dead")}

    @invariant()
    def only_the_guilty_pay(self) -> None:
        """Outages, missing topics and lost routes spend no attempt and make no dead letter."""
        if self.has_died:
            return
        places = self._places().items()
        paid = {event_id for event_id, place in places if place.attempts or place.state in ("dead", "discarded")}
        assert paid <= self.ever_refused

    def teardown(self) -> None:
        """Once all is put right, everything that was not given up is published and no key is blocked."""
        self.mend()
        for _ in range(ROUNDS):
            if not self._unpublished():
                break
            self.time_passes()
            for task in (dispatch, retry, dead_letter):
                task(self._ports(self.world.one))
            dead_letters.redrive(self.world.eye, self._open_letters(), reason="the end")
            self.order_holds()
            self.blocked_keys_make_sense()
        self.time_passes()
        retry(self._ports(self.world.one))
        self.every_event_is_in_one_place()
        self.what_is_called_published_arrived()
        assert self._unpublished() == []
        assert self.world.eye.execute(BLOCKED).fetchall() == []

    # how it is done

    def _append(self, key: int) -> UUID:
        topic, name = self.world.keys[key]
        event_id = write_event(self.world.eye, name, topic=topic)
        self.committed[event_id] = key
        return event_id

    def _ports(self, who: Actor) -> Ports:
        return who.ports(routes={"order": "routed"} if self.has_route else {}, dead_letter_policy=self.policy)

    def _run(self, task: Callable[[Ports], object], plan: Mapping[Moment, list[str]]) -> None:
        publisher, ports = self.world.one.publisher, self._ports(self.world.one)
        for moment in MOMENTS:
            publisher.meanwhile(moment, partial(self._happen, plan.get(moment, []), ports))
        with suppress(DeathError):
            task(ports)
        publisher.renew()
        self.world.kafka.is_down = False

    def _happen(self, actions: Sequence[str], ports: Ports) -> None:
        for action in actions:
            self._do(action, ports)

    def _do(self, action: str, ports: Ports) -> None:  # noqa: C901 - one line an action
        match action:
            case "die":
                leases.expire(self.world.eye, owner=ports.owner)
                self._die()
            case "lose machine":
                self._die()
            case "take over":
                self._take_over()
            case "retry":
                let_time_pass(self.world.eye)
                retry(self._ports(self.world.other))
            case "bury":
                dead_letter(self._ports(self.world.other))
            case "redrive":
                dead_letters.redrive(self.world.eye, self._open_letters(), reason="all")
            case "discard":
                dead_letters.discard(self.world.eye, self._open_letters(), reason="all")
            case "append":
                self.append(0, 2)
            case "break":
                self.world.kafka.is_down = True
            case "put right":
                self.mend()
                let_time_pass(self.world.eye)
                retry(self._ports(self.world.other))

    def _die(self) -> None:
        self.has_died = True
        raise DeathError

    def _take_over(self) -> None:
        """Let another process have everything; this one sends nothing any more, as its lease's end approaches."""
        self.has_died = True
        self.world.one.publisher.late = True
        let_leases_end(self.world.eye)
        let_time_pass(self.world.eye)
        dispatch(self._ports(self.world.other))
        retry(self._ports(self.world.other))

    def _places(self) -> dict[UUID, Place]:
        rows = self.world.eye.execute(PLACES).fetchall()
        return {row[0]: Place(state=row[1], ordering_key=row[2], attempts=row[3]) for row in rows}

    def _open_letters(self) -> list[UUID]:
        return dead_letters.select(self.world.eye, Filter())

    def _unpublished(self) -> list[UUID]:
        places = self._places()
        return [event_id for event_id in self.committed if places[event_id].state in ("pending", "held", "dead")]


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    """Open the connections all examples share."""
    ours = Settings.model_validate({"database_url": database_url, **SMALL, **SLOW})
    kafka = Kafka()
    with opened(database_url) as eye, actor(ours, kafka) as one, actor(ours, kafka) as other:
        ((first, second),) = keys_by_shard(eye, shards=1)
        keys = [("good", first), ("good", second), ("shaky", "third"), (None, "fourth")]
        yield World(eye=eye, one=one, other=other, kafka=kafka, keys=keys)


@pytest.mark.parametrize("policy", ["block", "skip"])
def test_every_event_is_in_one_place_and_arrives_in_order(
    world: World, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Through refusals, outages, deaths, lost leases and people, an event is in one place, in order, and never lost."""
    caplog.set_level(logging.CRITICAL)
    make: Any = partial(Outbox, world, policy)  # any maker will do, though it is typed as a class
    run_state_machine_as_test(make, settings=SETTINGS)


def test_nothing_overtakes_an_event_whose_key_was_freed_meanwhile(world: World) -> None:
    """An event read while its key was blocked, and left pending since it is blocked no more, goes before later ones."""
    first = write_event(world.eye, world.keys[0][1])
    world.kafka.refused.add(first)
    dispatch(world.one.ports())
    later = [write_event(world.eye, world.keys[0][1]) for _ in range(4)]

    def free_the_key() -> None:
        world.kafka.mend()
        let_time_pass(world.eye)
        retry(world.other.ports())
        assert state_of(world.eye, first) == "published"

    world.one.publisher.meanwhile("planning", free_the_key)
    dispatch(world.one.ports())
    assert world.kafka.arrived == [first, *later]
