"""Commands about blocked keys: which there are, and try one now."""

import click

from outbox_tasks.cli.support import as_json, connection_in, plainly, print_json, print_table
from outbox_tasks.errors import NotBlockedError
from outbox_tasks.store import blocked_keys

COLUMNS = {
    "ordering_key": "key",
    "kind": "kind",
    "held": "held",
    "blocked_at": "since",
    "retry_at": "next try",
    "event_id": "event",
    "reason": "why",
}


@click.command()
@click.option("--key", help="Only this ordering key.")
@click.option("--limit", default=1000, show_default=True, help="At most so many.")
@as_json
@click.pass_context
@plainly
def blocked(context: click.Context, *, key: str | None, limit: int, as_json: bool) -> None:
    """List the blocked keys, the longest blocked first: why, how many events wait, when it is tried again."""
    with connection_in(context) as connection:
        keys = blocked_keys.find(connection, key=key, limit=limit)
    if as_json:
        print_json(keys)
    else:
        print_table(keys, COLUMNS, empty="no key is blocked")


@click.command()
@click.argument("key")
@click.pass_context
@plainly
def retry(context: click.Context, *, key: str) -> None:
    """Try a blocked KEY (as `outbox blocked` shows it) at the next tick instead of later."""
    with connection_in(context) as connection:
        if not blocked_keys.retry_now(connection, key=key):
            raise NotBlockedError(_why_not(blocked_keys.find(connection, key=key), key))
    click.echo(f"{key} is tried at the next tick")


def _why_not(found: list[blocked_keys.BlockedKey], key: str) -> str:
    if not found:
        return f"key {key!r} is not blocked: `outbox blocked` lists those that are"
    if found[0].kind == "exhausted":
        return f"key {key!r} is about to go on by itself: its oldest event becomes a dead letter at the next tick"
    return f"key {key!r} waits because of dead letter {found[0].event_id}: redrive or discard it"
