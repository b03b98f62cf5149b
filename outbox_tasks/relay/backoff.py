"""When a refused event is tried again."""

import random

from outbox_tasks.event import Event
from outbox_tasks.ports import Ports
from outbox_tasks.publishing.verdicts import Verdict, describe, verdict_of
from outbox_tasks.relay.publish import Fate, Problem
from outbox_tasks.store.settle import Refusal, Settlement


def full_jitter(*, attempts: int, base_seconds: float, max_seconds: float, chance: random.Random) -> float:
    """Return a wait in seconds: anywhere from 0 to `base_seconds`, doubled per earlier attempt, up to `max_seconds`.

    "Full jitter" of Brooker, Exponential Backoff and Jitter, AWS Architecture Blog, 2015.
    """
    return chance.uniform(0, min(max_seconds, base_seconds * 2.0 ** min(attempts, 64)))


def settlement_of(fate: Fate, ports: Ports) -> Settlement:
    """Return what is to be written down of a batch's fate."""
    refused = [_refusal(event, problem, ports) for event, problem in fate.failed.values()]
    return Settlement(published=fate.published, refused=refused, followers=fate.followers)


def _refusal(event: Event, problem: Problem, ports: Ports) -> Refusal:
    reason = describe(problem)
    if verdict_of(problem) is Verdict.MISCONFIGURED:
        wait = ports.settings.misconfigured_seconds
        return Refusal(event=event, kind="misconfigured", reason=reason, retry_seconds=wait)
    wait = full_jitter(
        attempts=event.attempts,
        base_seconds=ports.settings.retry_base_seconds,
        max_seconds=ports.settings.retry_max_seconds,
        chance=ports.chance,
    )
    return Refusal(event=event, kind="refused", reason=reason, retry_seconds=wait)
