"""One deployment for each test: its own database, topic and Redis database; servers are shared."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.workers import Deployment, redis_url_of_its_own

from outbox_tasks.schema import migrate
from outbox_tasks.testing.services import Broker, PostgresServer, RedisServer, scratch_directory


@pytest.fixture(params=["tansu"])
def broker(request: pytest.FixtureRequest) -> Broker:
    """Run the test on one broker; where brokers may differ it names both, as `@on_both_brokers`."""
    chosen = request.getfixturevalue(request.param)
    assert isinstance(chosen, Broker)
    return chosen


@pytest.fixture
def deployment(database_url: str, broker: Broker, redis_server: RedisServer, tmp_path: Path) -> Deployment:
    """Give the place where the workers of this test alone work."""
    return Deployment(
        database_url=database_url,
        bootstrap_servers=broker.bootstrap_servers,
        redis_url=redis_url_of_its_own(redis_server),
        scratch=tmp_path,
    )


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """Run a migrated PostgreSQL that the test may break."""
    with scratch_directory("outbox-test-") as directory, PostgresServer(directory / "postgres") as server:
        migrate.upgrade(server.url())
        yield server
