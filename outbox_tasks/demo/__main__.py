"""The command: `python -m outbox_tasks.demo [--seconds N] [--broker tansu|kafka]`."""

import sys
from functools import partial

import click
import httpx
from kafka.errors import KafkaError

from outbox_tasks.demo.interrupts import Interrupts
from outbox_tasks.demo.show import perform
from outbox_tasks.demo.stack import BrokerName, Stack, running
from outbox_tasks.errors import OutboxError
from outbox_tasks.testing.services import scratch_directory

_LOG_TAIL_LINES = 15


@click.command()
@click.option("--seconds", type=click.FloatRange(min=0), help="End after so long; without it, at Ctrl-C.")
@click.option("--broker", "broker_name", type=click.Choice(["tansu", "kafka"]), default="tansu", show_default=True)
def main(*, seconds: float | None, broker_name: BrokerName) -> None:
    """Run the whole path on this machine: orders, outbox, Celery, Kafka, and a consumer that checks.

    Exits with 1 if an event is missing, out of order, or came from a rolled-back transaction.
    """
    interrupts = Interrupts()
    interrupts.listen()
    try:
        code = run(interrupts, seconds=seconds, broker_name=broker_name)
    except KeyboardInterrupt:
        raise click.ClickException("interrupted before the end: nothing was judged") from None
    except (OutboxError, httpx.HTTPError, KafkaError) as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
    sys.exit(code)


def run(interrupts: Interrupts, *, seconds: float | None, broker_name: BrokerName) -> int:
    """Start everything, run the demo, stop everything; returns the exit code."""
    say = partial(print, flush=True)
    with (
        scratch_directory("outbox-demo-") as directory,
        running(directory, broker_name=broker_name, progress=say) as stack,
    ):
        try:
            code = perform(stack, seconds=seconds, interrupted=interrupts.look_for())
        finally:
            interrupts.ignore()
        if code:
            _print_logs(stack)
        return code


def _print_logs(stack: Stack) -> None:
    """Print how the programs ended, before their logs are removed."""
    for log in sorted(stack.logs.glob("*.log")):
        print(f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:], sep="\n")


if __name__ == "__main__":
    main()
