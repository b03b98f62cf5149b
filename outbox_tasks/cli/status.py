"""Commands that show: the state of everything, one event, events as they are published."""

import time
from uuid import UUID

import click
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outbox_tasks.cli.support import as_json, connection_in, console, plain_table, plainly, print_json, settings_in
from outbox_tasks.errors import NoSuchEventError
from outbox_tasks.publishing.factory import tail as follow
from outbox_tasks.store import status as store
from outbox_tasks.upkeep.status import Status, gather

LATE_SECONDS = 10
"""An unpublished event older than this is shown in red."""


@click.command()
@as_json
@click.option("--watch", is_flag=True, help="Look again every second, until interrupted.")
@click.pass_context
@plainly
def status(context: click.Context, *, as_json: bool, watch: bool) -> None:
    """Show how much waits, where and since when, who publishes it, and how much room it takes."""
    with connection_in(context) as connection:
        if as_json:
            print_json(gather(connection))
            return
        if not watch:
            console().print(render(gather(connection)))
            return
        with Live(render(gather(connection)), auto_refresh=False) as live:
            while True:
                time.sleep(1)
                live.update(render(gather(connection)), refresh=True)


@click.command()
@click.argument("event_id", type=click.UUID)
@click.pass_context
@plainly
def show(context: click.Context, *, event_id: UUID) -> None:
    """Show all there is to know of one event, as JSON: where it is, its errors, its key, its shard."""
    with connection_in(context) as connection:
        found = store.event(connection, event_id)
    if found is None:
        raise NoSuchEventError(event_id)
    print_json(found)


@click.command()
@click.option("--topic", "topics", multiple=True, help="Only this topic; may be given again. Else all of the routes.")
@click.pass_context
@plainly
def tail(context: click.Context, *, topics: tuple[str, ...]) -> None:
    """Follow events as they arrive in Kafka, until interrupted."""
    settings = settings_in(context)
    for record in follow(settings, topics or tuple(sorted(set(settings.routes.values())))):
        click.echo(record.as_line())


def render(state: Status) -> RenderableType:
    """Draw the state for a terminal."""
    parts = [_summary(state), _blocked(state), _leases(state), _runs(state), _partitions(state)]
    return Group(*(part for part in parts if part is not None))


def _summary(state: Status) -> Text:
    age = state.oldest_age_seconds
    late = age is not None and age > LATE_SECONDS
    return Text.assemble(
        ("pending ", "dim"), (f"{state.pending:,}", "bold red" if late else "bold"),
        ("   held ", "dim"), (f"{state.held:,}", "bold yellow" if state.held else "bold"),
        ("   dead ", "dim"), (f"{state.dead:,}", "bold red" if state.dead else "bold"),
        ("   oldest ", "dim"), ("-" if age is None else f"{age:,.1f} s", "bold red" if late else "bold"),
        ("   rate ", "dim"), (f"{state.rate:,.1f}/s", "bold"),
        ("   schema ", "dim"), f"{state.schema_version} on PostgreSQL {state.server_version // 10000}",
    )  # fmt: skip


def _blocked(state: Status) -> Table | None:
    if not state.blocked:
        return None
    table = plain_table("blocked", "keys", "held", "since")
    for kind in state.blocked:
        table.add_row(f"[yellow]{kind.kind}[/]", f"{kind.keys:,}", f"{kind.held:,}", f"{kind.since:%Y-%m-%d %H:%M:%S}")
    return table


def _leases(state: Status) -> Table | None:
    shaken = [shard for shard in state.shards if shard.takeovers or shard.suspect]
    shown = {shard.shard: shard for shard in (*state.leased, *shaken)}
    if not shown:
        return None
    table = plain_table("shard", "pending", "leased by", "until", "takeovers")
    for shard in shown.values():
        until = "-" if shard.leased_until is None else f"{shard.leased_until:%H:%M:%S}"
        takeovers = f"[red]{shard.takeovers}[/]" if shard.takeovers else "0"
        table.add_row(str(shard.shard), f"{shard.pending:,}", Text(shard.lease_owner or "-"), until, takeovers)
    return table


def _runs(state: Status) -> Table | None:
    if not state.runs:
        return None
    table = plain_table("last run", "ended", "on", "result")
    for run in state.runs:
        ago = (state.now - run.ended_at).total_seconds()
        result = ", ".join(str(value) if name == "status" else f"{name} {value}" for name, value in run.report.items())
        table.add_row(Text(run.task), f"{ago:,.0f} s ago", Text(run.host), Text(result))
    return table


def _partitions(state: Status) -> Table:
    table = plain_table("partition", "size", "rows (est.)", "unpublished")
    for part in state.partitions:
        rows = "never counted" if part.rows < 0 else f"{part.rows:,}"
        table.add_row(part.name, decimal(part.bytes), rows, f"{part.unpublished:,}" if part.unpublished else "-")
    return table
