"""Reads the topic from its beginning and on, and has every record checked."""

import json
import threading
import time
from contextlib import closing
from typing import Any
from uuid import UUID

from kafka import KafkaConsumer, TopicPartition

from outbox_tasks.demo.checks import Told, TopicCheck
from outbox_tasks.demo.lags import Lags

_POLL_MILLISECONDS = 200


def consume_until(stop: threading.Event, *, bootstrap_servers: str, topic: str, check: TopicCheck, lags: Lags) -> None:
    """Read all partitions of the topic until asked to stop.

    Raises:
        kafka.errors.KafkaError: the broker did not serve.
    """
    # No group: nobody shares the reading, and some brokers take long to form one.
    with closing(KafkaConsumer(bootstrap_servers=bootstrap_servers, enable_auto_commit=False)) as consumer:
        partitions = [TopicPartition(topic, number) for number in sorted(consumer.partitions_for_topic(topic))]
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        while not stop.is_set():
            _take(consumer.poll(timeout_ms=_POLL_MILLISECONDS), check, lags)


def _take(polled: dict[TopicPartition, list[Any]], check: TopicCheck, lags: Lags) -> None:
    now = time.time()
    for record in (record for batch in polled.values() for record in batch):
        told = told_by(key=record.key, value=record.value, headers=dict(record.headers))
        if check.see(told):
            lags.consumed(told.event_id, at=now)


def told_by(*, key: bytes | None, value: bytes | None, headers: dict[str, bytes]) -> Told:
    """Read a record."""
    payload = _shop_payload(value)
    return Told(
        event_id=UUID(headers["event_id"].decode()),
        order_id="" if key is None else key.decode(),
        version=payload.get("version"),
        doomed=payload.get("doomed", False),
    )


def _shop_payload(value: bytes | None) -> dict[str, Any]:
    """Decode what the shop wrote; empty for what somebody else has put into the outbox to try it."""
    try:
        payload = json.loads(value or b"null")
    except ValueError:
        return {}
    return payload if isinstance(payload, dict) and "doomed" in payload else {}
