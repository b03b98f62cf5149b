"""The dispatch run: claim shards, then read, publish and settle until they are empty, and release them."""

import logging
from collections.abc import Callable
from dataclasses import replace

from outbox_tasks.deadline import Deadline
from outbox_tasks.event import SHARDS
from outbox_tasks.ports import Ports
from outbox_tasks.relay.batches import work_carefully, work_through
from outbox_tasks.relay.lease import Lease
from outbox_tasks.relay.publish import Problem
from outbox_tasks.relay.result import Result, Status
from outbox_tasks.relay.run import LEASE_MARGIN_SECONDS, probe, stopped_by
from outbox_tasks.relay.staying import Patience, StayLimit
from outbox_tasks.store import leases

log = logging.getLogger(__name__)


NO_STAY = StayLimit()


def nobody() -> None:
    """Tell nobody that there is more to do."""


def dispatch(
    ports: Ports,
    *,
    wake_another: Callable[[], None] = nobody,
    seconds: float | None = None,
    limit: StayLimit = NO_STAY,
) -> Result:
    """Publish pending events, in order per key, until nothing is pending or `outbox_run_seconds` are over.

    `seconds` makes the run shorter. A run that published something may stay for more; where another stays already, it
    leaves the rest to that one.

    It answers the bell before it first looks at the table, and whenever it heard it. What rings while it works is left
    to the message that was sent for it, or to the stay: else there would be a message for every claim of a long run.

    `wake_another` is called before work starts where more is pending than this run took, once a run, and at the end
    where time ran out before the work did.

    Raises:
        psycopg.Error: the database went away; leases still held end by themselves.
    """
    longest = ports.settings.run_seconds
    run_end = ports.deadline(longest if seconds is None else min(seconds, longest))
    down = probe(ports)
    if down is not None:
        return stopped_by(Result(), down)
    covered = ports.bell.answer()
    with ports.bell.stay() as stay:
        patience = Patience(ports, stay, limit, end=run_end)
        result = _run(ports, run_end, wake_another, patience, wide=covered)
    if stay.missed and not ports.stopping():
        wake_another()
    return result


def _run(
    ports: Ports, run_end: Deadline, wake_another: Callable[[], None], patience: Patience, *, wide: bool
) -> Result:
    """Claim and work until nothing is left and nothing more comes, or another run listens.

    A `wide` look takes whatever shards there are, but of them one batch: so a burst is one look, and a backlog is still
    shared with other runs. The next look is wide where one batch emptied the shards of the last.
    """
    result, alone = Result(), True
    while not run_end.passed and not ports.stopping():
        lease, more = _claim(ports, wide=wide)
        found = bool(lease.floors)
        if found:
            if more and alone:
                wake_another()
                alone = False
            result, down = _work(lease, result, ports, run_end, once=wide)
            more = more or bool(lease.floors)
            wide = lease.batches == 1 and not lease.floors and not lease.shaken
            if down is not None and not ports.stopping():
                return stopped_by(result, down)
        if not patience.look_again(found=found, more=more, published=bool(result.published)):
            return result
    if not ports.stopping():
        wake_another()
    return replace(result, status=Status.STOPPED if ports.stopping() else Status.MORE)


def _claim(ports: Ports, *, wide: bool) -> tuple[Lease, bool]:
    """Claim shards; says whether others were left. The end of the lease counts from before the claim is sent.

    A wide claim takes no more than a batch has events.
    """
    settings, token = ports.settings, ports.new_token()
    end = ports.deadline(settings.lease_seconds - LEASE_MARGIN_SECONDS)
    claim = leases.claim(
        ports.connection,
        token=token,
        owner=ports.owner,
        limit=max(settings.shards_per_run, min(settings.batch_size, SHARDS)) if wide else settings.shards_per_run,
        seconds=settings.lease_seconds,
    )
    ports.horizon.see(claim.seen)
    return Lease(token, claim.floors, end, claim.shaken, claim.deadly), claim.more


def _work(
    lease: Lease, result: Result, ports: Ports, run_end: Deadline, *, once: bool
) -> tuple[Result, Problem | None]:
    """Publish the leased shards until they are empty or time is up, or one batch; gives back whatever is left of them.

    Shards that runs died with come last, so that one more death costs the others nothing, but they do come: the
    others have half of the time.
    """
    if not lease.deadly:
        return work_through(lease, result, ports, run_end, once=once)
    _accuse(lease, ports)
    usual = lease.part(lease.floors.keys() - lease.deadly)
    result, down = work_through(usual, result, ports, run_end.within(run_end.left() / 2), once=once)
    left = set(lease.deadly)
    while left and down is None and not run_end.passed and not ports.stopping():
        result, down = work_carefully(lease.part([left.pop()]), result, ports, run_end)
    leases.put_back(ports.connection, token=lease.token, shards=left)
    return result, down


def _accuse(lease: Lease, ports: Ports) -> None:
    for event_id in leases.accuse(ports.connection, token=lease.token):
        log.error("event %s killed the runs that handled it: its key is blocked, it becomes a dead letter", event_id)
