"""Publishes everything pending now, and waits for what other runs are publishing."""

import threading
from dataclasses import dataclass, replace

from outbox_tasks.ports import Ports
from outbox_tasks.relay.dispatch import dispatch
from outbox_tasks.relay.result import Result, Status
from outbox_tasks.store import events
from outbox_tasks.store.events import Waiting

LOOK_AGAIN_SECONDS = 0.2
"""How often a flush looks whether other runs are done with their shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """What a flush did, and what is left of what was there when it began."""

    result: Result
    left: Waiting

    def as_dict(self) -> dict[str, str | int]:
        """Return what is worth reading."""
        return self.result.as_dict() | {"left_pending": self.left.pending, "left_held": self.left.held}


def flush(ports: Ports, *, seconds: float) -> Flushed:
    """Publish every event that is visible now, for at most `seconds`; events written later may go along.

    Held events stay with their retries: they are counted, not waited for.
    """
    end, last = ports.deadline(seconds), events.last_id(ports.connection)
    result = Result()
    while True:
        result = _add(result, dispatch(ports, seconds=end.left()))
        left = events.count_waiting(ports.connection, up_to=last)
        if not left.pending or end.passed or result.status not in (Status.IDLE, Status.DONE, Status.MORE):
            return Flushed(result=result, left=left)
        threading.Event().wait(min(LOOK_AGAIN_SECONDS, end.left()))


def _add(before: Result, more: Result) -> Result:
    return replace(
        more,
        status=before.status if more.status is Status.IDLE else more.status,
        published=before.published + more.published,
        refused=before.refused + more.refused,
        held=before.held + more.held,
    )
