"""The command that sends published events again, and watches how that goes."""

import time
from typing import Any
from uuid import UUID

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outbox_tasks.cli.support import Time, connection_in, plainly, settings_in
from outbox_tasks.errors import InvalidFilterError, NoSuchReplayError
from outbox_tasks.store import replays
from outbox_tasks.store.connection import Connection
from outbox_tasks.store.replays import Replay, Wanted


@click.command()
@click.option("--from", "since", type=Time(), help="Written at or after this time (UTC).")
@click.option("--to", "until", type=Time(), help="Written before this time (UTC).")
@click.option("--topic", help="Went to this topic.")
@click.option("--aggregate", help="TYPE, or TYPE/ID.")
@click.option("--event-type", help="Of this type.")
@click.option("--id", "ids", multiple=True, type=click.UUID, help="This event; may be given again.")
@click.option("--to-topic", help="Send them to this topic instead of their own.")
@click.option("--rate", type=click.IntRange(min=1), help="Events a second at most; else outbox_replay_rate.")
@click.option("--dry-run", is_flag=True, help="Only count them.")
@click.option("--detach", is_flag=True, help="Begin, and do not wait.")
@click.option("--watch", "watched", type=click.UUID, help="Watch a replay that was begun.")
@click.option("--cancel", "cancelled", type=click.UUID, help="End a replay.")
@click.pass_context
@plainly
def replay(  # noqa: PLR0913 - an option each
    context: click.Context,
    /,
    *,
    to_topic: str | None,
    rate: int | None,
    dry_run: bool,
    detach: bool,
    watched: UUID | None,
    cancelled: UUID | None,
    **which: Any,
) -> None:
    """Send published events again: the same ids, in order per key, with a header `replay`.

    The workers do it, some a second; interrupting this command only stops watching.
    """
    settings = settings_in(context)
    with connection_in(context) as connection:
        if cancelled is not None:
            _cancel(connection, cancelled)
        elif watched is not None:
            _watch(connection, watched)
        elif dry_run:
            found = replays.count(connection, _wanted(which), routes=settings.routes)
            click.echo(f"{found} events would be sent again")
        else:
            rate = rate or settings.replay_rate
            begun = replays.create(connection, _wanted(which), routes=settings.routes, to_topic=to_topic, rate=rate)
            click.echo(f"replay {begun.replay_id}: {begun.total} events, {rate} a second at most")
            if not detach:
                _watch(connection, begun.replay_id)


def _cancel(connection: Connection, replay_id: UUID) -> None:
    if not replays.cancel(connection, replay_id=replay_id):
        raise NoSuchReplayError(f"replay {replay_id} is over, or never was")
    click.echo(f"replay {replay_id} is ended; what was sent stays sent")


def _watch(connection: Connection, replay_id: UUID) -> None:
    columns = (TextColumn("sent again"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        state = _get(connection, replay_id)
        bar = progress.add_task("", total=state.total)
        while state.finished_at is None:
            progress.update(bar, completed=state.sent + state.refused)
            time.sleep(0.5)
            state = _get(connection, replay_id)
        progress.update(bar, completed=state.sent + state.refused)
    click.echo(f"sent again: {state.sent}, refused or behind a refused one: {state.refused}, of {state.total}")


def _get(connection: Connection, replay_id: UUID) -> Replay:
    found = replays.get(connection, replay_id)
    if found is None:
        raise NoSuchReplayError(f"there is no replay {replay_id}")
    return found


def _wanted(which: dict[str, Any]) -> Wanted:
    kind, separator, name = (which.pop("aggregate") or "").partition("/")
    given = which | {"ids": list(which["ids"]) or None}
    wanted = Wanted(aggregate_type=kind or None, aggregate_id=name if separator else None, **given)
    if wanted.is_empty:
        raise InvalidFilterError("give --from, --to, --topic, --aggregate, --event-type or --id")
    return wanted
