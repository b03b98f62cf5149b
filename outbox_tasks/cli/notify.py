"""The command that switches PostgreSQL's notifications on and off."""

import click

from outbox_tasks.cli.support import connection_in, plainly, settings_in
from outbox_tasks.store import notifications
from outbox_tasks.upkeep.notifications import switch


@click.command()
@click.argument("state", type=click.Choice(["on", "off"]))
@click.option("--sql", is_flag=True, help="Print the statement instead of running it.")
@click.pass_context
@plainly
def notify(context: click.Context, *, state: str, sql: bool) -> None:
    """Have PostgreSQL notify workers (`outbox_listen`) of plain INSERTs. Commits then queue up, two-phase ones fail."""
    on = state == "on"
    if sql:
        click.echo(f"{notifications.SWITCH_ON if on else notifications.SWITCH_OFF};")
        return
    with connection_in(context) as connection:
        changed = switch(connection, settings_in(context), on=on)
    click.echo(f"notifications are {state}" + ("" if changed else ", as they were"))
