"""Events that kill whoever handles them: deaths are counted, the guilty event is found, its mates are not blamed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from uuid import UUID

import psycopg
import pytest
from support.model import (
    Actor,
    DeathError,
    Kafka,
    ModelPublisher,
    actor,
    blocked,
    keys_by_shard,
    let_leases_end,
    let_time_pass,
    opened,
    shard_of,
    state_of,
    write_event,
)

from outbox_tasks.ports import Ports
from outbox_tasks.relay.dead_letter import dead_letter
from outbox_tasks.relay.dispatch import dispatch
from outbox_tasks.relay.result import Result
from outbox_tasks.relay.retry import retry
from outbox_tasks.runtime import Runtime, StopFlag
from outbox_tasks.settings import Settings
from outbox_tasks.store import dead_letters
from outbox_tasks.store.blocked_keys import DEATHS as KEY_DEATHS
from outbox_tasks.store.connection import Connection
from outbox_tasks.store.leases import DEATHS

Loop = Callable[[Ports], object]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run was about to send, call by call, and whether it died."""

    died: bool
    asked: list[list[UUID]]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A database, a broker in memory, and an onlooker's connection."""

    eye: Connection
    kafka: Kafka
    settings: Settings

    def run(self, loop: Loop = dispatch, *, prepare: Callable[[ModelPublisher], None] = lambda _: None) -> Run:
        """Run once in a process of its own. If it dies its connection drops, and its leases end with their time."""
        with actor(self.settings, self.kafka) as process:
            prepare(process.publisher)
            died = _dies(loop, process)
        if died:
            let_leases_end(self.eye)
        return Run(died=died, asked=process.publisher.asked)

    def write(self, key: str, events: int) -> list[UUID]:
        """Commit events of a key."""
        return [write_event(self.eye, key) for _ in range(events)]

    def arrived_of(self, events: list[UUID]) -> list[UUID]:
        """Return those of some events that arrived, as they first came."""
        return [event_id for event_id in dict.fromkeys(self.kafka.arrived) if event_id in events]


def _dies(loop: Loop, process: Actor) -> bool:
    try:
        loop(process.ports())
    except DeathError:
        return True
    return False


def die() -> None:
    """Die."""
    raise DeathError


def dying(publisher: ModelPublisher) -> None:
    """Have the process die with the first batch it reads."""
    publisher.meanwhile("planning", die)


def dying_with_the_second_batch(publisher: ModelPublisher) -> None:
    """Have the process die once it has settled a batch and read another."""
    publisher.meanwhile("sent", lambda: dying(publisher))


@pytest.fixture
def scene(database_url: str) -> Iterator[Scene]:
    """Set the scene; a run takes small batches."""
    with opened(database_url) as eye:
        yield Scene(
            eye=eye, kafka=Kafka(), settings=Settings.model_validate({"database_url": database_url, "batch_size": 4})
        )


# finding the guilty


def test_a_killer_is_found_and_all_else_is_published(scene: Scene) -> None:
    """An event that kills each run that is to send it is a dead letter after four deaths, and nothing else suffers."""
    (guilty, mate), (stranger, _) = keys_by_shard(scene.eye)
    events = {key: scene.write(key, 5) for key in (guilty, mate, stranger)}
    events[mate] += scene.write(mate, 2)
    deadly = events[guilty][2]
    scene.kafka.deadly.add(deadly)
    runs = [scene.run() for _ in range(DEATHS)]
    assert all(run.died for run in runs)
    assert shard_of(scene.eye, deadly).suspect is None
    careful = scene.run()
    assert careful.died
    assert careful.asked[-1] == [deadly]
    assert shard_of(scene.eye, deadly).suspect == deadly
    after = scene.run()
    assert not after.died
    assert state_of(scene.eye, deadly) == "held"
    assert {key: entry.kind for key, entry in blocked(scene.eye).items()} == {f"good/{guilty}": "exhausted"}
    assert not scene.run(dead_letter).died
    rest = scene.run(retry)
    assert state_of(scene.eye, deadly) == "dead"
    assert not any(deadly in asked for run in (after, rest) for asked in run.asked)
    assert scene.arrived_of(events[guilty]) == [event_id for event_id in events[guilty] if event_id != deadly]
    assert scene.arrived_of(events[mate]) == events[mate]
    assert scene.arrived_of(events[stranger]) == events[stranger]
    assert blocked(scene.eye) == {}


def test_a_suspect_stands_in_the_table_before_it_is_touched(scene: Scene) -> None:
    """Published one at a time, each event is recorded as the suspect by the time it is planned."""
    ((key, _),) = keys_by_shard(scene.eye, shards=1)
    events = scene.write(key, 3)
    for _ in range(DEATHS):
        scene.run(prepare=dying)
    suspects: list[UUID | None] = []

    def prepare(publisher: ModelPublisher) -> None:
        def look() -> None:
            suspects.append(shard_of(scene.eye, events[0]).suspect)
            publisher.meanwhile("planning", look)

        publisher.meanwhile("planning", look)

    scene.run(prepare=prepare)
    assert suspects == events


@pytest.mark.parametrize("deaths", [DEATHS - 1, DEATHS])
def test_a_shard_is_published_event_by_event_after_three_takeovers(scene: Scene, deaths: int) -> None:
    """Two deaths change nothing; with the third takeover a shard's events go one at a time, and all arrive."""
    ((key, _),) = keys_by_shard(scene.eye, shards=1)
    events = scene.write(key, 4)
    assert all(scene.run(prepare=dying).died for _ in range(deaths))
    run = scene.run()
    careful = deaths == DEATHS
    assert [len(asked) for asked in run.asked] == ([1, 1, 1, 1] if careful else [4])
    assert scene.kafka.arrived == events
    assert blocked(scene.eye) == {}


def test_a_killer_in_a_sound_shard_does_not_hold_up_sound_shards(scene: Scene) -> None:
    """A run publishes the shards nobody died with first, so that one more death costs them nothing."""
    (guilty, _), (stranger, _) = keys_by_shard(scene.eye)
    (deadly,) = scene.write(guilty, 1)
    scene.kafka.deadly.add(deadly)
    for _ in range(DEATHS):
        scene.run()
    (harmless,) = scene.write(stranger, 1)
    assert scene.run().died
    assert state_of(scene.eye, harmless) == "published"


def test_what_was_published_before_a_death_is_not_accused(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """An event that was published on its own before another killed the run is never named as a killer."""
    *strangers, guilty = [keys[0] for keys in keys_by_shard(scene.eye, shards=12)]
    harmless = {key: scene.write(key, 1)[0] for key in strangers}
    scene.kafka.deadly.update(scene.write(guilty, 1))
    for _ in range(DEATHS + 1):
        assert scene.run().died
    early = {key: event_id for key, event_id in harmless.items() if state_of(scene.eye, event_id) == "published"}
    assert early, "the killer's shard came first: choose another"
    later = [event_id for key in early for event_id in scene.write(key, 1)]
    caplog.clear()
    scene.run()
    assert {state_of(scene.eye, event_id) for event_id in later} == {"published"}
    assert not [event_id for event_id in early.values() if str(event_id) in caplog.text]


# counting deaths


def test_takeovers_count_deaths_without_progress(scene: Scene) -> None:
    """Each run that takes a shard from a dead one counts one more takeover."""
    ((key, _),) = keys_by_shard(scene.eye, shards=1)
    (event,) = scene.write(key, 1)
    counted = []
    for _ in range(DEATHS):
        scene.run(prepare=dying)
        counted.append(shard_of(scene.eye, event).takeovers)
    assert counted == [0, 1, 2]


def test_progress_forgets_deaths(scene: Scene) -> None:
    """A shard that moved on since runs died with it starts to count anew."""
    ((key, _),) = keys_by_shard(scene.eye, shards=1)
    events = scene.write(key, 12)
    for _ in range(DEATHS - 1):
        scene.run(prepare=dying)
    assert scene.run(prepare=dying_with_the_second_batch).died
    assert scene.kafka.arrived == events[:4]
    assert shard_of(scene.eye, events[-1]).takeovers == 0
    for _ in range(DEATHS - 2):
        scene.run(prepare=dying)
    assert [len(asked) for asked in scene.run().asked] == [4, 4]


def test_a_clean_end_forgets_deaths(scene: Scene) -> None:
    """A run that handled a shard and gave it back, even without progress, clears it of earlier deaths."""
    ((key, _),) = keys_by_shard(scene.eye, shards=1)
    (event,) = scene.write(key, 1)
    for _ in range(DEATHS - 1):
        scene.run(prepare=dying)

    def outage(publisher: ModelPublisher) -> None:
        publisher.meanwhile("halfway", lambda: setattr(scene.kafka, "is_down", True))

    assert not scene.run(prepare=outage).died
    assert state_of(scene.eye, event) == "pending"
    assert shard_of(scene.eye, event).takeovers == 0


@pytest.mark.parametrize("end", ["time is up", "the broker is away"])
def test_deaths_are_remembered_by_a_run_that_does_not_come_to_their_shard(scene: Scene, end: str) -> None:
    """A run that ends before it handles a shard that killed leaves its count as it was, so the killer is found yet."""
    (guilty, _), (stranger, _) = keys_by_shard(scene.eye)
    (deadly,) = scene.write(guilty, 1)
    scene.kafka.deadly.add(deadly)
    for _ in range(DEATHS):
        scene.run()
    scene.write(stranger, 20)
    skipped = {"seconds": 0.0}

    def too_early(publisher: ModelPublisher) -> None:
        if end == "time is up":
            publisher.meanwhile("sent", lambda: skipped.update(seconds=scene.settings.run_seconds + 1))
        else:
            publisher.meanwhile("halfway", lambda: setattr(scene.kafka, "is_down", True))

    def short_dispatch(ports: Ports) -> None:
        dispatch(replace(ports, clock=lambda: time.monotonic() + skipped["seconds"]))

    assert not scene.run(short_dispatch, prepare=too_early).died
    scene.kafka.mend()
    assert scene.run().asked[-1] == [deadly]
    assert shard_of(scene.eye, deadly).suspect == deadly


def test_a_suspect_is_remembered_by_a_run_that_does_not_come_to_it(scene: Scene) -> None:
    """Evidence against an event outlives a run that has to stop before it can accuse it."""
    (guilty, _), (stranger, _) = keys_by_shard(scene.eye)
    (deadly,) = scene.write(guilty, 1)
    scene.kafka.deadly.add(deadly)
    for _ in range(DEATHS + 1):
        scene.run()
    assert shard_of(scene.eye, deadly).suspect == deadly
    scene.write(stranger, 1)

    def outage(publisher: ModelPublisher) -> None:
        publisher.meanwhile("halfway", lambda: setattr(scene.kafka, "is_down", True))

    assert not scene.run(prepare=outage).died
    scene.kafka.mend()
    assert not scene.run().died
    assert state_of(scene.eye, deadly) == "held"


# what is no death


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A worker's runtime, whose runs use a broker in memory."""

    runtime: Runtime
    publisher: ModelPublisher

    def run(self, owner: str, prepare: Callable[[Ports], None] = lambda _: None) -> None:
        """Run a dispatch as a task of this id; `prepare` sees its ports first."""

        def loop(ports: Ports) -> Result:
            ours = replace(ports, publisher=self.publisher)
            prepare(ours)
            return dispatch(ours)

        try:
            self.runtime.run(loop, task="outbox.dispatch", owner=owner)
        finally:
            self.publisher.renew()


@pytest.fixture
def worker(scene: Scene) -> Iterator[Worker]:
    """Open a runtime."""
    runtime = Runtime(scene.settings, stopping=StopFlag())
    yield Worker(runtime=runtime, publisher=ModelPublisher(scene.kafka))
    runtime.close()


def cutting(scene: Scene, publisher: ModelPublisher) -> Callable[[Ports], None]:
    """Return what makes the server end a run's session while it publishes."""

    def prepare(ports: Ports) -> None:
        pid = ports.connection.info.backend_pid
        publisher.meanwhile("sent", lambda: scene.eye.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,)))

    return prepare


def test_a_database_outage_is_no_death(scene: Scene, worker: Worker) -> None:
    """However often a run's connection is cut, nothing counts as a takeover, and the shard is free at the next run."""
    ((key, _),) = keys_by_shard(scene.eye, shards=1)
    events = scene.write(key, 4)
    for number in range(DEATHS + 1):
        with pytest.raises(psycopg.OperationalError):
            worker.run(f"cut-{number}", cutting(scene, worker.publisher))
    assert shard_of(scene.eye, events[0]).takeovers == 0
    worker.publisher.asked.clear()
    worker.run("last")
    assert worker.publisher.asked == [events]
    assert {state_of(scene.eye, event_id) for event_id in events} == {"published"}


def test_a_database_outage_accuses_nobody(scene: Scene, worker: Worker) -> None:
    """An event that was handled on its own when the connection was cut is not taken for a killer."""
    ((key, _),) = keys_by_shard(scene.eye, shards=1)
    (event,) = scene.write(key, 1)
    for _ in range(DEATHS):
        scene.run(prepare=dying)
    with pytest.raises(psycopg.OperationalError):
        worker.run("cut", cutting(scene, worker.publisher))
    assert shard_of(scene.eye, event).suspect == event
    worker.run("next")
    assert state_of(scene.eye, event) == "published"
    assert blocked(scene.eye) == {}


def test_any_other_error_is_a_death(scene: Scene, worker: Worker) -> None:
    """A run that breaks in any other way counts as one that died, with its shard free for the next all the same."""
    ((key, _),) = keys_by_shard(scene.eye, shards=1)
    events = scene.write(key, 4)

    def break_down() -> None:
        raise ZeroDivisionError

    for number in range(DEATHS):
        with pytest.raises(ZeroDivisionError):
            worker.run(f"broken-{number}", lambda _: worker.publisher.meanwhile("planning", break_down))
    worker.run("last")
    assert worker.publisher.asked == [[event_id] for event_id in events]


# killers among held events


def hold(scene: Scene, keys: list[str], *, events: int = 2) -> dict[str, list[UUID]]:
    """Write events of keys, have the first of each refused, and put that right: all is held and due."""
    written = {key: scene.write(key, events) for key in keys}
    scene.kafka.refused.update(ids[0] for ids in written.values())
    assert not scene.run().died
    scene.kafka.mend()
    let_time_pass(scene.eye)
    return written


def test_a_killer_among_held_events_is_found_and_its_fellows_are_not_blamed(scene: Scene) -> None:
    """Three retry runs that die with a key make its oldest event a dead letter; keys leased together are published."""
    keys = [key for shard in keys_by_shard(scene.eye, shards=3) for key in shard]
    events = hold(scene, keys)
    deadly = events[keys[3]][0]
    scene.kafka.deadly.add(deadly)
    runs = [scene.run(retry) for _ in range(KEY_DEATHS + len(keys))]
    assert sum(run.died for run in runs) == KEY_DEATHS
    assert {key: entry.kind for key, entry in blocked(scene.eye).items()} == {f"good/{keys[3]}": "exhausted"}
    assert blocked(scene.eye)[f"good/{keys[3]}"].event_id == deadly
    scene.run(dead_letter)
    scene.run(retry)
    assert state_of(scene.eye, deadly) == "dead"
    assert blocked(scene.eye) == {}
    expected = [event_id for ids in events.values() for event_id in ids if event_id != deadly]
    assert sorted(scene.kafka.arrived) == sorted(expected)


def test_a_clean_retry_forgets_deaths(scene: Scene) -> None:
    """A key that a run gave back is not blamed for deaths before that."""
    ((key, _),) = keys_by_shard(scene.eye, shards=1)
    hold(scene, [key])
    for _ in range(KEY_DEATHS - 1):
        assert scene.run(retry, prepare=dying).died

    def outage(publisher: ModelPublisher) -> None:
        publisher.meanwhile("halfway", lambda: setattr(scene.kafka, "is_down", True))

    assert not scene.run(retry, prepare=outage).died
    scene.kafka.mend()
    for _ in range(KEY_DEATHS - 1):
        assert scene.run(retry, prepare=dying).died
    assert not scene.run(retry).died
    assert blocked(scene.eye) == {}
    assert len(scene.kafka.arrived) == 2


def test_a_redriven_killer_is_found_again(scene: Scene) -> None:
    """A killer that a person puts back is a dead letter once more, and its second death is counted."""
    ((key, _),) = keys_by_shard(scene.eye, shards=1)
    deadly, follower = hold(scene, [key])[key]
    scene.kafka.deadly.add(deadly)
    for _ in range(2):
        for _ in range(KEY_DEATHS):
            assert scene.run(retry).died
        assert not scene.run(retry).died
        scene.run(dead_letter)
        assert state_of(scene.eye, deadly) == "dead"
        dead_letters.redrive(scene.eye, [deadly], reason="try once more")
        assert state_of(scene.eye, deadly) == "held"
    row = scene.eye.execute("SELECT deaths FROM outbox_dead_letter WHERE event_id = %s", (deadly,)).fetchone()
    assert row == (2,)
    assert state_of(scene.eye, follower) == "held"


def test_a_key_goes_on_waiting_for_its_dead_letter_though_a_follower_kills(scene: Scene) -> None:
    """Under `block`, giving up a follower that killed does not let the key pass the dead letter it waits for."""
    blocking = scene.settings.model_copy(update={"retry_attempts": 1, "dead_letter_policy": "block"})
    scene = replace(scene, settings=blocking)
    ((key, _),) = keys_by_shard(scene.eye, shards=1)
    first, second = scene.write(key, 2)
    scene.kafka.refused.add(first)
    scene.run()
    scene.run(dead_letter)
    assert (state_of(scene.eye, first), state_of(scene.eye, second)) == ("dead", "held")
    third = scene.write(key, 1)[0]
    for _ in range(DEATHS + 1):
        assert scene.run(prepare=dying).died
    scene.kafka.mend()
    scene.run()
    scene.run(dead_letter)
    if state_of(scene.eye, third) == "dead":
        dead_letters.discard(scene.eye, [third], reason="it kills")
    scene.run(retry)
    assert state_of(scene.eye, second) == "held"
    dead_letters.redrive(scene.eye, [first], reason="put right")
    scene.run(retry)
    assert scene.kafka.arrived[:2] == [first, second]


def test_a_key_that_holds_nothing_is_not_given_up(scene: Scene) -> None:
    """Under `block`, runs that die with a key after its last event was discarded do not leave it blocked for good."""
    blocking = scene.settings.model_copy(update={"retry_attempts": 1, "dead_letter_policy": "block"})
    scene = replace(scene, settings=blocking)
    ((key, _),) = keys_by_shard(scene.eye, shards=1)
    (bad,) = scene.write(key, 1)
    scene.kafka.refused.add(bad)
    scene.run()
    scene.run(dead_letter)
    dead_letters.discard(scene.eye, [bad], reason="no use")
    for _ in range(KEY_DEATHS):
        scene.run(retry, prepare=dying)
    scene.run(retry)
    scene.run(dead_letter)
    (later,) = scene.write(key, 1)
    for loop in (dispatch, retry):
        scene.run(loop)
    assert state_of(scene.eye, later) == "published"
    assert blocked(scene.eye) == {}
