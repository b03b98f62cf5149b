"""The retry run: claim blocked keys that are due, publish their held events in order, free them or block them again."""

from dataclasses import dataclass, replace
from uuid import UUID

from outbox_tasks.deadline import Deadline
from outbox_tasks.ports import Ports
from outbox_tasks.relay.backoff import settlement_of
from outbox_tasks.relay.publish import Problem, publish
from outbox_tasks.relay.result import Result, Status
from outbox_tasks.relay.run import LEASE_MARGIN_SECONDS, probe, stopped_by
from outbox_tasks.store import blocked_keys, events
from outbox_tasks.store.settle import settle_held

KEYS_PER_CLAIM = 500
"""Keys one claim takes at most: most of them hold an event or two."""


@dataclass(frozen=True, slots=True)
class KeyLease:
    """The blocked keys this run may publish; sending ends at `end`."""

    token: UUID
    keys: frozenset[str]
    end: Deadline


def retry(ports: Ports) -> Result:
    """Publish held events of keys that are due, until none is or `outbox_run_seconds` are over.

    Raises:
        psycopg.Error: the database went away; leases still held end by themselves.
    """
    run_end = ports.deadline(ports.settings.run_seconds)
    blocked_keys.exhaust_keys(ports.connection)
    if not blocked_keys.any_due(ports.connection):
        return Result()
    result, down = Result(), probe(ports)
    while down is None and not run_end.passed and not ports.stopping():
        lease = _claim(ports)
        if not lease.keys:
            return result
        result, down = _work(lease, result, ports, run_end)
    if down is not None and not ports.stopping():
        return stopped_by(result, down)
    return replace(result, status=Status.STOPPED if ports.stopping() else Status.MORE)


def _claim(ports: Ports) -> KeyLease:
    """Claim keys, and have topics asked anew that some of them wait for.

    The end of the lease is counted from before the claim is sent.
    """
    seconds, token = ports.settings.lease_seconds, ports.new_token()
    end = ports.deadline(seconds - LEASE_MARGIN_SECONDS)
    keys = blocked_keys.claim_keys(
        ports.connection, token=token, owner=ports.owner, limit=KEYS_PER_CLAIM, seconds=seconds
    )
    ports.publisher.topics.pardon(filter(None, keys.values()))
    return KeyLease(token, frozenset(keys), end)


def _work(lease: KeyLease, result: Result, ports: Ports, run_end: Deadline) -> tuple[Result, Problem | None]:
    """Publish what the leased keys hold until they are free, blocked again, or time is up; gives them back."""
    down: Problem | None = None
    while lease.keys and down is None and not run_end.passed and not ports.stopping():
        limit = max(1, ports.settings.batch_size // len(lease.keys))
        batch = events.read_held(ports.connection, keys=list(lease.keys), limit=limit)
        fate = publish(batch, ports, deadline=lease.end.within(ports.settings.delivery_seconds))
        settled = settle_held(ports.connection, settlement_of(fate, ports), token=lease.token, keys=lease.keys)
        lease, result, down = replace(lease, keys=settled.leased), result.plus(settled.written), fate.down
    blocked_keys.release_keys(ports.connection, token=lease.token)
    return result, down
