"""Commands for people: `celery -A <app> outbox …`."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import click
import psycopg
from celery.bin.base import CLIContext
from rich.console import Console
from rich.table import Table

from outbox_tasks import worker
from outbox_tasks.errors import OutboxError
from outbox_tasks.schema import migrate as schema
from outbox_tasks.settings import Settings
from outbox_tasks.upkeep.check import check as check_deployment

C = TypeVar("C", bound=Callable[..., None])


def _plainly(command: C) -> C:
    """Let a command end with what is wrong instead of a traceback."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (OutboxError, psycopg.OperationalError) as error:
            raise click.ClickException(str(error).strip()) from error

    return run  # type: ignore[return-value]


def _settings(context: click.Context) -> Settings:
    celery: CLIContext = context.obj
    return worker.settings_of(celery.app)


@click.group()
def outbox() -> None:
    """Make the tables and look after the outbox."""


@outbox.command()
@click.option("--sql", is_flag=True, help="Print the statements instead of running them.")
@click.pass_context
@_plainly
def migrate(context: click.Context, *, sql: bool) -> None:
    """Make the outbox's tables, or bring them to this version."""
    if sql:
        schema.write_sql(sys.stdout)
        return
    schema.upgrade(_settings(context).conninfo)
    click.echo(f"the database is at outbox schema {schema.head()}")


@outbox.command()
@click.pass_context
@_plainly
def check(context: click.Context) -> None:
    """Look for what a deployment gets wrong; exits with 1 where something is."""
    settings = _settings(context)
    publisher = worker.new_publisher(settings)
    findings = check_deployment(settings, publisher)
    publisher.close()
    table = Table("", "what", "found", box=None)
    for finding in findings:
        mark = "[green]ok[/]" if finding.right else "[red]wrong[/]"
        table.add_row(mark, finding.subject, finding.detail)
    Console().print(table)
    context.exit(not all(finding.right for finding in findings))
