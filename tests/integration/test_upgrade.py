"""An upgrade from the first released schema, with data in it and writers at work."""

import threading
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from support.relaying import put, rows
from support.waiting import until

from outbox_tasks.errors import SchemaVersionError
from outbox_tasks.schema import migrate
from outbox_tasks.testing.services import PostgresServer

FIRST = "0001"


@pytest.fixture
def first_schema(postgres: PostgresServer) -> str:
    """Make a database at the first released schema, with events in it."""
    name = f"upgrade_{uuid4().hex}"
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    migrate.upgrade(postgres.url(name), revision=FIRST)
    put(postgres.url(name), *({"aggregate_id": str(number)} for number in range(1000)))
    return postgres.url(name)


def test_upgrade_online(first_schema: str) -> None:
    """A database at the first schema comes to the current one while writers go on, and nothing in it changes."""
    before = rows(first_schema, "SELECT * FROM outbox ORDER BY id")
    stop, written = threading.Event(), list[int]()
    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(_write, first_schema, stop, written) for _ in range(4)]
        until(lambda: len(written) > 50, "the writers are at work")
        migrate.upgrade(first_schema)
        during = len(written)
        until(lambda: len(written) > during + 50, "the writers go on")
        stop.set()
        for writer in writers:
            writer.result(timeout=60)
    after = rows(first_schema, "SELECT * FROM outbox ORDER BY id")
    assert after[: len(before)] == before
    assert len(after) == len(before) + len(written)
    with psycopg.connect(first_schema) as connection:
        migrate.check(connection)


def _write(database_url: str, stop: threading.Event, written: list[int]) -> None:
    with psycopg.connect(database_url) as connection:
        while not stop.is_set():
            connection.execute("INSERT INTO outbox (aggregate_type, aggregate_id, event_type) VALUES ('a', 'b', 'c')")
            connection.commit()
            written.append(1)


def test_upgraded_equals_fresh(first_schema: str, database_url: str) -> None:
    """A database that was upgraded has the same columns, indexes and constraints as a fresh one."""
    migrate.upgrade(first_schema)
    assert _shape(first_schema) == _shape(database_url)


def _shape(database_url: str) -> list[object]:
    return [
        rows(
            database_url,
            "SELECT table_name, column_name, data_type, is_nullable, column_default, generation_expression"
            "  FROM information_schema.columns WHERE table_schema = 'public' ORDER BY 1, 2",
        ),
        rows(database_url, "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1"),
        rows(
            database_url,
            "SELECT conrelid::regclass::text AS owner, conname, pg_get_constraintdef(oid) AS definition"
            "  FROM pg_constraint WHERE connamespace = 'public'::regnamespace ORDER BY 1, 2",
        ),
    ]


def test_old_schema_is_refused(first_schema: str) -> None:
    """The relay refuses to run on another schema version, and says which it found and which it wants."""
    with psycopg.connect(first_schema) as connection, pytest.raises(SchemaVersionError, match=r"0001.*0004.*migrate"):
        migrate.check(connection)
