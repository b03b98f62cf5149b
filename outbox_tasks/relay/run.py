"""What every run has in common: it looks for the broker first, and says why it stopped."""

import logging
from dataclasses import replace

from outbox_tasks.errors import BrokerUnavailableError, MisconfiguredError
from outbox_tasks.ports import Ports
from outbox_tasks.publishing.verdicts import Verdict, describe, verdict_of
from outbox_tasks.relay.publish import Problem
from outbox_tasks.relay.result import Result, Status

log = logging.getLogger(__name__)

LEASE_MARGIN_SECONDS = 1.0
"""Nothing is sent in the last second of a lease."""


def probe(ports: Ports) -> Problem | None:
    """See that the broker is there before anything is claimed; returns what is wrong."""
    try:
        ports.publisher.open()
    except (BrokerUnavailableError, MisconfiguredError) as error:
        return error
    return None


def stopped_by(result: Result, problem: Problem) -> Result:
    """Return the result of a run that ended because of a problem nobody's event is to blame for."""
    unauthorized = verdict_of(problem) is Verdict.UNAUTHORIZED
    status = Status.UNAUTHORIZED if unauthorized else Status.UNAVAILABLE
    log.warning("%s: %s", status, describe(problem))
    return replace(result, status=status, reason=describe(problem))
