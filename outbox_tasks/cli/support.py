"""What the commands share: settings, a connection, plain errors, tables and JSON."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from typing import Any, TypeVar

import click
import psycopg
from celery.bin.base import CLIContext
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outbox_tasks import worker
from outbox_tasks.errors import OutboxError
from outbox_tasks.settings import Settings
from outbox_tasks.store.connection import Connection, connect

C = TypeVar("C", bound=Callable[..., None])

UNBOUNDED = 10_000

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


def console() -> Console:
    """Return where tables go: as wide as they are, unless a terminal sets a width."""
    found = Console()
    return found if found.is_terminal else Console(width=UNBOUNDED)


def plain_table(*headings: str) -> Table:
    """Return a table whose cells are shown whole."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def print_table(rows: Sequence[Any], columns: dict[str, str], *, empty: str) -> None:
    """Print rows of dataclasses as a table; `columns` gives a heading for each field shown."""
    if not rows:
        click.echo(empty)
        return
    table = plain_table(*columns.values())
    for row in rows:
        table.add_row(*(Text(_text(getattr(row, field))) for field in columns))
    console().print(table)


class Time(click.ParamType[datetime]):
    """A time in ISO 8601, such as `--json` prints; UTC where it says nothing else."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Read a time."""
        if isinstance(value, datetime):
            return value
        try:
            return datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no time in ISO 8601, such as 2026-11-30T10:00:00", param, ctx)


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
