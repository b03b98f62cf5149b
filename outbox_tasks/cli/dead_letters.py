"""Commands about dead letters: list, show, put back, give up."""

from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import click
from rich.progress import Progress

from outbox_tasks.cli.support import C, Time, as_json, connection_in, plainly, print_json, print_table
from outbox_tasks.errors import InvalidFilterError
from outbox_tasks.relay.redrive import Decision, carry_out
from outbox_tasks.store import dead_letters as store
from outbox_tasks.store.connection import Connection
from outbox_tasks.store.dead_letters import Filter

COLUMNS = {
    "event_id": "event",
    "event_type": "type",
    "topic": "topic",
    "key": "key",
    "attempts": "attempts",
    "died_at": "died",
    "error": "error",
}

OPTIONS: Sequence[Callable[[Any], Any]] = (
    click.option("--id", "ids", multiple=True, type=click.UUID, help="This event; may be given again."),
    click.option("--key", help="Ordering key, or partition key."),
    click.option("--topic", help="The topic it was to go to."),
    click.option("--error", help="Part of the error's text."),
    click.option("--since", type=Time(), help="Died at or after this time (UTC)."),
    click.option("--until", type=Time(), help="Died before this time (UTC)."),
)


def filtered(command: C) -> C:
    """Give a command the options that select dead letters."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def deciding(command: C) -> C:
    """Give a command the options of a decision."""
    command = click.option("--dry-run", is_flag=True, help="Only tell which.")(command)
    return click.option("--reason", required=True, help="Why; it is kept with the dead letter.")(command)


@click.group("dead-letters")
def dead_letters() -> None:
    """Events given up on: list them, show one, put them back, or give them up for good."""


@dead_letters.command("list")
@filtered
@click.option("--limit", default=1000, show_default=True, help="At most so many.")
@as_json
@click.pass_context
@plainly
def list_(context: click.Context, /, *, limit: int, as_json: bool, **which: Any) -> None:
    """List dead letters nobody has decided on, oldest event first."""
    with connection_in(context) as connection:
        found = store.describe(connection, store.select(connection, _filter(which))[:limit])
    if as_json:
        print_json(found)
    else:
        print_table(found, COLUMNS, empty="no dead letters")


@dead_letters.command()
@click.argument("event_id", type=click.UUID)
@click.pass_context
@plainly
def show(context: click.Context, *, event_id: UUID) -> None:
    """Show everything about one dead letter, as JSON."""
    with connection_in(context) as connection:
        found = store.show(connection, event_id)
    if found is None:
        raise InvalidFilterError(f"there is none with event id {event_id}")
    print_json(found)


@dead_letters.command()
@filtered
@deciding
@click.pass_context
@plainly
def redrive(context: click.Context, /, *, reason: str, dry_run: bool, **which: Any) -> None:
    """Put dead letters back: the same events, in their old place in the order."""
    with connection_in(context) as connection:
        ids = _meant(connection, which, show=dry_run)
        if not dry_run:
            click.echo(f"put back: {_watch(connection, store.redrive, ids, reason=reason)}")


@dead_letters.command()
@filtered
@deciding
@click.pass_context
@plainly
def discard(context: click.Context, /, *, reason: str, dry_run: bool, **which: Any) -> None:
    """Give dead letters up for good. They are kept, but never published."""
    with connection_in(context) as connection:
        ids = _meant(connection, which, show=dry_run)
        if not dry_run:
            click.echo(f"discarded: {_watch(connection, store.discard, ids, reason=reason)}")


def _meant(connection: Connection, which: dict[str, Any], *, show: bool) -> list[UUID]:
    """Return the dead letters meant, and list them if they are only to be shown."""
    wanted = _filter(which)
    if wanted.is_empty:
        raise InvalidFilterError("give --id, --key, --topic, --error, --since or --until")
    ids = store.select(connection, wanted)
    if show:
        print_table(store.describe(connection, ids), COLUMNS, empty="no dead letters")
    return ids


def _watch(connection: Connection, decision: Decision, ids: Sequence[UUID], *, reason: str) -> int:
    count = 0
    with Progress() as progress:
        bar = progress.add_task("dead letters", total=len(ids))
        for step in carry_out(connection, decision, ids, reason=reason):
            count += step
            progress.advance(bar, step)
    return count


def _filter(which: dict[str, Any]) -> Filter:
    which["ids"] = list(which["ids"]) or None
    return Filter(**which)
