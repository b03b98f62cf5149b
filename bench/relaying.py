"""Our relay over a backlog: a worker made warm, a backlog written, one dispatch sent, the drain watched."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import psutil
import psycopg

from bench.available import publisher_settings
from bench.backlog import write_backlog
from bench.celery_processes import app_of, busy, log_tail, pool_of, worker
from bench.judge import judge
from bench.meters import Meter, Sampler
from bench.rig import Rig
from bench.sizes import KEYS, PAYLOAD_BYTES
from bench.topics import end_of
from bench.waiting import UnfinishedError, until

STALL_SECONDS = 5.0
"""After so long without progress another dispatch is sent, as beat would have done sooner; it is counted."""

WARM_EVENTS = 4_000
"""Published before anything is measured: connections, plans and what is known of the topic are then there."""

SLOWEST_RATE = 400
"""Events a second below which a drain counts as never finished."""

# Of what was published since a moment: how much, from the start of the first run until the last event.
RATE = """
SELECT count(*), extract(epoch FROM max(published_at))::float8,
       (SELECT extract(epoch FROM min(started_at))::float8 FROM outbox_run
         WHERE task = 'outbox.dispatch' AND ended_at > to_timestamp(%(since)s)
           AND (report ->> 'published')::int > 0)
  FROM outbox WHERE state = 'published' AND published_at > to_timestamp(%(since)s)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a worker is given to do."""

    events: int
    keys: int = KEYS
    payload_bytes: int = PAYLOAD_BYTES


@dataclass(slots=True, kw_only=True)
class Relay:
    """A worker at work on a database and a topic."""

    rig: Rig
    database_url: str
    topic: str
    pid: int
    after: int
    """The last id of the table before this worker's events."""
    written: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)
    """Seconds, and the resident bytes of the largest child, over the last drain."""

    def drain(self, load: Load) -> dict[str, Any]:
        """Write a backlog, have it published, and return what that took.

        Raises:
            UnfinishedError: it did not come to an end.
        """
        write_backlog(self.database_url, load.events, keys=load.keys, payload_bytes=load.payload_bytes)
        self.rig.checkpoint()
        self.written += load.events
        meter = Meter(self.rig, self.database_url, pids=[self.pid])
        since = time.time()
        kicks, curve = self._publish(load)
        cost = meter.read()
        until(lambda: not busy(app_of(self.rig)), "the last runs to end", seconds=60)
        return self._rate(since, load) | asdict(cost) | {"kicks": kicks, "curve": curve}

    def judge(self) -> dict[str, Any]:
        """Hold the topic against the table."""
        return asdict(judge(self.database_url, self.rig.broker.bootstrap_servers, self.topic, after=self.after))

    def _publish(self, load: Load) -> tuple[int, list[tuple[float, float]]]:
        with (
            end_of(self.rig.broker.bootstrap_servers, self.topic) as end,
            Sampler(end) as sent,
            Sampler(self._largest_child) as memory,
        ):
            app_of(self.rig).send_task("outbox.dispatch")
            kicks = self._watch(sent, seconds=60 + load.events / SLOWEST_RATE)
        self.memory = memory.samples
        return kicks, [(at, value - self.written + load.events) for at, value in sent.samples]

    def _watch(self, sent: Sampler, *, seconds: float) -> int:
        """Return when all is published, and how often the relay had to be reminded."""
        progress = _Progress(partial(app_of(self.rig).send_task, "outbox.dispatch"))
        with psycopg.connect(
            self.database_url, autocommit=True, options="-c enable_seqscan=off -c log_statement=none"
        ) as connection:
            try:
                until(lambda: self._done(connection, progress, sent.last), "the drain", seconds=seconds)
            except UnfinishedError as error:
                raise UnfinishedError(
                    f"{error}: {sent.last:.0f} of {self.written} sent; {log_tail(self.rig.directory)}"
                ) from None
        return progress.kicks

    def _done(self, connection: psycopg.Connection[Any], progress: "_Progress", sent: float) -> bool:
        progress.see(sent)
        return sent >= self.written and not _pending(connection)

    def _rate(self, since: float, load: Load) -> dict[str, Any]:
        with psycopg.connect(self.database_url, options="-c log_statement=none") as connection:
            row = connection.execute(RATE, {"since": since}).fetchone()
        if row is None or row[0] < load.events:
            raise UnfinishedError(f"{row[0] if row else 0} of {load.events} events are marked published")
        _, ended, started = row
        seconds = ended - (since if started is None else started)
        return {"events": load.events, "seconds": seconds, "rate": load.events / seconds}

    def _largest_child(self) -> float:
        try:
            return float(max((child.memory_info().rss for child in pool_of(self.pid)), default=0))
        except psutil.NoSuchProcess:
            return 0.0


class _Progress:
    """Notices that nothing moves."""

    def __init__(self, kick: Callable[[], object]) -> None:
        self._kick = kick
        self._seen = 0.0
        self._since = time.monotonic()
        self.kicks = 0

    def see(self, value: float) -> None:
        if value > self._seen:
            self._seen, self._since = value, time.monotonic()
        elif time.monotonic() - self._since > STALL_SECONDS:
            self._since = time.monotonic()
            self.kicks += 1
            self._kick()


@contextmanager
def relay(rig: Rig, *, children: int, publisher: str, **settings: object) -> Iterator[Relay]:
    """Run a worker on a fresh database and topic; its children are connected to everything."""
    with rig.database() as database_url:
        rig.log_statements_of(database_url)
        with relay_on(rig, database_url, children=children, publisher=publisher, **settings) as at_work:
            yield at_work


@contextmanager
def relay_on(rig: Rig, database_url: str, *, children: int, publisher: str, **settings: object) -> Iterator[Relay]:
    """Run a worker on a database that is there, with a fresh topic."""
    topic = rig.new_topic()
    environment = rig.environment(database_url, topic, **publisher_settings(publisher), **settings)
    with worker(rig, environment, children=children) as pid:
        at_work = Relay(rig=rig, database_url=database_url, topic=topic, pid=pid, after=_last_id(database_url))
        _connect(rig, pid)
        at_work.drain(Load(events=WARM_EVENTS))
        yield at_work


def drain_once(rig: Rig, load: Load, *, children: int, publisher: str) -> dict[str, Any]:
    """Drain one backlog with a fresh worker, and judge it."""
    with relay(rig, children=children, publisher=publisher) as at_work:
        return at_work.drain(load) | at_work.judge()


def _connect(rig: Rig, pid: int) -> None:
    """Have every child connect to the database and to Kafka: a run that finds nothing does."""
    app = app_of(rig)
    for _ in range(8 * len(pool_of(pid))):
        app.send_task("outbox.dispatch")
    until(lambda: not busy(app), "the children to be warm", seconds=60)


def _pending(connection: psycopg.Connection[Any]) -> bool:
    return connection.execute("SELECT FROM outbox WHERE state = 'pending' LIMIT 1").fetchone() is not None


def _last_id(database_url: str) -> int:
    with psycopg.connect(database_url, options="-c log_statement=none") as connection:
        row = connection.execute("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM outbox_id_seq").fetchone()
    return int(row[0]) if row else 0
