"""A crash loop: an event that kills the process that is to send it, in a real worker, once pending and once held."""

import os
from pathlib import Path

import psycopg
import pytest
from support.judging import judge, states
from support.waiting import until
from support.workers import Deployment, fleet
from support.writers import Written

DEADLY = "deadly"

# The app of the deployment, but for a client library that crashes with certain bytes, as C extensions do.
APP = """
import os
from outbox_tasks.celery import app
from outbox_tasks.publishing.kafka_python import KafkaPythonPublisher

usual = KafkaPythonPublisher.send

def is_deadly(record):
    return record.key == b"deadly" and b'"sequence": 3' in record.value

def send(self, records, **arguments):
    if any(is_deadly(record) for record in records):
        with open(os.environ["DEATHS"], "a") as deaths:
            deaths.write(f"{len(records)}\\n")
        os._exit(1)
    return usual(self, records, **arguments)

KafkaPythonPublisher.send = send
"""

_WRITE = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, topic, payload)
SELECT 'order', key, 'order_changed', %(topic)s, jsonb_build_object('key', key, 'sequence', sequence)
  FROM generate_series(1, 5) AS sequence CROSS JOIN unnest(%(keys)s::text[]) AS key
 ORDER BY sequence
RETURNING aggregate_id, (payload->>'sequence')::int, event_id
"""
_LETTERS = "SELECT event_id, attempts, deaths, payload, error, resolution FROM outbox_dead_letter"


@pytest.fixture
def crashing(deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """Give a deployment whose children crash with one event."""
    (tmp_path / "crashing_app.py").write_text(APP)
    path = [str(tmp_path), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("DEATHS", str(tmp_path / "deaths"))
    return Deployment(
        database_url=deployment.database_url,
        bootstrap_servers=deployment.bootstrap_servers,
        redis_url=deployment.redis_url,
        scratch=tmp_path,
        settings={"shards_per_run": 64, "dispatch_seconds": 0.5, "retry_tick_seconds": 0.5},
        app="crashing_app",
    )


def deaths_in(directory: Path) -> list[int]:
    """Return how many records each process was about to send when it died."""
    file = directory / "deaths"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def letters_in(database_url: str) -> list[tuple[object, ...]]:
    """Return the dead letters."""
    with psycopg.connect(database_url) as connection:
        return connection.execute(_LETTERS).fetchall()


def test_an_event_that_kills_its_process_is_found(crashing: Deployment, topic: str, tmp_path: Path) -> None:
    """After four deaths the deadly event is a dead letter, all else is published in order, and it kills no more."""
    database, keys = crashing.database_url, [DEADLY, *(f"key-{number}" for number in range(40))]
    with psycopg.connect(database) as connection:
        written = [Written(*row) for row in connection.execute(_WRITE, {"topic": topic, "keys": keys})]
    (deadly,) = [event for event in written if event.key == DEADLY and event.sequence == 3]
    rest = [event for event in written if event != deadly]
    with fleet(crashing) as celery:
        worker, _ = celery.worker(children=2), celery.beat()
        until(lambda: states(database) == {"published": len(rest)}, "all else is published", seconds=120)
        (letter,) = letters_in(database)
        event_id, attempts, times, payload, error, resolution = letter
        assert (event_id, attempts, times, resolution) == (deadly.event_id, 1, 1, None)
        assert payload == {"key": DEADLY, "sequence": 3}
        assert "died each time" in str(error)
        deaths = deaths_in(tmp_path)
        assert len(deaths) == 4
        assert deaths[-1] == 1
        redrive = ["outbox", "dead-letters", "redrive", "--id", str(deadly.event_id), "--reason", "try again"]
        assert crashing.run(*redrive).returncode == 0
        until(lambda: letters_in(database)[0][2] == 2, "it is a dead letter for the second time", seconds=120)
        assert len(deaths_in(tmp_path)) == 4 + 3
        until(lambda: not blocked_keys(database), "its key is free")
        assert worker.is_running
        assert worker.stop() == 0
    assert not leases_in_force(database)
    assert judge(crashing.bootstrap_servers, topic, rest).faults == {}


def leases_in_force(database_url: str) -> int:
    """Count the leases that have not ended."""
    with psycopg.connect(database_url) as connection:
        return connection.execute("SELECT FROM outbox_shard WHERE leased_until > clock_timestamp()").rowcount


def blocked_keys(database_url: str) -> int:
    """Count the blocked keys."""
    with psycopg.connect(database_url) as connection:
        return connection.execute("SELECT FROM outbox_blocked_key").rowcount
