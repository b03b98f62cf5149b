"""When a refused event is tried again."""

import random

from outbox_tasks.event import Event
from outbox_tasks.ports import Ports
from outbox_tasks.publishing.routes import find_topic
from outbox_tasks.publishing.verdicts import Verdict, describe, verdict_of
from outbox_tasks.relay.publish import Fate, Problem
from outbox_tasks.store.settle import Kind, Refusal, Settlement


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
    kind = _kind(event, problem, ports)
    wait = ports.settings.misconfigured_seconds if kind == "misconfigured" else _wait(event, ports)
    return Refusal(
        event=event,
        kind=kind,
        topic=find_topic(event, ports.settings.routes),
        reason=describe(problem),
        retry_seconds=wait,
    )


def _kind(event: Event, problem: Problem, ports: Ports) -> Kind:
    if verdict_of(problem) is Verdict.MISCONFIGURED:
        return "misconfigured"
    return "exhausted" if event.attempts + 1 >= ports.settings.retry_attempts else "refused"


def _wait(event: Event, ports: Ports) -> float:
    return full_jitter(
        attempts=event.attempts,
        base_seconds=ports.settings.retry_base_seconds,
        max_seconds=ports.settings.retry_max_seconds,
        chance=ports.chance,
    )
