"""What is a valid event, what its payload becomes, and why an invalid one is refused."""

import json
from collections import UserDict
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from outbox_tasks.encoding import NewEvent, encode
from outbox_tasks.errors import InvalidEventError, NoRouteError
from outbox_tasks.settings import Settings

VALID = NewEvent(aggregate_type="order", aggregate_id="42", event_type="order_placed", payload={"total": 1})
ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


@dataclass
class _Line:
    sku: str
    price: Decimal


class _Customer(BaseModel):
    name: str
    born: date


class _Colour(Enum):
    RED = "red"


class _Size(IntEnum):
    LARGE = 3


class _Kind(StrEnum):
    ORDER = "order"


class _Rate(Decimal, Enum):
    FULL = Decimal("0.20")


def _settings(**values: object) -> Settings:
    return Settings.model_validate({"database_url": "postgresql://", **values})


def _payload_of(payload: object) -> Any:
    text = encode(replace(VALID, payload=payload)).payload
    assert text is not None
    return json.loads(text)


def _refusal(**changes: Any) -> InvalidEventError:
    with pytest.raises(InvalidEventError) as caught:
        encode(replace(VALID, **changes))
    return caught.value


def _nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


def _containing_itself() -> dict[str, object]:
    value: dict[str, object] = {}
    value["self"] = value
    return value


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (datetime(2026, 7, 1, 12, 30, tzinfo=UTC), "2026-07-01T12:30:00+00:00"),
        (date(2026, 7, 1), "2026-07-01"),
        (time(12, 30), "12:30:00"),
        (ID, str(ID)),
        (Decimal("10.10"), "10.10"),
        (_Colour.RED, "red"),
        (_Size.LARGE, 3),
        (_Kind.ORDER, "order"),
        (_Rate.FULL, "0.20"),
        (_Line("A-1", Decimal("9.90")), {"sku": "A-1", "price": "9.90"}),
        (_Customer(name="Ada", born=date(1815, 12, 10)), {"name": "Ada", "born": "1815-12-10"}),
        ((1, 2), [1, 2]),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({"b", "a"}), ["a", "b"]),
        ({"b", 1, None}, ["b", 1, None]),
        (UserDict(a=1), {"a": 1}),
        ({1: "one", None: "none"}, {"1": "one", "null": "none"}),
    ],
)
def test_known_types_have_a_documented_form(value: object, encoded: object) -> None:
    """Values json does not know are encoded as the documentation says, at the top and within."""
    assert _payload_of(value) == encoded
    assert _payload_of({"within": [value]}) == {"within": [encoded]}


def test_text_stays_text() -> None:
    """Non-ASCII text is written as it is, and JSON is compact."""
    assert encode(replace(VALID, payload={"name": "Zoë 🎈"})).payload == '{"name":"Zoë 🎈"}'


def test_none_is_a_tombstone() -> None:
    """No payload leaves both columns empty."""
    row = encode(replace(VALID, payload=None))
    assert (row.payload, row.payload_bytes) == (None, None)


@pytest.mark.parametrize("raw", [b"\x00\xff", bytearray(b"\x00\xff"), memoryview(b"\x00\xff")])
def test_bytes_are_kept(raw: object) -> None:
    """Bytes of any kind go into their own column, unchanged."""
    row = encode(replace(VALID, payload=raw))
    assert (row.payload, row.payload_bytes) == (None, b"\x00\xff")


def test_empty_bytes_are_no_tombstone() -> None:
    """Empty bytes are a payload of no length, not a missing one."""
    assert encode(replace(VALID, payload=b"")).payload_bytes == b""


def test_escaped_backslash_is_no_nul() -> None:
    """A backslash followed by u0000 is text of six characters, not a NUL."""
    assert _payload_of({"path": "\\u0000", "more": "\\\\u0000"}) == {"path": "\\u0000", "more": "\\\\u0000"}


@given(st.text(alphabet="\\u0\0a", max_size=20))
def test_nul_is_found_among_backslashes(text: str) -> None:
    """A payload is refused exactly if it has a NUL character, whatever stands around it."""
    if "\0" in text:
        assert _refusal(payload=[text]).field == "payload"
    else:
        assert _payload_of([text]) == [text]


def test_hundred_levels_are_fine() -> None:
    """A payload may be nested a hundred levels deep."""
    assert _payload_of(_nested(100)) == _nested(100)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({"a": [1, float("nan")]}, "at ['a'][1] is nan"),
        (float("inf"), "is inf"),
        ({"a": float("-inf")}, "at ['a'] is -inf"),
        ({float("nan"): 1}, "a key is nan"),
        ({"price": Decimal("NaN")}, "at ['price'] is NaN"),
        ({"price": Decimal("Infinity")}, "at ['price'] is Infinity"),
        ({"a": "x\0y"}, "at ['a'] 'x\\x00y' has a NUL character"),
        ({"a": {"x\0y": 1}}, "a key at ['a'] 'x\\x00y' has a NUL character"),
        ("\\\0", "has a NUL character"),
        ({"a": "\ud800"}, "at ['a'] '\\ud800' has a lone surrogate"),
        ({"\udfff": 1}, "a key '\\udfff' has a lone surrogate"),
        (_nested(100_000), "nested too deeply"),
        (_containing_itself(), "contains itself"),
        ({"a": [object()]}, "at ['a'][0] is of type object"),
        (_Line("A-1", object()), "at ['price'] is of type object"),  # type: ignore[arg-type]
        (_Line, "is of type type"),
        ({"a": 1j}, "at ['a'] is of type complex"),
        ({"a": b"raw"}, "at ['a'] is bytes"),
        ([bytearray(b"raw")], "at [0] is bytearray"),
        ({ID: 1}, "a key is UUID("),
        ({(1, 2): 1}, "a key is (1, 2) (tuple)"),
        ({"a": 10**5000}, "4300 digits"),
    ],
)
def test_payload_refused(payload: object, said: str) -> None:
    """A payload that is no JSON is refused with the place and the kind of what is wrong."""
    error = _refusal(payload=payload)
    assert error.field == "payload"
    assert said in str(error)


def test_size_is_that_of_the_encoded_payload() -> None:
    """The limit counts bytes as encoded, so text outside ASCII weighs more than its characters."""
    settings = _settings(routes={"order": "orders"}, max_payload_bytes=10)
    encode(replace(VALID, payload="é" * 4), settings=settings)
    with pytest.raises(InvalidEventError, match="is 12 bytes encoded, over the limit of 10") as caught:
        encode(replace(VALID, payload="é" * 5), settings=settings)
    assert caught.value.field == "payload"


def test_size_of_bytes() -> None:
    """The default limit holds for bytes, too."""
    encode(replace(VALID, payload=bytes(1_000_000)))
    assert "1,000,001 bytes" in str(_refusal(payload=bytes(1_000_001)))


@pytest.mark.parametrize("field", ["aggregate_type", "aggregate_id", "event_type", "topic", "partition_key"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (42, "is 42 (int), no text: pass str(…)"),
        (ID, "uuid.UUID), no text: pass str(…)"),
        (b"42", "is b'42' (bytes), no text"),
        ("a\0b", "NUL"),
        ("\ud800", "surrogate"),
    ],
)
def test_text_refused(field: str, value: object, said: str) -> None:
    """What is no text, or text PostgreSQL cannot store, is refused in every text column."""
    error = _refusal(**{field: value})
    assert error.field == field
    assert said in str(error)


@pytest.mark.parametrize("field", ["aggregate_type", "aggregate_id", "event_type"])
def test_required_text(field: str) -> None:
    """The three required columns may be neither empty nor None."""
    assert "is empty" in str(_refusal(**{field: ""}))
    assert "is None (NoneType)" in str(_refusal(**{field: None}))


@pytest.mark.parametrize("field", ["aggregate_type", "aggregate_id", "event_type", "partition_key"])
def test_indexed_text_is_limited(field: str) -> None:
    """Text of an indexed column is at most 1,000 bytes long: PostgreSQL could not index two longer ones."""
    fits: dict[str, Any] = {field: "é" * 500}
    encode(replace(VALID, **fits))
    assert _refusal(**{field: "é" * 501}).field == field


@pytest.mark.parametrize("topic", ["", ".", "..", "orders/eu", "orders eu", "é", "orders\n", "x" * 250])
def test_topic_refused(topic: str) -> None:
    """A topic that Kafka would not create is refused."""
    assert _refusal(topic=topic).field == "topic"


@pytest.mark.parametrize("topic", ["orders", "a.b_c-D9", "...", "x" * 249])
def test_topic_taken(topic: str) -> None:
    """A topic that Kafka would create is taken."""
    assert encode(replace(VALID, topic=topic)).topic == topic


def test_empty_partition_key() -> None:
    """An empty partition key is kept: it stands for a record without a key."""
    assert encode(replace(VALID, partition_key="")).partition_key == ""


def test_enum_names_become_plain_text() -> None:
    """A StrEnum passes as text and arrives as its value, whatever a driver makes of enums."""
    row = encode(replace(VALID, aggregate_type=_Kind.ORDER, headers={_Kind.ORDER: _Kind.ORDER}))
    assert type(row.aggregate_type) is str
    assert row.aggregate_type == "order"
    assert json.loads(row.headers) == {"order": "order"}


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"event_id": "x"}, "'event_id' is set by the relay"),
        ({"event_type": "x"}, "'event_type' is set by the relay"),
        ({"a": 1}, "'a' is 1 (int), no text"),
        ({"a": None}, "'a' is None (NoneType), no text"),
        ({"a": b"x"}, "(bytes), no text"),
        ({1: "x"}, "the name 1 (int) is no text"),
        ({"a": "x\0"}, "NUL"),
        ({"a\0": "x"}, "NUL"),
        ({"a": "\ud800"}, "surrogate"),
        ([("a", "x")], "pass a mapping"),
        ("", "pass a mapping"),
    ],
)
def test_headers_refused(headers: object, said: str) -> None:
    """Headers that are no text, cannot be stored, or belong to the relay are refused."""
    error = _refusal(headers=headers)
    assert error.field == "headers"
    assert said in str(error)


@pytest.mark.parametrize("headers", [None, {}])
def test_no_headers(headers: dict[str, str] | None) -> None:
    """No headers are an empty object, as the column's default."""
    assert encode(replace(VALID, headers=headers)).headers == "{}"


def test_event_id_is_a_uuid() -> None:
    """An event id that only looks like a UUID is refused."""
    assert encode(replace(VALID, event_id=ID)).event_id == str(ID)
    assert _refusal(event_id=str(ID)).field == "event_id"


def test_route_by_either_type() -> None:
    """An event is routed by its event type or its aggregate type, or needs a topic."""
    for routes in ({"order": "t"}, {"order_placed": "t"}):
        encode(VALID, settings=_settings(routes=routes))
    nowhere = _settings(routes={"invoice": "t"})
    encode(replace(VALID, topic="orders"), settings=nowhere)
    with pytest.raises(NoRouteError, match="order_placed"):
        encode(VALID, settings=nowhere)


def test_no_routes_at_all() -> None:
    """Where settings are known and have no routes, an event needs a topic; without settings it does not."""
    encode(VALID)
    with pytest.raises(NoRouteError):
        encode(VALID, settings=_settings())
