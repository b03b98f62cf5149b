"""What people do: look at blocked keys and dead letters, try again, put back, give up; by command and by task."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result
from support.model import Actor, Kafka, actor, blocked, opened, state_of, write_event
from support.workers import Deployment

from outbox_tasks import worker
from outbox_tasks.celery import create_app
from outbox_tasks.cli import outbox
from outbox_tasks.errors import InvalidFilterError
from outbox_tasks.relay.dead_letter import dead_letter
from outbox_tasks.relay.dispatch import dispatch
from outbox_tasks.relay.redrive import STEP
from outbox_tasks.relay.retry import retry
from outbox_tasks.settings import Settings
from outbox_tasks.store.connection import Connection

HOUR = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class Desk:
    """Where a person sits: an app, its database, and a relay with a broker in memory."""

    app: Celery
    eye: Connection
    kafka: Kafka
    relay: Actor

    def run(self, *arguments: object) -> Result:
        """Run an `outbox` command."""
        context = CLIContext(app=self.app, no_color=True, workdir=None)
        return CliRunner().invoke(outbox, [str(argument) for argument in arguments], obj=context)

    def read(self, *arguments: object) -> Any:
        """Run an `outbox` command that prints JSON."""
        result = self.run(*arguments)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def listed(self, *filters: object) -> set[UUID]:
        """Return the dead letters a filter finds."""
        return {UUID(letter["event_id"]) for letter in self.read("dead-letters", "list", *filters, "--json")}

    def redrive_task(self, **arguments: object) -> Any:
        """Run the task `outbox.redrive`, here and now."""
        return self.app.tasks["outbox.redrive"].apply(kwargs=arguments, throw=True).get()

    def block(self, key: str, *, topic: str = "good", events: int = 1) -> list[UUID]:
        """Commit events of a key the first of which is refused."""
        written = [write_event(self.eye, key, topic=topic) for _ in range(events)]
        self.kafka.refused.add(written[0])
        dispatch(self.relay.ports())
        return written

    def bury(self, key: str, *, topic: str = "good", events: int = 1) -> list[UUID]:
        """Commit events of a key the first of which becomes a dead letter the key waits for."""
        written = [write_event(self.eye, key, topic=topic) for _ in range(events)]
        self.kafka.refused.add(written[0])
        dispatch(self.relay.ports(retry_attempts=1))
        dead_letter(self.relay.ports(dead_letter_policy="block"))
        assert state_of(self.eye, written[0]) == "dead"
        return written

    def set_letter(self, event_id: UUID, *, died_at: datetime | None = None, error: str | None = None) -> None:
        """Have a dead letter died at another time, or of another error."""
        self.eye.execute(
            "UPDATE outbox_dead_letter SET died_at = coalesce(%s, died_at), error = coalesce(%s, error)"
            " WHERE event_id = %s",
            (died_at, error, event_id),
        )

    def decided(self, event_id: UUID) -> tuple[Any, ...]:
        """Return what was decided on a dead letter, and why."""
        row = self.eye.execute(
            "SELECT resolution, resolved_reason, resolved_at IS NOT NULL FROM outbox_dead_letter WHERE event_id = %s",
            (event_id,),
        ).fetchone()
        assert row is not None
        return row


@pytest.fixture
def desk(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """Open a desk whose app is configured by the environment."""
    monkeypatch.setenv("OUTBOX_DATABASE_URL", database_url)
    app, kafka = create_app(tmp_path), Kafka()
    with opened(database_url) as eye, actor(Settings.model_validate({"database_url": database_url}), kafka) as relay:
        yield Desk(app=app, eye=eye, kafka=kafka, relay=relay)
    worker.runtimes_of(app).close()


# blocked keys


def test_blocked_lists_what_waits_and_why(desk: Desk) -> None:
    """`outbox blocked --json` has for each blocked key why, because of which event, how many wait, and until when."""
    (first, *_), _ = desk.block("a", events=3), desk.block("b")
    found = {entry["ordering_key"]: entry for entry in desk.read("blocked", "--json")}
    assert found.keys() == {"good/a", "good/b"}
    entry = found["good/a"]
    assert (entry["kind"], entry["held"], entry["event_id"], entry["topic"]) == ("refused", 3, str(first), "good")
    assert "refuses this event" in entry["reason"]
    assert datetime.fromisoformat(entry["retry_at"]).tzinfo is not None


def test_blocked_can_be_asked_for_one_key(desk: Desk) -> None:
    """`outbox blocked --key` shows that key alone."""
    desk.block("a")
    desk.block("b")
    assert [entry["ordering_key"] for entry in desk.read("blocked", "--key", "good/b", "--json")] == ["good/b"]
    assert desk.read("blocked", "--key", "good/c", "--json") == []


def test_blocked_reads_well_with_nothing_blocked(desk: Desk) -> None:
    """Without a blocked key `outbox blocked` says so, and with `--json` is an empty list."""
    assert desk.run("blocked").stdout == "no key is blocked\n"
    assert desk.read("blocked", "--json") == []


@pytest.mark.parametrize("key", ["a", "[bold]a[/bold]", "odd [/x] key"])
def test_tables_show_keys_as_they_are(desk: Desk, key: str) -> None:
    """A table shows the whole key, whatever is in it, and the whole event id, so that both can be copied."""
    (event_id,) = desk.block(key)
    result = desk.run("blocked")
    assert result.exit_code == 0, result.output
    assert f"good/{key}" in result.stdout
    assert str(event_id) in result.stdout


def test_retry_makes_a_key_due(desk: Desk) -> None:
    """`outbox retry KEY` has the next retry run publish a key that would have waited longer."""
    (event_id,) = desk.block("a")
    desk.eye.execute("UPDATE outbox_blocked_key SET retry_at = clock_timestamp() + interval '1 hour'")
    desk.kafka.mend()
    retry(desk.relay.ports())
    assert state_of(desk.eye, event_id) == "held"
    assert desk.run("retry", "good/a").exit_code == 0
    retry(desk.relay.ports())
    assert state_of(desk.eye, event_id) == "published"


def test_retry_of_a_key_that_is_not_blocked_says_so(desk: Desk) -> None:
    """`outbox retry` of a key that is not blocked is an error that tells where to look."""
    result = desk.run("retry", "good/a")
    assert result.exit_code == 1
    assert "'good/a' is not blocked" in result.output
    assert "outbox blocked" in result.output


def test_retry_of_a_key_that_waits_for_a_decision_names_the_dead_letter(desk: Desk) -> None:
    """`outbox retry` of a key that waits for a person is an error that names the dead letter to decide on."""
    dead, _ = desk.bury("a", events=2)
    result = desk.run("retry", "good/a")
    assert result.exit_code == 1
    assert str(dead) in result.output
    assert "redrive or discard" in result.output
    assert blocked(desk.eye)["good/a"].kind == "dead"


# dead letters: which


@pytest.fixture
def letters(desk: Desk) -> dict[str, UUID]:
    """Make three dead letters that differ in everything."""
    made = {name: desk.bury(f"key-{name}", topic=f"topic-{name}")[0] for name in ("old", "mid", "new")}
    now = datetime.now(UTC)
    for hours, (name, event_id) in zip((30, 20, 10), made.items(), strict=True):
        desk.set_letter(event_id, died_at=now - hours * HOUR, error=f"Broken: The {name} one is 100% bad")
    return made


def filters(letters: dict[str, UUID], *, apart: str = "mid") -> dict[str, tuple[list[str], dict[str, object]]]:
    """Return, by name, filters that mean one letter: as options, and as a task's arguments."""
    now = datetime.now(UTC)
    since, until = now - 25 * HOUR, now - 15 * HOUR
    moments = [time.strftime("%Y-%m-%dT%H:%M:%S") for time in (since, until)]
    return {
        "id": (["--id", str(letters[apart])], {"ids": [str(letters[apart])]}),
        "key": (["--key", f"key-{apart}"], {"key": f"key-{apart}"}),
        "ordering key": (["--key", f"topic-{apart}/key-{apart}"], {"key": f"topic-{apart}/key-{apart}"}),
        "topic": (["--topic", f"topic-{apart}"], {"topic": f"topic-{apart}"}),
        "error": (["--error", f"the {apart.upper()} one"], {"error": f"the {apart.upper()} one"}),
        "time": (
            ["--since", moments[0], "--until", moments[1]],
            {"since": since.isoformat(), "until": until.isoformat()},
        ),
    }


FILTERS = ["id", "key", "ordering key", "topic", "error", "time"]


@pytest.mark.parametrize("by", FILTERS)
@pytest.mark.parametrize("decision", ["redrive", "discard"])
def test_a_decision_concerns_what_the_filter_means(
    desk: Desk, letters: dict[str, UUID], by: str, decision: str
) -> None:
    """List, redrive and discard take the same filters, and leave alone what these do not mean."""
    options, _ = filters(letters)[by]
    assert desk.listed(*options) == {letters["mid"]}
    result = desk.run("dead-letters", decision, *options, "--reason", "seen to")
    assert result.exit_code == 0, result.output
    resolution = {"redrive": "redriven", "discard": "discarded"}[decision]
    assert desk.decided(letters["mid"]) == (resolution, "seen to", True)
    assert state_of(desk.eye, letters["mid"]) == {"redrive": "held", "discard": "discarded"}[decision]
    assert desk.listed() == {letters["old"], letters["new"]}


@pytest.mark.parametrize("by", FILTERS)
def test_the_task_takes_the_same_filters(desk: Desk, letters: dict[str, UUID], by: str) -> None:
    """`outbox.redrive`, called from Flower, puts back what its filters mean, and keeps the reason."""
    _, arguments = filters(letters)[by]
    assert desk.redrive_task(reason="by task", **arguments) == {"redriven": 1}
    assert desk.decided(letters["mid"]) == ("redriven", "by task", True)
    assert desk.listed() == {letters["old"], letters["new"]}


def test_ids_may_be_several(desk: Desk, letters: dict[str, UUID]) -> None:
    """`--id` given twice means both; with another filter, those of them that it means too."""
    both = ["--id", letters["old"], "--id", letters["new"]]
    assert desk.listed(*both) == {letters["old"], letters["new"]}
    assert desk.listed(*both, "--topic", "topic-new") == {letters["new"]}


def test_until_is_exclusive_and_since_inclusive(desk: Desk, letters: dict[str, UUID]) -> None:
    """A letter that died at the very moment is meant by `--since` and not by `--until`."""
    desk.set_letter(letters["old"], died_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    desk.eye.execute("ALTER DATABASE " + str(desk.eye.info.dbname) + " SET timezone = 'Asia/Tokyo'")
    assert letters["old"] in desk.listed("--since", "2026-01-02 03:04:05")
    assert letters["old"] not in desk.listed("--until", "2026-01-02 03:04:05")
    assert desk.listed("--until", "2026-01-02 03:04:06") == {letters["old"]}


def test_times_without_a_zone_mean_utc_for_the_task_too(desk: Desk, letters: dict[str, UUID]) -> None:
    """A task's `until` without a zone is UTC, as the command's is, whatever zone the database has."""
    desk.set_letter(letters["old"], died_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    desk.eye.execute("ALTER DATABASE " + str(desk.eye.info.dbname) + " SET timezone = 'Asia/Tokyo'")
    assert desk.redrive_task(reason="old", until="2026-01-02T03:04:06") == {"redriven": 1}
    assert desk.decided(letters["old"])[0] == "redriven"


def test_times_can_be_copied_from_the_list(desk: Desk, letters: dict[str, UUID]) -> None:
    """The time a list shows can be given back as `--since`."""
    shown = {letter["event_id"]: letter["died_at"] for letter in desk.read("dead-letters", "list", "--json")}
    assert desk.listed("--since", shown[str(letters["mid"])]) == {letters["mid"], letters["new"]}


@pytest.mark.parametrize("decision", ["redrive", "discard"])
def test_nobody_decides_on_everything_by_accident(desk: Desk, letters: dict[str, UUID], decision: str) -> None:
    """A decision without any filter is refused, and so is one whose error text is empty."""
    for nothing in ([], ["--error", ""]):
        result = desk.run("dead-letters", decision, "--reason", "oops", *nothing)
        assert result.exit_code != 0, result.output
        assert "--error" in result.output
    assert desk.listed() == set(letters.values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"colour": "red"},
        {"ids": ["no-id"]},
        {"ids": "0190a5a5-0000-7000-8000-000000000000"},
        {"since": "yesterday"},
        {},
    ],
)
def test_a_task_with_a_wrong_filter_fails(desk: Desk, letters: dict[str, UUID], wrong: dict[str, object]) -> None:
    """An unknown filter, a value of the wrong kind, or no filter at all is an error, and nothing is put back."""
    with pytest.raises(InvalidFilterError, match="which events"):
        desk.redrive_task(reason="oops", **wrong)
    assert desk.listed() == set(letters.values())


@pytest.mark.parametrize(
    "arguments",
    [
        ["dead-letters", "redrive", "--id", "no-id", "--reason", "r"],
        ["dead-letters", "show", "no-id"],
        ["dead-letters", "list", "--since", "yesterday"],
        ["dead-letters", "redrive", "--key", "a"],
        ["dead-letters", "discard", "--key", "a"],
        ["retry"],
    ],
)
def test_wrong_usage_is_told(desk: Desk, arguments: list[str]) -> None:
    """An id that is none, a time that is none, or a missing reason or key is an error of usage."""
    result = desk.run(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.output


# dead letters: what is done


@pytest.mark.parametrize("decision", ["redrive", "discard"])
def test_a_dry_run_changes_nothing(desk: Desk, letters: dict[str, UUID], decision: str) -> None:
    """`--dry-run` lists what is meant, and changes nothing."""
    before = desk.eye.execute("SELECT * FROM outbox_dead_letter ORDER BY id").fetchall()
    result = desk.run("dead-letters", decision, "--topic", "topic-mid", "--reason", "r", "--dry-run")
    assert result.exit_code == 0
    assert "topic-mid" in result.stdout.replace("\n", "")
    assert "topic-old" not in result.stdout
    assert desk.eye.execute("SELECT * FROM outbox_dead_letter ORDER BY id").fetchall() == before
    assert state_of(desk.eye, letters["mid"]) == "dead"


def test_show_has_everything(desk: Desk, letters: dict[str, UUID]) -> None:
    """`dead-letters show` prints the letter with payload, error and times as JSON, and says if there is none."""
    shown = desk.read("dead-letters", "show", letters["mid"])
    assert shown["event_id"] == str(letters["mid"])
    assert (shown["payload"], shown["sent_to"], shown["attempts"]) == ({}, "topic-mid", 1)
    unknown = uuid4()
    result = desk.run("dead-letters", "show", unknown)
    assert result.exit_code == 1
    assert str(unknown) in result.output


def test_list_reads_well(desk: Desk, letters: dict[str, UUID]) -> None:
    """The table of dead letters shows each with its whole id; without any, a sentence says so."""
    result = desk.run("dead-letters", "list")
    assert all(str(event_id) in result.stdout for event_id in letters.values())
    assert desk.run("dead-letters", "list", "--key", "nobody").stdout == "no dead letters\n"


def test_redriven_events_go_before_those_that_waited(desk: Desk) -> None:
    """After `redrive` the same event is published first, then those that waited behind it."""
    events = desk.bury("a", events=3)
    desk.kafka.mend()
    assert desk.run("dead-letters", "redrive", "--id", events[0], "--reason", "mended").exit_code == 0
    retry(desk.relay.ports())
    assert desk.kafka.arrived == events


def test_discarded_events_are_kept_and_their_keys_go_on(desk: Desk) -> None:
    """After `discard` those that waited are published; the event itself never is, and stays to be looked at."""
    dead, *others = desk.bury("a", events=3)
    desk.kafka.mend()
    assert desk.run("dead-letters", "discard", "--id", dead, "--reason", "no use").exit_code == 0
    retry(desk.relay.ports())
    assert desk.kafka.arrived == others
    assert desk.read("dead-letters", "show", dead)["resolved_reason"] == "no use"
    assert desk.run("dead-letters", "redrive", "--id", dead, "--reason", "changed my mind").exit_code == 0
    assert desk.decided(dead)[0] == "discarded"


def test_many_go_in_steps(desk: Desk) -> None:
    """Many are put back in transactions of one key each, 500 at a step, all of them, and counted."""
    many = 2 * STEP + 10
    desk.eye.execute(
        "INSERT INTO outbox_dead_letter (event_id, id, aggregate_type, aggregate_id, event_type, topic, headers,"
        " created_at, attempts, error, ordering_key, sent_to)"
        " SELECT outbox_uuidv7(), nextval('outbox_id_seq'), 'order', 'key-' || n %% 7, 'changed', 'good', '{}', now(),"
        " 1, 'broken', 'good/key-' || n %% 7, 'good' FROM generate_series(1, %s) AS n",
        (many,),
    )
    result = desk.run("dead-letters", "redrive", "--topic", "good", "--reason", "all of them")
    assert result.exit_code == 0, result.output
    assert f"put back: {many}" in result.stdout
    steps = desk.eye.execute("SELECT count(*) FROM outbox GROUP BY xmin ORDER BY count(*)").fetchall()
    assert len(steps) == 3 * 7
    assert max(count for (count,) in steps) <= STEP // 7 + 1
    retry(desk.relay.ports())
    assert len(desk.kafka.arrived) == many


# the commands as they are typed


def test_the_commands_stand_under_celery(database_url: str, tmp_path: Path) -> None:
    """`celery -A outbox_tasks outbox …` runs them as they are typed, and pipes clean JSON."""
    deployment = Deployment(
        database_url=database_url, bootstrap_servers="localhost:1", redis_url="redis://localhost:1/0", scratch=tmp_path
    )
    done = deployment.run("outbox", "dead-letters", "list", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, [])
    failed = deployment.run("outbox", "retry", "good/a")
    assert failed.returncode == 1
    assert "Error: key 'good/a' is not blocked" in failed.stderr
