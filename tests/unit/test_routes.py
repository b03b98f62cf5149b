"""Which topic an event goes to, and the record it becomes."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.relaying import an_event

from outbox_tasks.errors import NoRouteError
from outbox_tasks.publishing.routes import find_topic, record_of, topic_of

EVENT = an_event(event_id=UUID("01890a5d-ac96-774b-bcce-b302099a8057"))

topics = st.none() | st.text(min_size=1, max_size=3)


@given(own=topics, by_event=topics, by_aggregate=topics)
def test_the_nearest_route_wins(own: str | None, by_event: str | None, by_aggregate: str | None) -> None:
    """An event goes to its own topic, else to that of its event type, else to that of its aggregate type."""
    given_routes = {"order_placed": by_event, "order": by_aggregate, "other": "elsewhere"}
    routes = {name: topic for name, topic in given_routes.items() if topic is not None}
    expected = next((topic for topic in (own, by_event, by_aggregate) if topic is not None), None)
    assert find_topic(EVENT._replace(topic=own), routes) == expected


def test_no_route_names_both_types() -> None:
    """Without a route the error names the event type and the aggregate type."""
    with pytest.raises(NoRouteError, match=r"'order_placed' of aggregate type 'order'"):
        topic_of(EVENT, {"other": "elsewhere"})


def test_a_record_carries_key_value_and_headers() -> None:
    """A record has the stored key and value, our two headers, and the event's own in UTF-8."""
    record = record_of(EVENT._replace(headers={"trace": "größe", "": ""}), "orders")
    assert (record.topic, record.key, record.value) == ("orders", b"1", b"{}")
    assert record.headers == [
        ("event_id", b"01890a5d-ac96-774b-bcce-b302099a8057"),
        ("event_type", b"order_placed"),
        ("trace", "größe".encode()),
        ("", b""),
    ]


def test_a_tombstone_of_no_key_stays_one() -> None:
    """What is missing stays missing: no empty bytes in its place."""
    record = record_of(EVENT._replace(key=None, value=None), "orders")
    assert (record.key, record.value) == (None, None)
