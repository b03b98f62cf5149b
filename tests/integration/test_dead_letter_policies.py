"""Dead letters: what becomes of a key whose event was given up on, and of the copy that tells of it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal
from uuid import UUID, uuid4

import psycopg
import pytest
from support.consuming import consume_all
from support.judging import event_id_of
from support.misfortune import Draft, put
from support.relaying import Row, assert_consistent, execute, relay, relay_settings, rows
from support.workers import Deployment

from outbox_tasks.ports import Ports
from outbox_tasks.relay.dead_letter import dead_letter
from outbox_tasks.relay.dispatch import dispatch
from outbox_tasks.relay.retry import retry
from outbox_tasks.settings import Settings
from outbox_tasks.store import dead_letters
from outbox_tasks.testing.services import Broker

LIMIT = 5_000
"""Bytes a topic takes until somebody puts that right."""
BAD = 3
"""Number of the event that is too big, of five of its key."""


@dataclass(frozen=True)
class Place:
    """A database, a broker, and a topic that takes no big records yet."""

    settings: Settings
    broker: Broker
    topic: str
    scratch: Path

    @property
    def database_url(self) -> str:
        """The database of this test."""
        return self.settings.database_url

    def but(self, **changes: object) -> "Place":
        """Return this place with some settings changed."""
        return replace(self, settings=Settings.model_validate(self.settings.model_dump() | changes))

    def rows(self, query: str, *parameters: object) -> list[Row]:
        """Return what a query finds."""
        return rows(self.database_url, query, *parameters)

    def states(self) -> dict[int, str]:
        """Return where each event of the key stands, by its number."""
        query = "SELECT (payload->>'sequence')::int AS number, state FROM outbox WHERE topic = %s ORDER BY id"
        return {row["number"]: row["state"] for row in self.rows(query, self.topic)}

    def arrived(self) -> list[int]:
        """Return the numbers of the events on the topic, in the order they came in, repetitions included."""
        records = consume_all(self.broker.bootstrap_servers, self.topic)
        return [json.loads(record.value or b"{}")["sequence"] for record in records]

    def repair(self) -> None:
        """Make the topic take big records."""
        self.broker.alter_topic(self.topic, {"max.message.bytes": "1000000"})

    def outbox(self, *arguments: str) -> str:
        """Run a command of the CLI as a person does; returns what it printed."""
        deployment = Deployment(
            database_url=self.database_url,
            bootstrap_servers=self.broker.bootstrap_servers,
            redis_url="redis://127.0.0.1:1/0",  # these commands need no Redis
            scratch=self.scratch,
        )
        done = deployment.run("outbox", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def place(database_url: str, broker: Broker, tmp_path: Path) -> Place:
    """Give up an event at its first refusal, and ask for a topic's limits every time."""
    topic = f"topic-{uuid4().hex}"
    broker.create_topic(topic, config={"max.message.bytes": str(LIMIT)})
    settings = relay_settings(database_url, broker, retry_attempts=1, topic_facts_seconds=0.001)
    return Place(settings, broker, topic, tmp_path)


@pytest.fixture(autouse=True)
def consistent_at_the_end(database_url: str) -> Iterator[None]:
    """Look, after every test, that what must always hold does: no event is held without a blocked key, say."""
    yield
    assert_consistent(database_url)


def write_five(place: Place) -> list[UUID]:
    """Write five events of one key, of which the third is too big; returns their ids."""
    drafts = [Draft("key-1", number, 2 * LIMIT if number == BAD else 0) for number in range(1, 6)]
    return [event.event_id for event in put(place.database_url, place.topic, drafts)]


def work(ports: Ports, *, rounds: int = 3) -> None:
    """Run each of the tasks a few times, as ticks would."""
    for _ in range(rounds):
        dispatch(ports)
        retry(ports)
        dead_letter(ports)


def give_up(place: Place) -> UUID:
    """Write five events and work until the bad one is a dead letter; returns its id."""
    bad = write_five(place)[BAD - 1]
    with relay(place.settings) as ports:
        work(ports)
    assert place.rows("SELECT event_id, resolution FROM outbox_dead_letter WHERE sent_to = %s", place.topic) == [
        {"event_id": bad, "resolution": None}
    ]
    return bad


def work_and_write(place: Place) -> None:
    """Write one more event of the key, and work."""
    put(place.database_url, place.topic, [Draft("key-1", 6)])
    with relay(place.settings) as ports:
        work(ports)


def test_skip_lets_followers_go_on(place: Place) -> None:
    """Under `skip` the events behind a dead letter are published without it, and so are later ones."""
    place = place.but(dead_letter_policy="skip")
    give_up(place)
    work_and_write(place)
    assert place.states() == {1: "published", 2: "published", 4: "published", 5: "published", 6: "published"}
    assert place.arrived() == [1, 2, 4, 5, 6]
    assert place.rows("SELECT FROM outbox_blocked_key") == []


def test_block_makes_followers_wait(place: Place) -> None:
    """Under `block` the events behind a dead letter wait, and later ones with them, though the cause is put right."""
    place = place.but(dead_letter_policy="block")
    give_up(place)
    place.repair()
    work_and_write(place)
    assert place.states() == {1: "published", 2: "published", 4: "held", 5: "held", 6: "held"}
    assert place.arrived() == [1, 2]
    assert [row["kind"] for row in place.rows("SELECT kind FROM outbox_blocked_key")] == ["dead"]


def test_redrive_under_block(place: Place) -> None:
    """Under `block` a redrive publishes the dead letter in its old place, before the events that waited behind it."""
    place = place.but(dead_letter_policy="block")
    bad = give_up(place)
    place.repair()
    told = place.outbox("dead-letters", "redrive", "--id", str(bad), "--reason", "the topic takes it now")
    assert "put back: 1" in told
    work_and_write(place)
    assert set(place.states().values()) == {"published"}
    assert place.arrived() == [1, 2, 3, 4, 5, 6]
    ids = {event_id_of(record) for record in consume_all(place.broker.bootstrap_servers, place.topic)}
    assert bad in ids
    assert place.rows("SELECT resolution, resolved_reason FROM outbox_dead_letter") == [
        {"resolution": "redriven", "resolved_reason": "the topic takes it now"}
    ]
    assert place.rows("SELECT FROM outbox_blocked_key") == []


def test_a_redrive_in_vain(place: Place) -> None:
    """A dead letter redriven before its cause is put right dies once more, and its followers go on waiting."""
    place = place.but(dead_letter_policy="block")
    bad = give_up(place)
    with relay(place.settings) as ports:
        assert dead_letters.redrive(ports.connection, [bad], reason="hope") == 1
    work_and_write(place)
    assert place.rows("SELECT event_id, deaths, resolution FROM outbox_dead_letter") == [
        {"event_id": bad, "deaths": 2, "resolution": None}
    ]
    assert place.states() == {1: "published", 2: "published", 4: "held", 5: "held", 6: "held"}
    assert place.arrived() == [1, 2]


def test_discard_under_block(place: Place) -> None:
    """Under `block` a discard lets the followers go on; the dead letter is kept, with the reason, unpublished."""
    place = place.but(dead_letter_policy="block")
    bad = give_up(place)
    told = place.outbox("dead-letters", "discard", "--id", str(bad), "--reason", "a test order")
    assert "discarded: 1" in told
    place.repair()
    work_and_write(place)
    assert place.states() == {1: "published", 2: "published", 4: "published", 5: "published", 6: "published"}
    assert place.arrived() == [1, 2, 4, 5, 6]
    assert place.rows("SELECT event_id, resolution, resolved_reason FROM outbox_dead_letter") == [
        {"event_id": bad, "resolution": "discarded", "resolved_reason": "a test order"}
    ]
    assert place.rows("SELECT FROM outbox_blocked_key") == []


@pytest.mark.parametrize("policy", ["skip", "block"])
def test_dead_letter_topic(place: Place, policy: Literal["skip", "block"]) -> None:
    """The dead-letter topic gets a copy of a dead letter whose headers tell topic, key, error, attempts and times."""
    graveyard = f"graveyard-{uuid4().hex}"
    place.broker.create_topic(graveyard)
    place = place.but(dead_letter_topic=graveyard, dead_letter_policy=policy)
    bad = give_up(place)
    (copy,) = consume_all(place.broker.bootstrap_servers, graveyard)
    (letter,) = place.rows("SELECT * FROM outbox_dead_letter")
    told = {name: value.decode() for name, value in copy.headers.items() if name.startswith("dead_letter_")}
    times = [datetime.fromisoformat(told.pop(f"dead_letter_{name}_at")) for name in ("created", "died")]
    assert told == {
        "dead_letter_event_id": str(bad),
        "dead_letter_topic": place.topic,
        "dead_letter_key": "key-1",
        "dead_letter_error": letter["error"],
        "dead_letter_attempts": "1",
    }
    assert times[0] == letter["created_at"]
    assert abs((times[1] - letter["died_at"]).total_seconds()) < 1
    assert "max.message.bytes" in letter["error"]
    assert copy.key == b"key-1"
    assert json.loads(copy.value or b"") == {"key": "key-1", "sequence": BAD}
    assert copy.headers["padding"] == b"x" * 2 * LIMIT
    assert event_id_of(copy) != bad


def test_a_dead_letter_topic_that_refuses(place: Place) -> None:
    """A dead-letter topic that refuses the copy does not feed itself: the copy dies in its turn, and leaves no copy."""
    graveyard = f"graveyard-{uuid4().hex}"
    place.broker.create_topic(graveyard, config={"max.message.bytes": str(LIMIT)})
    place = place.but(dead_letter_topic=graveyard)
    bad = give_up(place)
    with relay(place.settings) as ports:
        work(ports)
        work(ports)
    letters = place.rows("SELECT event_id, sent_to FROM outbox_dead_letter ORDER BY id")
    assert [letter["sent_to"] for letter in letters] == [place.topic, graveyard]
    assert letters[0]["event_id"] == bad
    assert place.rows("SELECT FROM outbox WHERE topic = %s OR state <> 'published'", graveyard) == []
    assert place.rows("SELECT FROM outbox_blocked_key") == []
    assert consume_all(place.broker.bootstrap_servers, graveyard) == []


def test_copy_and_move_are_one(place: Place) -> None:
    """Where the copy for the dead-letter topic cannot be written the event stays where it was, to be moved later."""
    graveyard = f"graveyard-{uuid4().hex}"
    place.broker.create_topic(graveyard)
    place = place.but(dead_letter_topic=graveyard)
    write_five(place)
    execute(place.database_url, f"ALTER TABLE outbox ADD CONSTRAINT full_up CHECK (topic <> '{graveyard}')")
    with relay(place.settings) as ports:
        dispatch(ports)
        before = place.rows("SELECT * FROM outbox ORDER BY id"), place.rows("SELECT * FROM outbox_blocked_key")
        with pytest.raises(psycopg.errors.CheckViolation):
            dead_letter(ports)
        after = place.rows("SELECT * FROM outbox ORDER BY id"), place.rows("SELECT * FROM outbox_blocked_key")
        assert after == before
        assert place.rows("SELECT FROM outbox_dead_letter") == []
        execute(place.database_url, "ALTER TABLE outbox DROP CONSTRAINT full_up")
        work(ports)
    assert len(place.rows("SELECT FROM outbox_dead_letter")) == 1
    assert len(consume_all(place.broker.bootstrap_servers, graveyard)) == 1
