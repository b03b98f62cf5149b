"""What the commands share: settings, a connection, plain errors, tables and JSON."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from typing import Any, TypeVar

import click
import psycopg
from celery.bin.base import CLIContext
from rich.console import Console
from rich.table import Table

from outbox_tasks import worker
from outbox_tasks.errors import OutboxError
from outbox_tasks.settings import Settings
from outbox_tasks.store.connection import Connection, connect

C = TypeVar("C", bound=Callable[..., None])

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def plainly(command: C) -> C:
    """Let a command end with what is wrong instead of a traceback."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (OutboxError, psycopg.OperationalError) as error:
            raise click.ClickException(str(error).strip()) from error

    return run  # type: ignore[return-value]


def settings_in(context: click.Context) -> Settings:
    """Return the settings of the app the command was called for."""
    celery: CLIContext = context.obj
    return worker.settings_of(celery.app)


@contextmanager
def connection_in(context: click.Context) -> Iterator[Connection]:
    """Open the database of the app the command was called for."""
    with connect(settings_in(context)) as connection:
        yield connection


def print_json(value: object) -> None:
    """Print dataclasses, or what is made of them, as JSON; times as ISO 8601, ids and bytes as text."""
    click.echo(json.dumps(value, default=_plain, indent=2, ensure_ascii=False))


def print_table(rows: Sequence[Any], columns: dict[str, str], *, empty: str) -> None:
    """Print rows of dataclasses as a table; `columns` gives a heading for each field shown."""
    if not rows:
        click.echo(empty)
        return
    table = Table(*columns.values(), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(_text(getattr(row, field)) for field in columns))
    Console().print(table)


def utc(time: datetime | None) -> datetime | None:
    """Return a time given on the command line as what it is: UTC."""
    return None if time is None else time.replace(tzinfo=UTC)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if hasattr(value, "isoformat"):
        return str(value.isoformat(sep=" ", timespec="seconds"))
    return str(value)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    return str(value)
