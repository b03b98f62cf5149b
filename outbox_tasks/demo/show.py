"""The course of the demo: load until time is over, wait for the rest to arrive, compare, say what came out."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import psycopg

from outbox_tasks.deadline import Deadline
from outbox_tasks.demo import tables
from outbox_tasks.demo.checks import Judgement, TopicCheck, judge
from outbox_tasks.demo.consumer import consume_until
from outbox_tasks.demo.lags import Lags
from outbox_tasks.demo.load import CLIENTS, Load, shop_until
from outbox_tasks.demo.screen import Screen, Snapshot, lag, screen_for
from outbox_tasks.demo.stack import TOPIC, Stack

DRAIN_SECONDS = 20.0
_LOOK_SECONDS = 0.25
_SETTLE_SECONDS = 1.0
"""After everything has arrived, how long a record that should not be there is waited for."""


@dataclass(slots=True)
class Show:
    """What goes on while the demo runs."""

    stack: Stack
    connection: tables.Connection
    screen: Screen
    check: TopicCheck
    load: Load
    stop_load: threading.Event = field(default_factory=threading.Event)
    stop_reading: threading.Event = field(default_factory=threading.Event)
    threads: list["Future[None]"] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def start(self, pool: ThreadPoolExecutor) -> None:
        """Start the consumer and the customers."""
        self.threads.append(pool.submit(self._consume))
        self.threads += [pool.submit(self._shop, seed) for seed in range(CLIENTS)]

    def go_on(self, until: Callable[[], bool]) -> Snapshot:
        """Show how it goes until something holds, or until the load or the consumer fails."""
        while True:
            self._raise_failures()
            now = self._look()
            self.screen.update(now)
            if until():
                return now
            threading.Event().wait(_LOOK_SECONDS)

    def drain(self) -> Snapshot:
        """Stop the load and wait until everything committed has been consumed, or for so long."""
        self.stop_load.set()
        for customer in self.threads[1:]:
            customer.result()
        end = Deadline.after(DRAIN_SECONDS, clock=time.monotonic)
        self.go_on(until=lambda: end.passed or self._all_arrived())
        late = Deadline.after(_SETTLE_SECONDS, clock=time.monotonic)
        return self.go_on(until=lambda: late.passed)

    def judge(self) -> Judgement:
        """Compare what was consumed with the tables."""
        return judge(self.check, tables.read_tables(self.connection))

    def _all_arrived(self) -> bool:
        now = self._look()
        return now.waiting == 0 and now.consumed >= now.written

    def _look(self) -> Snapshot:
        progress = tables.read_progress(self.connection)
        return Snapshot(
            seconds=time.monotonic() - self.began,
            written=progress.written,
            published=progress.published,
            consumed=len(self.check.firsts),
            rolled_back=self.load.rolled_back,
            lag=self.load.lags.recent(),
            out_of_order=len(self.check.out_of_order),
            duplicates=self.check.duplicates,
            phantoms=len(self.check.phantoms),
        )

    def _raise_failures(self) -> None:
        for thread in self.threads:
            if thread.done():
                thread.result()

    def _consume(self) -> None:
        consume_until(
            self.stop_reading,
            bootstrap_servers=self.stack.broker.bootstrap_servers,
            topic=TOPIC,
            check=self.check,
            lags=self.load.lags,
        )

    def _shop(self, seed: int) -> None:
        shop_until(self.stop_load, self.load, url=self.stack.shop.url, seed=seed)


def perform(stack: Stack, *, seconds: float | None, interrupted: threading.Event) -> int:
    """Run the demo on what is running; returns the exit code.

    Raises:
        LoadError, httpx.HTTPError, kafka.errors.KafkaError: the load or the consumer failed.
    """
    with _show(stack) as show:
        end = Deadline.after(float("inf") if seconds is None else seconds, clock=time.monotonic)
        loaded = show.go_on(until=lambda: end.passed or interrupted.is_set())
        final, judgement = show.drain(), show.judge()
    print(*summary(final, judgement, lags=show.load.lags, loaded=loaded), sep="\n", flush=True)
    return 1 if judgement.problems else 0


@contextmanager
def _show(stack: Stack) -> Iterator[Show]:
    with (
        psycopg.connect(stack.database_url, autocommit=True) as connection,
        ThreadPoolExecutor(CLIENTS + 1) as pool,
        screen_for(stack) as screen,
    ):
        show = Show(stack=stack, connection=connection, screen=screen, check=TopicCheck(), load=Load(Lags()))
        try:
            show.start(pool)
            yield show
        finally:
            show.stop_load.set()
            show.stop_reading.set()


def summary(final: Snapshot, judgement: Judgement, *, lags: Lags, loaded: Snapshot) -> list[str]:
    """Return what came out, in lines."""
    rate = loaded.written / loaded.seconds
    lines = [
        "",
        f"summary after {loaded.seconds:.1f} s of load and {final.seconds - loaded.seconds:.1f} s of waiting",
        f"  written      {final.written} events committed with their orders, {rate:.0f}/s",
        f"  rolled back  {final.rolled_back} events, of which {len(judgement.phantoms)} reached the topic",
        f"  published    {final.published}, waiting {final.waiting}",
        f"  consumed     {final.consumed}, and {final.duplicates} duplicates",
        f"  lag          {lag(lags.all())}, from commit to consumer",
    ]
    return [*lines, *_verdict(judgement)]


def _verdict(judgement: Judgement) -> list[str]:
    if judgement.problems:
        return ["WRONG", *(f"  {problem}" for problem in judgement.problems)]
    return ["everything committed is in the topic, in order per order, and nothing else"]
