"""Commands for those who deploy: make the tables, look for what is wrong."""

import sys

import click
from rich.text import Text

from outbox_tasks.cli.celery_checks import check_celery
from outbox_tasks.cli.support import as_json, connection_in, console, plain_table, plainly, print_json, settings_in
from outbox_tasks.ports import Ports
from outbox_tasks.publishing.factory import new_publisher
from outbox_tasks.schema import migrate as schema
from outbox_tasks.upkeep.check import Finding, check_beat
from outbox_tasks.upkeep.check import check as check_deployment
from outbox_tasks.upkeep.partitions import maintain_partitions
from outbox_tasks.waking.check import check_wake


@click.command()
@click.option("--sql", is_flag=True, help="Print the statements instead of running them.")
@click.pass_context
@plainly
def migrate(context: click.Context, *, sql: bool) -> None:
    """Make the outbox's tables, or bring them to this version, and look after the partitions."""
    if sql:
        schema.write_sql(sys.stdout)
        return
    settings = settings_in(context)
    schema.upgrade(settings.conninfo)
    click.echo(f"the database is at outbox schema {schema.head()}")
    with connection_in(context) as connection:
        publisher = new_publisher(settings)
        done = maintain_partitions(
            Ports(connection=connection, publisher=publisher, settings=settings, owner="migrate")
        )
    click.echo(", ".join(f"{name}: {value}" for name, value in done.as_dict().items()))


@click.command()
@as_json
@click.pass_context
@plainly
def check(context: click.Context, *, as_json: bool) -> None:
    """Look for what a deployment gets wrong; exits with 1 where something is."""
    settings = settings_in(context)
    publisher = new_publisher(settings)
    app = context.obj.app
    findings = [
        *check_deployment(settings, publisher),
        *check_celery(app, settings),
        check_wake(app, settings),
        check_beat(settings),
    ]
    publisher.close()
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        _print(findings)
    context.exit(not all(finding.right for finding in findings))


def _print(findings: list[Finding]) -> None:
    table = plain_table("", "what", "found")
    for finding in findings:
        mark = "[green]ok[/]" if finding.right else "[red]wrong[/]"
        table.add_row(mark, Text(finding.subject), Text(finding.detail))
    console().print(table)
