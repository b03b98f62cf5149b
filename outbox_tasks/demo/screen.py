"""Shows how the demo is doing: a panel that changes in a terminal, else a plain line now and then."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outbox_tasks.demo.lags import Percentiles
from outbox_tasks.demo.stack import Stack

LINE_SECONDS = 2.0

_ORDER = """-H 'content-type: application/json' -d '{"customer": "me"}'"""
_LATEST = "SELECT id, event_type, state, published_at - created_at AS took FROM outbox ORDER BY id DESC LIMIT 5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """How far everything is at a moment."""

    seconds: float
    written: int
    published: int
    consumed: int
    rolled_back: int
    lag: Percentiles | None
    out_of_order: int
    duplicates: int
    phantoms: int

    @property
    def waiting(self) -> int:
        """Events that are committed and not published."""
        return self.written - self.published


class Screen(Protocol):
    """What the demo shows itself on."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, snapshot: Snapshot) -> None:
        """Show a newer state."""


def screen_for(stack: Stack) -> Screen:
    """Return the panel if somebody looks at it, else the plain lines."""
    return LiveScreen(stack) if sys.stdout.isatty() else PlainScreen(stack)


class LiveScreen:
    """A panel at the bottom of the terminal."""

    def __init__(self, stack: Stack) -> None:
        self._hints = Text("\n".join(hints(stack)), overflow="fold")
        self._live = Live(auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, snapshot: Snapshot) -> None:
        """Draw the panel again."""
        title = f"outbox_tasks demo, {snapshot.seconds:.0f} s (Ctrl-C ends it)"
        self._live.update(Panel(Group(_figures(snapshot), "", self._hints), title=title), refresh=True)


class PlainScreen:
    """A line every two seconds, for logs and pipes."""

    def __init__(self, stack: Stack) -> None:
        self._hints = hints(stack)
        self._next = 0.0

    def __enter__(self) -> Self:
        print(*self._hints, sep="\n", flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Lines stay as they are."""

    def update(self, snapshot: Snapshot) -> None:
        """Print a line if it is time for one."""
        if snapshot.seconds >= self._next:
            self._next = snapshot.seconds + LINE_SECONDS
            print(f"{snapshot.seconds:5.0f} s  {line(snapshot)}", flush=True)


def line(now: Snapshot) -> str:
    """Return a snapshot as one line."""
    order = f"out of order {now.out_of_order}" if now.out_of_order else "order ok"
    return (
        f"written {now.written}  published {now.published}  waiting {now.waiting}  consumed {now.consumed}  "
        f"lag {lag(now.lag)}  {order}  duplicates {now.duplicates}  "
        f"rolled back {now.rolled_back}, of these seen {now.phantoms}"
    )


def lag(percentiles: Percentiles | None) -> str:
    """Return the time from commit to consumer as text."""
    if percentiles is None:
        return "-"
    return f"p50 {percentiles.p50 * 1000:.0f} ms p99 {percentiles.p99 * 1000:.0f} ms"


def hints(stack: Stack) -> list[str]:
    """Return where to look and what to try."""
    celery = Path(sys.executable).with_name("celery")
    here = celery.relative_to(Path.cwd()) if celery.is_relative_to(Path.cwd()) else celery
    return [
        f"Flower    {stack.flower.url}  user {stack.flower.user}  password {stack.flower.password}",
        f"order     curl -X POST {stack.shop.url}/orders {_ORDER}",
        f"flush     {here} -b {stack.redis_url} call outbox.flush",
        f"look      psql {stack.database_url} -c '{_LATEST}'",
        f"logs      {stack.logs}",
    ]


def _figures(now: Snapshot) -> Table:
    table = Table.grid(padding=(0, 3))
    for name, value, comment in _rows(now):
        table.add_row(Text(name, style="bold"), Text(value, justify="right"), comment)
    return table


def _rows(now: Snapshot) -> list[tuple[str, str, str]]:
    good, bad = "[green]ok[/]", "[bold red]WRONG[/]"
    return [
        ("written", str(now.written), "events committed with their orders"),
        ("published", str(now.published), "acknowledged by the broker"),
        ("waiting", str(now.waiting), "committed, not published yet"),
        ("consumed", str(now.consumed), "read back from the topic"),
        ("lag", lag(now.lag), "from commit to consumer, latest 1000 events"),
        ("out of order", str(now.out_of_order), bad if now.out_of_order else good),
        ("duplicates", str(now.duplicates), "allowed after an unclean stop"),
        ("rolled back", str(now.rolled_back), "events whose transaction or savepoint was rolled back"),
        ("of these seen", str(now.phantoms), bad if now.phantoms else good),
    ]
