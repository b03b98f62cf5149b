"""Real servers for the tests: one set per pytest-xdist worker, each started when first asked for."""

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from support.clients import BOTH, Client

from outbox_tasks.testing.services import (
    ApacheKafka,
    Broker,
    PostgresServer,
    RedisServer,
    TansuBroker,
    scratch_directory,
)
from outbox_tasks.testing.services.kafka_jars import missing_tools

TEMPLATE = "outbox_template"


@pytest.fixture(autouse=True)
def no_settings_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the settings that one test's app makes those of the process from the next test."""
    monkeypatch.setattr("outbox_tasks.settings._in_use", None)


@pytest.fixture(scope="session")
def server_directory() -> Iterator[Path]:
    """Hold the worker's servers; pytest's own directories are closed to the user PostgreSQL runs as."""
    with scratch_directory("outbox-tests-") as directory:
        yield directory


@pytest.fixture(scope="session")
def postgres(server_directory: Path) -> Iterator[PostgresServer]:
    """Run PostgreSQL: the packaged one, or that of the directory TEST_POSTGRES_BIN names."""
    chosen = os.environ.get("TEST_POSTGRES_BIN")
    with PostgresServer(server_directory / "postgres", bin_dir=Path(chosen) if chosen else None) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server(server_directory: Path) -> Iterator[RedisServer]:
    """Run Redis."""
    with RedisServer(server_directory / "redis") as server:
        yield server


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """Run a Redis that the test may break."""
    with scratch_directory("outbox-test-") as directory, RedisServer(directory / "redis") as server:
        yield server


@pytest.fixture(scope="session")
def tansu(server_directory: Path) -> Iterator[TansuBroker]:
    """Run Tansu, where any Kafka-compatible broker will do."""
    with TansuBroker(server_directory / "tansu") as broker:
        yield broker


@pytest.fixture(scope="session")
def kafka(server_directory: Path) -> Iterator[ApacheKafka]:
    """Run Apache Kafka, where its own behaviour is at stake.

    Without Java and Maven such tests are skipped, unless TEST_REQUIRE_KAFKA=1 makes that an error.
    """
    if missing_tools() and os.environ.get("TEST_REQUIRE_KAFKA") != "1":
        pytest.skip(f"Apache Kafka needs {' and '.join(missing_tools())}, which are not installed")
    with ApacheKafka(server_directory / "kafka") as broker:
        yield broker


@pytest.fixture(params=["tansu", "kafka"])
def broker(request: pytest.FixtureRequest) -> Broker:
    """Run the test once on each broker."""
    # Not parametrised per session: pytest would stop one broker whenever the other's turn comes.
    chosen = request.getfixturevalue(request.param)
    assert isinstance(chosen, Broker)
    return chosen


@pytest.fixture(params=BOTH, ids=lambda client: client.name)
def client(request: pytest.FixtureRequest) -> Client:
    """Run the test once with each Kafka client."""
    chosen = request.param
    assert isinstance(chosen, Client)
    return chosen


@pytest.fixture
def topic(broker: Broker) -> str:
    """Create a topic of 8 partitions for this test alone."""
    name = f"topic-{uuid4().hex}"
    broker.create_topic(name)
    return name


@pytest.fixture(scope="session")
def template_database(postgres: PostgresServer) -> str:
    """Create and migrate the database that those of the tests are copied from."""
    # Imported here, so that tests of other things run whatever state the schema is in.
    from outbox_tasks.schema import migrate  # noqa: PLC0415

    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(TEMPLATE)))
    migrate.upgrade(postgres.url(TEMPLATE))
    return TEMPLATE


@pytest.fixture
def database_url(postgres: PostgresServer, template_database: str) -> Iterator[str]:
    """Copy the migrated template to a database for this test alone."""
    name = f"test_{uuid4().hex}"
    create = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(create.format(sql.Identifier(name), sql.Identifier(template_database)))
        yield postgres.url(name)
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
