"""What a measurement runs on: fresh servers, migrated databases, topics."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psycopg
from psycopg.sql import SQL, Identifier

from outbox_tasks.schema import migrate
from outbox_tasks.testing.services import (
    ApacheKafka,
    PostgresServer,
    RedisServer,
    scratch_directory,
)

TEMPLATE = "bench_template"


@dataclass(frozen=True, slots=True)
class Rig:
    """The servers of one run."""

    postgres: PostgresServer
    redis: RedisServer
    broker: ApacheKafka
    directory: Path

    @contextmanager
    def database(self) -> Iterator[str]:
        """Yield the URL of a migrated database of its own; it is dropped at the end."""
        name = f"bench_{uuid4().hex}"
        self._run(SQL("CREATE DATABASE {} TEMPLATE {}").format(Identifier(name), Identifier(TEMPLATE)))
        try:
            yield self.postgres.url(name)
        finally:
            self._run(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(name)))

    def new_topic(self) -> str:
        """Make a topic of 8 partitions."""
        name = f"bench-{uuid4().hex}"
        self.broker.create_topic(name)
        return name

    def environment(self, database_url: str, topic: str, **settings: object) -> dict[str, str]:
        """Return the environment of a deployment; nothing of ours or Celery's is inherited."""
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(("OUTBOX_", "CELERY_"))}
        ours = {
            "OUTBOX_DATABASE_URL": database_url,
            "OUTBOX_BOOTSTRAP_SERVERS": self.broker.bootstrap_servers,
            "OUTBOX_ROUTES": f'{{"order": "{topic}"}}',
            "CELERY_BROKER_URL": self.redis.url,
            "CELERY_RESULT_BACKEND": self.redis.url,
        }
        return {**inherited, **ours, **{f"OUTBOX_{name.upper()}": str(value) for name, value in settings.items()}}

    def log_statements_of(self, database_url: str) -> None:
        """Have every statement of later connections to a database written to the server's log."""
        name = Identifier(name_of(database_url))
        self._run(SQL("ALTER DATABASE {} SET log_statement = 'all'").format(name))
        self._run(SQL("ALTER DATABASE {} SET log_parameter_max_length = 0").format(name))

    def prepare(self) -> None:
        """Make the template of databases, and have the log say which database a line is about."""
        self._run(SQL("CREATE DATABASE {}").format(Identifier(TEMPLATE)))
        migrate.upgrade(self.postgres.url(TEMPLATE))
        self._run(SQL("ALTER SYSTEM SET log_line_prefix = '%d|'"))
        self._run(SQL("SELECT pg_reload_conf()"))

    def checkpoint(self) -> None:
        """Write a checkpoint, so that none falls into what is measured next."""
        self._run(SQL("CHECKPOINT"))

    def _run(self, statement: SQL | psycopg.sql.Composed) -> None:
        with psycopg.connect(self.postgres.url(), autocommit=True) as connection:
            connection.execute(statement)


@contextmanager
def rig() -> Iterator[Rig]:
    """Start everything. Kafka is Apache's: Tansu does not tell rightly how many records a topic has."""
    with ExitStack() as stack:
        directory = stack.enter_context(scratch_directory("outbox-bench-"))
        postgres = stack.enter_context(PostgresServer(directory / "postgres"))
        redis = stack.enter_context(RedisServer(directory / "redis"))
        broker = stack.enter_context(ApacheKafka(directory / "kafka"))
        servers = Rig(postgres, redis, broker, directory)
        servers.prepare()
        yield servers


def name_of(database_url: str) -> str:
    """Return the name of a database."""
    return database_url.rpartition("/")[2]
