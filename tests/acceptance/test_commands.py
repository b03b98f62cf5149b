"""The commands for those who deploy, as they type them: what is made, what is said, how they exit."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from support.clients import Client
from support.judging import states
from support.workers import CeleryProcess, Deployment, Fleet, fleet
from support.writers import Load, write

from outbox_tasks.testing.services import ApacheKafka, PostgresServer, free_port
from outbox_tasks.testing.services.places import LOOPBACK

CATALOG = {
    "columns": """
        SELECT c.relname, c.relkind, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
               a.attgenerated, a.attidentity, pg_get_expr(d.adbin, d.adrelid), c.reloptions,
               pg_get_expr(c.relpartbound, c.oid)
          FROM pg_class AS c
          JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
          LEFT JOIN pg_attrdef AS d ON d.adrelid = c.oid AND d.adnum = a.attnum
         WHERE c.relnamespace = 'public'::regnamespace ORDER BY 1, 3
    """,
    "indexes": """
        SELECT indexrelid::regclass::text, pg_get_indexdef(indexrelid), indisvalid
          FROM pg_index JOIN pg_class AS c ON c.oid = indrelid
         WHERE relnamespace = 'public'::regnamespace ORDER BY 1
    """,
    "constraints": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid), convalidated
          FROM pg_constraint WHERE connamespace = 'public'::regnamespace ORDER BY 1, 2
    """,
    "functions": """
        SELECT proname, pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'public'::regnamespace ORDER BY 1
    """,
    "sequences": """
        SELECT sequencename, data_type::text, start_value, increment_by, cache_size FROM pg_sequences ORDER BY 1
    """,
    "shards": "SELECT shard, lease_token FROM outbox_shard ORDER BY 1",
    "version": "SELECT version_num FROM outbox_alembic_version",
}


def catalog_of(database_url: str) -> dict[str, list[tuple[object, ...]]]:
    """Return what a database consists of."""
    with psycopg.connect(database_url) as connection:
        return {name: connection.execute(sql.SQL(query)).fetchall() for name, query in CATALOG.items()}


@pytest.fixture
def empty_database(postgres: PostgresServer) -> Iterator[str]:
    """Make a database with nothing in it."""
    name = f"empty_{uuid4().hex}"
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        yield postgres.url(name)
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def fresh(deployment: Deployment, empty_database: str) -> Deployment:
    """Give a deployment before its first migration."""
    return replace(deployment, database_url=empty_database)


def test_migrate_makes_the_tables_and_can_be_run_again(deployment: Deployment, fresh: Deployment) -> None:
    """`outbox migrate` makes the schema in an empty database; run again it changes nothing."""
    for _ in range(2):
        done = fresh.run("outbox", "migrate")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("the database is at outbox schema ")
        assert catalog_of(fresh.database_url) == catalog_of(deployment.database_url)


def test_migrate_sql_says_what_migrate_does(deployment: Deployment, fresh: Deployment) -> None:
    """What `outbox migrate --sql` prints makes the same schema when a person runs it, and touches nothing itself."""
    done = fresh.run("outbox", "migrate", "--sql")
    assert (done.returncode, done.stderr) == (0, "")
    with psycopg.connect(fresh.database_url, autocommit=True) as connection:
        assert connection.execute("SELECT to_regclass('outbox')").fetchone() == (None,)
        connection.execute(done.stdout.encode())
    assert catalog_of(fresh.database_url) == catalog_of(deployment.database_url)
    found = {finding["subject"]: finding for finding in json.loads(fresh.run("outbox", "check", "--json").stdout)}
    assert found["schema"]["right"]
    assert found["partitions"]["right"]


def test_check_finds_nothing_wrong(deployment: Deployment, topic: str) -> None:
    """`outbox check` exits with 0 where all is right and a beat and a worker are at work, and names each."""
    right = deployment.but(routes=f'{{"order": "{topic}"}}', wake_timeout_seconds=5)
    with fleet(right) as celery:
        celery.worker(children=1), celery.beat()
        celery.until(lambda: right.run("outbox", "check").returncode == 0, "everything is found right")
        done = right.run("outbox", "check")
    for subject in ("database", "schema", "notifications", f"topic {topic}", "redis visibility", "workers"):
        assert subject in done.stdout
    for subject in ("wake-up", "beat and worker"):
        assert subject in done.stdout
    assert "wrong" not in done.stdout


def test_check_names_a_missing_schema(fresh: Deployment) -> None:
    """`outbox check` exits with 1 before the first migration, and says how to run it."""
    done = fresh.run("outbox", "check")
    assert done.returncode == 1
    assert "the database has no outbox schema" in done.stdout
    assert "run `celery -A outbox_tasks outbox migrate`" in done.stdout


@pytest.mark.parametrize("broker", ["kafka"], indirect=True)
def test_check_names_each_missing_topic(deployment: Deployment, topic: str, client: Client) -> None:
    """`outbox check` exits with 1 and names every topic of the routes that does not exist, over either client."""
    routes = f'{{"order": "{topic}", "parcel": "no-parcels", "refund": "no-refunds"}}'
    done = deployment.but(routes=routes, publisher=client.name).run("outbox", "check")
    assert done.returncode == 1
    for missing in ("no-parcels", "no-refunds"):
        assert f"topic '{missing}' does not exist" in done.stdout
    assert f"topic '{topic}'" not in done.stdout


def test_check_says_that_no_broker_answers(deployment: Deployment) -> None:
    """`outbox check` exits with 1 and names the address where no broker answers."""
    address = f"{LOOPBACK}:{free_port()}"
    done = replace(deployment, bootstrap_servers=address).run("outbox", "check")
    assert done.returncode == 1
    assert f"no broker answers at {address}" in done.stdout


def test_check_and_the_worker_say_why_events_wait_for_ticks(deployment: Deployment) -> None:
    """Where commits cannot wake the relay `outbox check` exits with 1 and says why, and so does a starting worker."""
    address = f"{LOOPBACK}:{free_port()}"
    deaf = deployment.but(wake_url=f"redis://:hunter2@{address}/0")
    done = deaf.run("outbox", "check")
    assert done.returncode == 1
    assert f"the Redis at {address}/0 does not answer" in done.stdout
    with fleet(deaf) as celery:
        worker = celery.worker(children=1)
        worker.await_word(f"wake-up: the Redis at {address}/0 does not answer")
    assert "hunter2" not in done.stdout + worker.output


def test_migrate_says_that_no_database_answers(deployment: Deployment) -> None:
    """`outbox migrate` exits with 1 and a plain message where no database answers."""
    done = replace(deployment, database_url=f"postgresql://{LOOPBACK}:{free_port()}/nowhere").run("outbox", "migrate")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert "Connection refused" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_refuses_an_unknown_setting(deployment: Deployment) -> None:
    """`outbox check` ends with 1 on an unknown setting, and names the nearest known one."""
    done = deployment.but(rotues="{}").run("outbox", "check")
    assert done.returncode == 1
    assert "OUTBOX_ROTUES, which is no setting: did you mean OUTBOX_ROUTES?" in done.stderr


@pytest.mark.parametrize("start", [Fleet.worker, Fleet.beat], ids=["worker", "beat"])
def test_a_process_refuses_an_unknown_setting(deployment: Deployment, start: Callable[[Fleet], CeleryProcess]) -> None:
    """Worker and beat do not start with an unknown setting, and name the nearest known one."""
    with fleet(deployment.but(rotues="{}")) as celery:
        process = start(celery)
        assert process.await_end(seconds=30) != 0
        assert "OUTBOX_ROTUES, which is no setting: did you mean OUTBOX_ROUTES?" in process.output


def test_a_worker_refuses_what_its_kafka_client_does_not_know(deployment: Deployment, client: Client) -> None:
    """A worker does not start with a setting of its Kafka client that the client has not, and names it."""
    with fleet(deployment.but(publisher=client.name, kafka='{"linger": 5}')) as celery:
        worker = celery.worker()
        assert worker.await_end(seconds=30) != 0
        assert re.search("outbox_kafka .*linger", worker.output)


@pytest.mark.parametrize("broker", ["kafka"], indirect=True)
def test_a_worker_warns_of_each_missing_topic_at_start(deployment: Deployment, kafka: ApacheKafka) -> None:
    """A starting worker logs a warning for each topic of the routes that does not exist, and for no other."""
    there = f"there-{uuid4().hex}"
    kafka.create_topic(there)
    routes = f'{{"order": "{there}", "parcel": "no-parcels", "refund": "no-refunds"}}'
    with fleet(deployment.but(routes=routes)) as celery:
        worker = celery.worker(children=1)
        worker.await_word("Task outbox.check")
        worker.await_word("succeeded")
        warnings = [line for line in worker.output.splitlines() if "WARNING" in line and "topic" in line]
    assert len(warnings) == 2
    assert all(
        any(f"topic '{missing}' does not exist" in line for line in warnings)
        for missing in ("no-parcels", "no-refunds")
    )


def test_a_worker_leaves_a_database_without_the_schema_alone(fresh: Deployment, topic: str) -> None:
    """A worker started before the migration says so, and goes to work by itself once it has been run."""
    with fleet(fresh) as celery:
        worker = celery.worker(children=1)
        celery.beat()
        worker.await_word("the database has no outbox schema")
        assert fresh.run("outbox", "migrate").returncode == 0
        committed = write(fresh.database_url, Load(topic=topic, events=80))
        celery.until(lambda: states(fresh.database_url) == {"published": len(committed)}, "everything is published")
