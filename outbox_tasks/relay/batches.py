"""Publishes leased shards batch by batch, and settles and reads while the next one is on its way to Kafka."""

import logging
from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psycopg

from outbox_tasks.deadline import Deadline
from outbox_tasks.event import Event
from outbox_tasks.ports import Ports
from outbox_tasks.relay.backoff import settlement_of
from outbox_tasks.relay.collecting import collecting_rarely
from outbox_tasks.relay.lease import Lease
from outbox_tasks.relay.publish import Fate, Problem, publish
from outbox_tasks.relay.result import Result
from outbox_tasks.store import events, leases
from outbox_tasks.store.settle import Settlement, settle, settle_published

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one read brought, by id. `full` has the last id of each shard of which there may be more.

    `complete` is the horizon as it was before the read.
    """

    events: list[Event]
    full: dict[int, int]
    drained: frozenset[int]
    complete: int

    @property
    def shards(self) -> AbstractSet[int]:
        """The shards it was read from."""
        return self.full.keys() | self.drained

    @property
    def following(self) -> dict[int, int]:
        """The ids to read after while this batch is not settled yet; empty where that could pass over an event."""
        return self.full if all(last <= self.complete for last in self.full.values()) else {}

    def floors(self, shards: Mapping[int, int]) -> dict[int, int]:
        """Return the floors of its shards once all of it is published, given those they have."""
        ends = dict.fromkeys(self.drained, self.complete) | {
            shard: min(last, self.complete) for shard, last in self.full.items()
        }
        return {shard: max(floor, ends.get(shard, 0)) for shard, floor in shards.items()}


def read(ports: Ports, after: Mapping[int, int], *, size: int | None = None) -> Batch:
    """Read the next events of shards, of each a fair part of the batch size, or of `size`."""
    limit = max(1, (size or ports.settings.batch_size) // len(after))
    complete = ports.horizon.complete
    found = events.read_pending(ports.connection, after=after, limit=limit)
    counts = Counter(event.shard for event in found)
    full = {event.shard: event.id for event in found if event.cut or counts[event.shard] >= limit}
    return Batch(found, full, frozenset(after.keys() - full.keys()), complete)


@dataclass(slots=True)
class Work:
    """What became of leased shards so far, and the batch that is published but not settled yet."""

    lease: Lease
    ports: Ports
    result: Result
    down: Problem | None = None
    _unsettled: Batch | None = None

    @property
    def is_behind(self) -> bool:
        """Whether a batch is published but not settled."""
        return self._unsettled is not None

    def catch_up(self, after: Mapping[int, int]) -> Batch | None:
        """Settle what is published, then read on after these ids, if there are any.

        A read that fails is none: it comes again, and fails again, when what is being published now is settled.
        Neither is one that is no use any more, since a lease was lost.
        """
        batch, self._unsettled = self._unsettled, None
        if batch is not None:
            self._settle(batch)
        if not after or not after.keys() <= self.lease.floors.keys():
            return None
        try:
            return read(self.ports, after)
        except psycopg.Error as error:
            log.warning("reading ahead failed: %s", error)
            return None

    def conclude(self, batch: Batch, fate: Fate) -> bool:
        """Take in what became of a batch; says whether all of it was published, so that what follows may be sent."""
        self.lease.batches += 1
        whole = len(fate.published) == len(batch.events) and fate.down is None
        if whole:
            self._unsettled = batch
        else:
            self._settle_in_part(batch, fate)
        return whole

    def _settle(self, batch: Batch) -> None:
        """Settle a batch that was published whole."""
        floors = self.lease.floors | batch.floors(self._still_leased(batch.shards))
        done = self._still_leased(batch.drained, floors)
        if not batch.events:
            leases.release(self.ports.connection, token=self.lease.token, floors=done)
            self.lease.floors = {shard: floor for shard, floor in floors.items() if shard not in done}
            return
        leased, seen = settle_published(
            self.ports.connection, batch.events, token=self.lease.token, shards=batch.shards, done=done
        )
        self.ports.horizon.see(seen)
        published = [event for event in batch.events if event.shard in leased]
        self._note(Settlement(published=published))
        self.lease.floors = {shard: floor for shard, floor in floors.items() if shard in leased and shard not in done}

    def _settle_in_part(self, batch: Batch, fate: Fate) -> None:
        """Settle a batch of which not all was published. Floors stay: something may have been left pending."""
        self.down = fate.down
        settled = settle(
            self.ports.connection,
            settlement_of(fate, self.ports),
            token=self.lease.token,
            shards=batch.shards,
        )
        self._note(settled.written)
        done = self._still_leased(batch.drained)
        leases.release(self.ports.connection, token=self.lease.token, floors=done)
        self.lease.keep(self.lease.floors.keys() - done.keys() - (batch.shards - settled.leased))

    def _still_leased(self, shards: AbstractSet[int], floors: Mapping[int, int] | None = None) -> dict[int, int]:
        """Return the floors of those of some shards whose leases are not lost, as far as is known."""
        known = self.lease.floors if floors is None else floors
        return {shard: known[shard] for shard in shards & self.lease.floors.keys()}

    def _note(self, written: Settlement) -> None:
        """Count what was written down. Shards that moved on after a death are sound: its cause is not at their head."""
        self.result = self.result.plus(written)
        sound = self.lease.shaken.intersection(event.shard for event in written.published)
        if sound:
            leases.forget_deaths(self.ports.connection, token=self.lease.token, shards=sound)
            self.lease.shaken -= sound


def work_through(
    lease: Lease, result: Result, ports: Ports, end: Deadline, *, once: bool
) -> tuple[Result, Problem | None]:
    """Publish leased shards until they are empty or time is up, or `once` a batch of them, and give them back.

    Where there is a backlog, a thread beside this one settles the batch before and reads the one after while a batch
    is on its way: the connection is used by one of the two at a time.
    """
    work = Work(lease, ports, result)
    with collecting_rarely(), ThreadPoolExecutor(1, thread_name_prefix="outbox-beside") as beside:
        batch = read(ports, lease.floors) if lease.floors else None
        while batch is not None and not end.passed and not ports.stopping():
            batch = _publish_one(batch, work, beside, once=once)
            if once or work.down is not None:
                break
            if batch is None and lease.floors and not end.passed:
                batch = read(ports, lease.floors)
        work.catch_up({})
    leases.release(ports.connection, token=lease.token, floors=lease.floors)
    return work.result, work.down


def work_carefully(lease: Lease, result: Result, ports: Ports, end: Deadline) -> tuple[Result, Problem | None]:
    """Publish a shard one event at a time, each noted before it is touched: if it kills, the next run knows which."""
    work = Work(lease, ports, result)
    (shard,) = lease.floors
    while lease.floors and work.down is None and not end.passed and not ports.stopping():
        first = leases.suspect(ports.connection, token=lease.token, shard=shard)
        if first is None:
            break
        fate = _publish(alone := read(ports, {shard: first - 1}, size=1), work)
        work.conclude(alone, fate)
        work.catch_up({})
    leases.release(ports.connection, token=lease.token, floors=lease.floors)
    return work.result, work.down


def _publish(batch: Batch, work: Work) -> Fate:
    return publish(batch.events, work.ports, deadline=work.lease.end.within(work.ports.settings.delivery_seconds))


def _publish_one(batch: Batch, work: Work, beside: ThreadPoolExecutor, *, once: bool) -> Batch | None:
    """Publish a batch; returns the one after it, if it could be read meanwhile and its turn has come."""
    after = {} if once else batch.following
    meanwhile = beside.submit(work.catch_up, after) if after or work.is_behind else None
    try:
        fate = _publish(batch, work)
    finally:
        following = meanwhile.result() if meanwhile else None
    whole = work.conclude(batch, fate)
    if following is None:
        work.catch_up({})
    return following if whole else None
