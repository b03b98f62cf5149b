"""Sends events again that were published: in order per key, some a tick, so that live events hardly notice."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field, TypeAdapter, ValidationError

from outbox_tasks.deadline import Deadline
from outbox_tasks.errors import InvalidFilterError
from outbox_tasks.ports import Ports
from outbox_tasks.publishing.verdicts import Verdict, verdict_of
from outbox_tasks.relay.publish import Fate, publish
from outbox_tasks.relay.result import Result, Status
from outbox_tasks.relay.run import LEASE_MARGIN_SECONDS, probe, stopped_by
from outbox_tasks.store import replays
from outbox_tasks.store.replays import Chunk, Progress, Replay, Wanted

REPLAY_HEADER = "replay"
"""Header that a record sent again has besides those it had: the id of the replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A replay that somebody wants: which events, to which topic if not to their own, how many a second."""

    wanted: Wanted
    to_topic: str | None = None
    rate: int | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """A replay that has begun."""

    replay: Replay

    def as_dict(self) -> dict[str, str | int]:
        """Return what is worth reading."""
        return {"status": "started", "replay_id": str(self.replay.replay_id), "total": self.replay.total}


def start(ports: Ports, order: Order) -> Replay:
    """Begin a replay; ticks of `outbox.replay` do the rest."""
    return replays.create(
        ports.connection,
        order.wanted,
        routes=ports.settings.routes,
        to_topic=order.to_topic,
        rate=order.rate or ports.settings.replay_rate,
    )


def replay(ports: Ports) -> Result:
    """Send what one tick may send of the oldest unfinished replay.

    A replay's rate is kept by sending so many events a tick and no more; whoever is late sends less, never more.
    """
    token, end = ports.new_token(), ports.deadline(ports.settings.lease_seconds - LEASE_MARGIN_SECONDS)
    found = replays.claim(ports.connection, token=token, owner=ports.owner, seconds=ports.settings.lease_seconds)
    if found is None:
        return Result()
    down = probe(ports)
    result = Result(status=Status.DONE) if down is None else stopped_by(Result(), down)
    if down is None:
        result = _tick(found, result, ports, token=token, end=end)
    replays.release(ports.connection, token=token)
    return result


def read_order(given: Mapping[str, Any]) -> Order:
    """Make an order of what came with a message.

    Raises:
        InvalidFilterError: a name is unknown, a value is of the wrong kind, or everything would be meant.
    """
    rest = dict(given)
    try:
        order = Order(
            to_topic=TypeAdapter(str | None).validate_python(rest.pop("to_topic", None)),
            rate=TypeAdapter(Annotated[int, Field(gt=0)] | None).validate_python(rest.pop("rate", None)),
            wanted=TypeAdapter(Wanted).validate_python(rest),
        )
    except ValidationError as error:
        raise InvalidFilterError(str(error)) from None
    if order.wanted.is_empty:
        raise InvalidFilterError("it would mean all: give since, until, topic, aggregate_type, event_type or ids")
    return order


def _tick(found: Replay, result: Result, ports: Ports, *, token: UUID, end: Deadline) -> Result:
    allowed = max(1, round(found.rate * ports.settings.replay_tick_seconds))
    while allowed > 0 and not end.passed and not ports.stopping():
        chunk = replays.next_chunk(ports.connection, replay_id=found.replay_id)
        if chunk is None:
            replays.finish(ports.connection, replay_id=found.replay_id, token=token)
            break
        fate, progress = _send(found, chunk, ports, limit=allowed, end=end)
        noted = replays.note(ports.connection, progress, replay_id=found.replay_id, place=chunk.place, token=token)
        result = result.counting(published=progress.sent, refused=progress.refused)
        allowed -= progress.sent + progress.refused
        if fate.down is not None:
            return stopped_by(result, fate.down)
        if not noted:
            break
    return result


def _send(found: Replay, chunk: Chunk, ports: Ports, *, limit: int, end: Deadline) -> tuple[Fate, Progress]:
    """Send the first events of a chunk, up to a number."""
    ids = chunk.event_ids[:limit]
    found_events = replays.read(ports.connection, ids, to_topic=found.to_topic)
    events = [event for event in found_events if not event.blocked]
    mark = {REPLAY_HEADER: str(found.replay_id)}
    marked = [event._replace(headers=(event.headers or {}) | mark) for event in events]
    fate = publish(marked, ports, deadline=end.within(ports.settings.delivery_seconds))
    dropped = set(ids) - {event.event_id for event in found_events}
    return fate, _progress(chunk, dropped, fate)


def _progress(chunk: Chunk, dropped: set[UUID], fate: Fate) -> Progress:
    """Count what is over and done with. A refused event, and what came behind it in its key, is passed over.

    Where a topic will not do, nothing is passed over: the replay waits, and its result says for what.
    """
    sent = {event.event_id for event in fate.published}
    waiting = {key for key, (_, problem) in fate.failed.items() if verdict_of(problem) is Verdict.MISCONFIGURED}
    behind = [*(event for event, _ in fate.failed.values()), *fate.followers]
    refused = {event.event_id for event in behind if event.ordering_key not in waiting}
    if waiting:
        fate.down = fate.failed[min(waiting)][1]
    left = [event_id for event_id in chunk.event_ids if event_id not in refused | sent | dropped]
    return Progress(sent=len(sent), refused=len(refused), left=left)
