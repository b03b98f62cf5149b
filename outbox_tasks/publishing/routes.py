"""Makes the record of an event: its topic, its headers."""

from collections.abc import Mapping

from outbox_tasks.errors import NoRouteError
from outbox_tasks.event import Event
from outbox_tasks.publishing.publisher import Record

EVENT_ID_HEADER = "event_id"
EVENT_TYPE_HEADER = "event_type"
RESERVED_HEADERS = frozenset({EVENT_ID_HEADER, EVENT_TYPE_HEADER})
"""Ours alone: consumers deduplicate by one of them."""


def find_topic(event: Event, routes: Mapping[str, str]) -> str | None:
    """Return the event's own topic, else that of its event type, else that of its aggregate type, if any is there."""
    return event.topic or routes.get(event.event_type) or routes.get(event.aggregate_type)


def topic_of(event: Event, routes: Mapping[str, str]) -> str:
    """Return the topic of an event.

    Raises:
        NoRouteError: neither it nor the routes name one.
    """
    topic = find_topic(event, routes)
    if topic is None:
        raise NoRouteError(event_type=event.event_type, aggregate_type=event.aggregate_type)
    return topic


def record_of(event: Event, topic: str) -> Record:
    """Return what goes to Kafka: key and value as stored, our two headers before the event's own."""
    headers = [(EVENT_ID_HEADER, str(event.event_id).encode()), (EVENT_TYPE_HEADER, event.event_type.encode())]
    if event.headers:
        headers += [(name, value.encode()) for name, value in event.headers.items() if name not in RESERVED_HEADERS]
    return Record(topic, event.key, event.value, headers)
