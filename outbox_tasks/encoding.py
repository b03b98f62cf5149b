"""Checks a new event and turns it into columns: payload and headers into JSON; touches no database."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from functools import singledispatch
from typing import NamedTuple
from uuid import UUID

from pydantic import BaseModel

from outbox_tasks.errors import InvalidEventError, NoRouteError
from outbox_tasks.settings import Settings

RESERVED_HEADERS = frozenset({"event_id", "event_type"})
"""Headers the relay sets on every record."""

MAX_NAME_BYTES = 1000
"""Longest text of a column that is indexed: two of them must fit into one B-tree entry (2,704 bytes)."""

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")  # Kafka's org.apache.kafka.common.internals.Topic
_NUL_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # a backslash that is itself escaped starts no escape
_DEFAULT_LIMIT: int = Settings.model_fields["max_payload_bytes"].default


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NewEvent:
    """An event to be written, with the arguments of `append`; nothing is checked before it is appended."""

    aggregate_type: str
    aggregate_id: str
    event_type: str
    payload: object = None
    topic: str | None = None
    partition_key: str | None = None
    headers: Mapping[str, str] | None = None
    event_id: UUID | None = None


class Row(NamedTuple):
    """An event as its columns, found to be right; `payload` and `headers` are JSON text, the id is text."""

    event_id: str | None
    aggregate_type: str
    aggregate_id: str
    event_type: str
    topic: str | None
    partition_key: str | None
    payload: str | None
    payload_bytes: bytes | None
    headers: str

    @property
    def ordering_key(self) -> str:
        """What Kafka keeps in order, as the generated column of the table has it."""
        topic = self.aggregate_type if self.topic is None else self.topic
        return f"{topic}/{self.aggregate_id if self.partition_key is None else self.partition_key}"

    @property
    def size(self) -> int:
        """About how much of a statement it is, in bytes (in characters where text is no ASCII)."""
        return sum(map(len, filter(None, self[1:])))


def encode(event: NewEvent, *, settings: Settings | None = None) -> Row:
    """Check an event and turn it into its columns.

    Without `settings`, routes are not checked and the default limit on payloads holds.

    Raises:
        InvalidEventError: a part cannot be written; `field` names it.
        NoRouteError: neither the event nor the routes of `settings` name a topic.
    """
    limit = _DEFAULT_LIMIT if settings is None else settings.max_payload_bytes
    row = Row(
        _event_id(event.event_id),
        _name("aggregate_type", event.aggregate_type),
        _name("aggregate_id", event.aggregate_id),
        _name("event_type", event.event_type),
        None if event.topic is None else _topic(event.topic),
        None if event.partition_key is None else _short("partition_key", event.partition_key),
        *_payload(event.payload, limit=limit),
        _headers(event.headers),
    )
    if settings is not None and row.topic is None:
        _check_route(row, settings.routes)
    return row


def _check_route(row: Row, routes: Mapping[str, str]) -> None:
    if row.event_type not in routes and row.aggregate_type not in routes:
        raise NoRouteError(event_type=row.event_type, aggregate_type=row.aggregate_type)


def _event_id(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, UUID):
        raise InvalidEventError("event_id", f"is {_shown(value)}: pass a uuid.UUID, or None for a new one")
    return UUID.__str__(value)


def _name(field: str, value: object) -> str:
    text = _short(field, value)
    if not text:
        raise InvalidEventError(field, "is empty: every event needs one")
    return text


def _short(field: str, value: object) -> str:
    text = _text(field, value)
    size = len(text) if text.isascii() else len(text.encode())
    if size > MAX_NAME_BYTES:
        raise InvalidEventError(field, f"is {size:,} bytes long, over {MAX_NAME_BYTES:,}: it is indexed, shorten it")
    return text


def _topic(value: object) -> str:
    text = _text("topic", value)
    if _TOPIC.fullmatch(text) is None or text in {".", ".."}:
        raise InvalidEventError(
            "topic",
            f"{reprlib.repr(text)} is no topic name: use 1 to 249 of letters, digits, '.', '_', '-', "
            "and not '.' or '..' alone",
        )
    return text


def _text(field: str, value: object) -> str:
    """Return it as plain `str` (a `StrEnum` becomes its value) that PostgreSQL can store."""
    if not isinstance(value, str):
        raise InvalidEventError(field, f"is {_shown(value)}, no text: pass str(…)")
    text = value if type(value) is str else str.__str__(value)
    if problem := _text_problem(text):
        raise InvalidEventError(field, problem)
    return text


def _text_problem(text: str) -> str | None:
    if "\0" in text:
        return f"{reprlib.repr(text)} has a NUL character, which PostgreSQL cannot store: remove it"
    if not text.isascii() and not _is_unicode(text):
        return f"{reprlib.repr(text)} has a lone surrogate, which is no Unicode text: decode it properly first"
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _headers(headers: object) -> str:
    if headers is None:
        return "{}"
    if not isinstance(headers, Mapping):
        raise InvalidEventError("headers", f"is {_shown(headers)}: pass a mapping of text to text, or None")
    return _ENCODER.encode({_header_name(name): _header_value(name, value) for name, value in headers.items()})


def _header_name(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidEventError("headers", f"the name {_shown(name)} is no text: pass str(…)")
    if name in RESERVED_HEADERS:
        raise InvalidEventError("headers", f"{name!r} is set by the relay: choose another name")
    return _text("headers", name)


def _header_value(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidEventError("headers", f"{name!r} is {_shown(value)}, no text: pass str(…)")
    return _text("headers", value)


def _payload(payload: object, *, limit: int) -> tuple[str | None, bytes | None]:
    """Return the two payload columns: JSON text, or bytes as they are, or neither for a tombstone."""
    if payload is None:
        return None, None
    if isinstance(payload, bytes | bytearray | memoryview):
        raw = bytes(payload)
        _check_size(len(raw), limit=limit)
        return None, raw
    text, size = _json(payload)
    _check_size(size, limit=limit)
    return text, None


def _check_size(size: int, *, limit: int) -> None:
    if size > limit:
        raise InvalidEventError(
            "payload",
            f"is {size:,} bytes encoded, over the limit of {limit:,}: send a reference to the data instead, "
            "or raise outbox_max_payload_bytes together with the topic's max.message.bytes",
        )


def _json(payload: object) -> tuple[str, int]:
    """Encode, and return the text with its size in bytes."""
    try:
        text = _ENCODER.encode(payload)
        size = len(text) if text.isascii() else len(text.encode())
    except RecursionError:
        raise InvalidEventError("payload", _TOO_DEEP) from None
    except (TypeError, ValueError) as error:
        raise InvalidEventError("payload", _explain(payload, str(error))) from error
    if "\\u0000" in text and _NUL_ESCAPE.search(text):
        raise InvalidEventError("payload", _explain(payload, "has a NUL character: remove it"))
    return text, size


_TOO_DEEP = "is nested too deeply for JSON, or contains itself: flatten it"


def _plain(value: object) -> object:
    """Return what json can write, or a container of it, for a value json does not know."""
    return value.value if isinstance(value, Enum) else _convert(value)


@singledispatch
def _convert(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"is of type {_type_name(value)}, which has no JSON form: turn it into text, numbers, lists, dicts")


@_convert.register
def _(value: Mapping) -> object:  # type: ignore[type-arg]  # singledispatch takes plain classes
    return dict(value)


@_convert.register
def _(value: BaseModel) -> object:
    return value.model_dump(mode="json")


@_convert.register(datetime)
@_convert.register(date)
@_convert.register(time)
def _(value: date | time) -> object:
    return value.isoformat()


@_convert.register
def _(value: UUID) -> object:
    return str(value)


@_convert.register
def _(value: Decimal) -> object:
    if not value.is_finite():
        raise ValueError(f"is {value}, which JSON has no number for: use None or text")
    return str(value)


@_convert.register
def _(value: AbstractSet) -> object:  # type: ignore[type-arg]
    """Sort, so that equal sets give equal payloads: by value where that works, else by the encoded text."""
    try:
        return sorted(value)
    except TypeError:
        return sorted(value, key=_ENCODER.encode)


@_convert.register(bytes)
@_convert.register(bytearray)
@_convert.register(memoryview)
def _(value: object) -> object:
    raise TypeError(f"is {type(value).__name__}, which JSON has no form for: encode it as text, or send bytes alone")


_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_plain)


def _explain(payload: object, otherwise: str) -> str:
    """Find the first part that is wrong and say where it is; only a refused payload pays for this walk."""
    try:
        return next(_problems(payload, ""), otherwise)
    except RecursionError:
        return _TOO_DEEP


def _problems(value: object, path: str) -> Iterator[str]:
    try:
        known = _reduced(value)
    except (TypeError, ValueError) as error:
        yield f"at {path} {error}" if path else str(error)
        return
    if problem := _problem(known):
        yield f"at {path} {problem}" if path else problem
    for key, child in _children(known).items():
        yield from _key_problems(key, path)
        yield from _problems(child, f"{path}[{reprlib.repr(key)}]")


def _reduced(value: object) -> object:
    """Convert until it is something json knows by itself."""
    while isinstance(value, Enum) or not (value is None or isinstance(value, _KNOWN)):
        value = _plain(value)
    return value


_KNOWN = (str, int, float, dict, list, tuple)


def _problem(value: object) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}, which JSON has no number for: use None or text"
    return _text_problem(value) if isinstance(value, str) else None


def _key_problems(key: object, path: str) -> Iterator[str]:
    where = f"a key at {path}" if path else "a key"
    if key is not None and not isinstance(key, str | int | float):
        yield f"{where} is {_shown(key)}: pass text"
    elif problem := _problem(key):
        yield f"{where} {problem}"


def _children(value: object) -> Mapping[object, object]:
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if isinstance(value, list | tuple) else {}


def _shown(value: object) -> str:
    return f"{reprlib.repr(value)} ({_type_name(value)})"


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
