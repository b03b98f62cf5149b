"""Commands for people: `celery -A <app> outbox …`."""

import click

from outbox_tasks.cli.blocked import blocked, retry
from outbox_tasks.cli.dead_letters import dead_letters
from outbox_tasks.cli.deployment import check, migrate
from outbox_tasks.cli.notify import notify
from outbox_tasks.cli.replay import replay
from outbox_tasks.cli.status import show, status, tail


@click.group()
def outbox() -> None:
    """Make the tables and look after the outbox."""


for command in (status, show, tail, migrate, check, blocked, retry, dead_letters, replay, notify):
    outbox.add_command(command)
