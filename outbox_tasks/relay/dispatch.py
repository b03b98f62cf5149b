"""The dispatch run: claim shards, then read, publish and settle until they are empty, and release them."""

import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from uuid import UUID

from outbox_tasks.deadline import Deadline
from outbox_tasks.ports import Ports
from outbox_tasks.relay.backoff import settlement_of
from outbox_tasks.relay.publish import Problem, publish
from outbox_tasks.relay.result import Result, Status
from outbox_tasks.relay.run import LEASE_MARGIN_SECONDS, probe, stopped_by
from outbox_tasks.store import events, leases
from outbox_tasks.store.settle import Settlement, settle

log = logging.getLogger(__name__)


def nobody() -> None:
    """Tell nobody that there is more to do."""


@dataclass(slots=True)
class Lease:
    """The shards this run may publish, each with the id to read after; sending ends at `end`.

    That id is 0 but for an event looked at alone: reading on from the last id seen would pass over a transaction that
    drew its first id before it and commits now, and publish its later events before the first one.
    `shaken` are those of them an earlier run died with, `deadly` those that may have been the cause.
    """

    token: UUID
    after: dict[int, int]
    end: Deadline
    shaken: frozenset[int] = frozenset()
    deadly: frozenset[int] = frozenset()

    def keep(self, shards: Collection[int]) -> None:
        """Forget all shards but these."""
        self.after = {shard: after for shard, after in self.after.items() if shard in shards}

    def part(self, shards: Collection[int]) -> "Lease":
        """Return the lease of some of the shards."""
        return Lease(self.token, dict.fromkeys(shards, 0), self.end, self.shaken.intersection(shards))


def dispatch(ports: Ports, *, wake_another: Callable[[], None] = nobody, seconds: float | None = None) -> Result:
    """Publish pending events, in order per key, until nothing is pending or `outbox_run_seconds` are over.

    `seconds` makes the run shorter.

    `wake_another` is called before work starts where more is pending than this run took, and at the end where
    time ran out before the work did.

    Raises:
        psycopg.Error: the database went away; leases still held end by themselves.
    """
    longest = ports.settings.run_seconds
    run_end = ports.deadline(longest if seconds is None else min(seconds, longest))
    down = probe(ports)
    if down is not None:
        return stopped_by(Result(), down)
    result, first = Result(), True
    while not run_end.passed and not ports.stopping():
        lease, more = _claim(ports)
        if not lease.after:
            return result
        if more and first:
            wake_another()
        first = False
        result, down = _work(lease, result, ports, run_end)
        if down is not None and not ports.stopping():
            return stopped_by(result, down)
    if not ports.stopping():
        wake_another()
    return replace(result, status=Status.STOPPED if ports.stopping() else Status.MORE)


def _claim(ports: Ports) -> tuple[Lease, bool]:
    """Claim shards. The end of the lease is counted from before the claim is sent."""
    settings, token = ports.settings, ports.new_token()
    end = ports.deadline(settings.lease_seconds - LEASE_MARGIN_SECONDS)
    ports.bell.answer()
    claim = leases.claim(
        ports.connection,
        token=token,
        owner=ports.owner,
        limit=settings.shards_per_run,
        seconds=settings.lease_seconds,
    )
    return Lease(token, dict.fromkeys(claim.shards, 0), end, claim.shaken, claim.deadly), claim.more


def _work(lease: Lease, result: Result, ports: Ports, run_end: Deadline) -> tuple[Result, Problem | None]:
    """Publish the leased shards until they are empty or time is up; gives back whatever is left of them.

    Shards that runs died with come last, so that one more death costs the others nothing, but they do come: the
    others have half of the time.
    """
    down: Problem | None = None
    if lease.deadly:
        _accuse(lease, ports)
    usual = lease.part(lease.after.keys() - lease.deadly)
    usual_end = run_end.within(run_end.left() / 2) if lease.deadly else run_end
    while usual.after and down is None and not usual_end.passed and not ports.stopping():
        limit = max(1, ports.settings.batch_size // len(usual.after))
        result, down = _publish_batch(usual, result, ports, limit=limit)
    leases.release(ports.connection, token=lease.token, shards=usual.after)
    left = set(lease.deadly)
    while left and down is None and not run_end.passed and not ports.stopping():
        result, down = _work_carefully(lease.part([left.pop()]), result, ports, run_end)
    leases.put_back(ports.connection, token=lease.token, shards=left)
    return result, down


def _accuse(lease: Lease, ports: Ports) -> None:
    for event_id in leases.accuse(ports.connection, token=lease.token):
        log.error("event %s killed the runs that handled it: its key is blocked, it becomes a dead letter", event_id)


def _work_carefully(lease: Lease, result: Result, ports: Ports, run_end: Deadline) -> tuple[Result, Problem | None]:
    """Publish a shard one event at a time, each noted before it is touched: if it kills, the next run knows which."""
    (shard,) = lease.after
    down: Problem | None = None
    while lease.after and down is None and not run_end.passed and not ports.stopping():
        first = leases.suspect(ports.connection, token=lease.token, shard=shard)
        if first is None:
            break
        lease.after[shard] = first - 1
        result, down = _publish_batch(lease, result, ports, limit=1)
    leases.release(ports.connection, token=lease.token, shards=[shard])
    return result, down


def _publish_batch(lease: Lease, result: Result, ports: Ports, *, limit: int) -> tuple[Result, Problem | None]:
    """Read, publish, settle once. Shards that were read to their end are released with the settlement."""
    batch = events.read_pending(ports.connection, after=lease.after, limit=limit)
    fate = publish(batch, ports, deadline=lease.end.within(ports.settings.delivery_seconds))
    settled = settle(ports.connection, settlement_of(fate, ports), token=lease.token, shards=lease.after)
    _forget_deaths(lease, settled.written, ports)
    counts = Counter(event.shard for event in batch)
    drained = [shard for shard in lease.after if counts[shard] < limit]
    leases.release(ports.connection, token=lease.token, shards=drained)
    lease.keep(settled.leased.difference(drained))
    return result.plus(settled.written), fate.down


def _forget_deaths(lease: Lease, written: Settlement, ports: Ports) -> None:
    """Let shards count as sound again that moved on after a death: its cause is not at their head."""
    sound = lease.shaken.intersection(event.shard for event in written.published)
    if sound:
        leases.forget_deaths(ports.connection, token=lease.token, shards=sound)
        lease.shaken -= sound
