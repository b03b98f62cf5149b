"""Puts dead letters back, or gives them up for good, in steps small enough to be watched and interrupted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

from pydantic import TypeAdapter, ValidationError

from outbox_tasks.errors import InvalidFilterError
from outbox_tasks.ports import Ports
from outbox_tasks.store import dead_letters
from outbox_tasks.store.connection import Connection
from outbox_tasks.store.dead_letters import Filter

STEP = 500
"""Dead letters one transaction takes."""


class Decision(Protocol):
    """What is done with dead letters: `dead_letters.redrive` or `dead_letters.discard`."""

    def __call__(self, connection: Connection, ids: Sequence[UUID], *, reason: str) -> int:
        """Carry it out; returns how many dead letters it concerned."""


def carry_out(connection: Connection, decision: Decision, ids: Sequence[UUID], *, reason: str) -> Iterator[int]:
    """Carry a decision out step by step; yields how many dead letters each step concerned."""
    for start in range(0, len(ids), STEP):
        yield decision(connection, ids[start : start + STEP], reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Redriven:
    """How many dead letters were put back."""

    redriven: int

    def as_dict(self) -> dict[str, int]:
        """Return what is worth reading."""
        return {"redriven": self.redriven}


def redrive(ports: Ports, *, wanted: Filter, reason: str) -> Redriven:
    """Put every dead letter back that a filter lets through."""
    ids = dead_letters.select(ports.connection, wanted)
    return Redriven(redriven=sum(carry_out(ports.connection, dead_letters.redrive, ids, reason=reason)))


def read_filter(given: Mapping[str, Any]) -> Filter:
    """Make a filter of what came with a message.

    Raises:
        InvalidFilterError: a name is unknown, a value is of the wrong kind, or everything would be meant.
    """
    try:
        wanted = TypeAdapter(Filter).validate_python(dict(given))
    except ValidationError as error:
        raise InvalidFilterError(str(error)) from None
    if wanted.is_empty:
        raise InvalidFilterError("it would mean all: give ids, key, topic, error, since or until")
    return wanted
