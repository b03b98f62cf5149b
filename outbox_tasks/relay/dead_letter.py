"""Makes dead letters of events that used up their attempts, and lets their keys go on or wait for a person."""

import logging
from dataclasses import dataclass

from outbox_tasks.ports import Ports
from outbox_tasks.relay.result import Status
from outbox_tasks.store import dead_letters

log = logging.getLogger(__name__)

KEYS_PER_TRANSACTION = 10
"""Dead letters made in one statement: few enough to be short, with payloads of a megabyte each, written twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buried:
    """How many dead letters a run made."""

    dead: int

    def as_dict(self) -> dict[str, str | int]:
        """Return what is worth reading."""
        return {"status": str(Status.DONE if self.dead else Status.IDLE), "dead": self.dead}


def dead_letter(ports: Ports) -> Buried:
    """Move exhausted events to the dead letters until there is none, or the process shall stop."""
    settings, dead = ports.settings, 0
    while not ports.stopping():
        buried = dead_letters.bury(
            ports.connection,
            limit=KEYS_PER_TRANSACTION,
            topic=settings.dead_letter_topic,
            wait=settings.dead_letter_policy == "block",
        )
        for letter in buried:
            log.error("event %s of key %s is a dead letter: %s", letter.event_id, letter.ordering_key, letter.reason)
        dead += len(buried)
        if not buried:
            break
    return Buried(dead=dead)
