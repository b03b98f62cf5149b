"""The dispatch run: claim shards, then read, publish and settle until they are empty, and release them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from uuid import UUID

from outbox_tasks.deadline import Deadline
from outbox_tasks.event import Event
from outbox_tasks.ports import Ports
from outbox_tasks.relay.backoff import settlement_of
from outbox_tasks.relay.publish import Problem, publish
from outbox_tasks.relay.result import Result, Status
from outbox_tasks.relay.run import LEASE_MARGIN_SECONDS, probe, stopped_by
from outbox_tasks.store import events, leases
from outbox_tasks.store.settle import settle


def nobody() -> None:
    """Tell nobody that there is more to do."""


@dataclass(slots=True)
class Lease:
    """The shards this run may publish, each with the last id read of it; sending ends at `end`."""

    token: UUID
    after: dict[int, int]
    end: Deadline

    def advance(self, batch: list[Event], *, limit: int) -> list[int]:
        """Note what was read; return the shards of which everything was."""
        counts = dict.fromkeys(self.after, 0)
        for event in batch:
            counts[event.shard] += 1
            self.after[event.shard] = event.id
        return [shard for shard, count in counts.items() if count < limit]

    def keep(self, shards: Collection[int]) -> None:
        """Forget all shards but these."""
        self.after = {shard: after for shard, after in self.after.items() if shard in shards}


def dispatch(ports: Ports, *, wake_another: Callable[[], None] = nobody) -> Result:
    """Publish pending events, in order per key, until nothing is pending or `outbox_run_seconds` are over.

    `wake_another` is called before work starts where more is pending than this run took, and at the end where
    time ran out before the work did.

    Raises:
        psycopg.Error: the database went away; leases still held end by themselves.
    """
    run_end = ports.deadline(ports.settings.run_seconds)
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
        if down is not None:
            return stopped_by(result, down)
    if not ports.stopping():
        wake_another()
    return replace(result, status=Status.STOPPED if ports.stopping() else Status.MORE)


def _claim(ports: Ports) -> tuple[Lease, bool]:
    """Claim shards. The end of the lease is counted from before the claim is sent."""
    settings, token = ports.settings, ports.new_token()
    end = ports.deadline(settings.lease_seconds - LEASE_MARGIN_SECONDS)
    claim = leases.claim(
        ports.connection,
        token=token,
        owner=ports.owner,
        limit=settings.shards_per_run,
        seconds=settings.lease_seconds,
    )
    return Lease(token, dict.fromkeys(claim.shards, 0), end), claim.more


def _work(lease: Lease, result: Result, ports: Ports, run_end: Deadline) -> tuple[Result, Problem | None]:
    """Publish the leased shards until they are empty or time is up; gives back whatever is left of them."""
    down: Problem | None = None
    while lease.after and down is None and not run_end.passed and not ports.stopping():
        result, down = _publish_batch(lease, result, ports)
    leases.release(ports.connection, token=lease.token, shards=lease.after)
    return result, down


def _publish_batch(lease: Lease, result: Result, ports: Ports) -> tuple[Result, Problem | None]:
    """Read, publish, settle once. Shards that were read to their end are released with the settlement."""
    limit = max(1, ports.settings.batch_size // len(lease.after))
    batch = events.read_pending(ports.connection, after=lease.after, limit=limit)
    fate = publish(batch, ports, deadline=lease.end.within(ports.settings.delivery_seconds))
    settled = settle(ports.connection, settlement_of(fate, ports), token=lease.token, shards=lease.after)
    drained = lease.advance(batch, limit=limit)
    leases.release(ports.connection, token=lease.token, shards=drained)
    lease.keep(settled.leased.difference(drained))
    return result.plus(settled.written), fate.down
