"""Judges what came out of Kafka: nothing missing, nothing out of order, nothing that never happened."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

_NAMED = 5
"""How many of the events that are wrong a problem names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An event of an order, in a row of the outbox or in a record of the topic.

    `version` counts the events of its order from 1; None where the event was not made by the shop.
    """

    event_id: UUID
    order_id: str
    version: int | None
    doomed: bool = False
    """Whether its transaction was going to be rolled back when it was written."""


class TopicCheck:
    """Looks at the records of a topic as they come."""

    def __init__(self) -> None:
        self.firsts: dict[UUID, Told] = {}
        self.duplicates = 0
        self.out_of_order: list[Told] = []
        self.phantoms: list[Told] = []
        self._versions: dict[str, int] = {}

    def see(self, event: Told) -> bool:
        """Take the next record; returns whether it is the first of its event."""
        if event.event_id in self.firsts:
            self.duplicates += 1
            return False
        self.firsts[event.event_id] = event
        if event.doomed:
            self.phantoms.append(event)
        elif event.version is not None:
            self._see_version(event, event.version)
        return True

    def _see_version(self, event: Told, version: int) -> None:
        if version <= self._versions.get(event.order_id, 0):
            self.out_of_order.append(event)
        else:
            self._versions[event.order_id] = version


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What the database says happened: the outbox, and the version each order has reached."""

    events: Sequence[Told]
    orders: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What is wrong, if anything is."""

    missing: Sequence[Told]
    out_of_order: Sequence[Told]
    phantoms: Sequence[Told]
    untold: Sequence[str]
    """Orders that changed without as many events, or have events without the changes."""

    @property
    def problems(self) -> list[str]:
        """One line for each kind of thing that is wrong."""
        found = {
            "committed but not in the topic": [_name(event) for event in self.missing],
            "out of order": [_name(event) for event in self.out_of_order],
            "in the topic but never committed": [_name(event) for event in self.phantoms],
            "orders that do not match their events": list(self.untold),
        }
        return [_problem(what, names) for what, names in found.items() if names]


def judge(topic: TopicCheck, tables: Tables) -> Judgement:
    """Compare the topic, read from its beginning, with the tables."""
    committed = {event.event_id for event in tables.events}
    seen = topic.firsts.values()
    return Judgement(
        missing=[event for event in tables.events if event.event_id not in topic.firsts],
        out_of_order=topic.out_of_order,
        phantoms=[event for event in seen if event.doomed or event.event_id not in committed],
        untold=_untold(tables),
    )


def _untold(tables: Tables) -> list[str]:
    """Compare every order's version with the versions its events have."""
    versions: dict[str, list[int]] = {order_id: [] for order_id in tables.orders}
    for event in tables.events:
        if event.version is not None:
            versions.setdefault(event.order_id, []).append(event.version)
    reached = {order_id: list(range(1, version + 1)) for order_id, version in tables.orders.items()}
    return [order_id for order_id, found in versions.items() if sorted(found) != reached.get(order_id, [])]


def _name(event: Told) -> str:
    return f"{event.event_id} (order {event.order_id}, version {event.version})"


def _problem(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(names)} {what}: {', '.join(names[:_NAMED])}{more}"
