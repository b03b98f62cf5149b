"""A script: a relay as one writes it first, `python -m bench.naive`: rows locked, sent, marked, in one transaction.

With a batch of 1 it is the relay that sends one by one. It stops when it finds nothing.
"""

import argparse
import time
from contextlib import closing
from typing import Any
from uuid import UUID

import psycopg
from kafka import KafkaProducer

from bench.raw import ACKNOWLEDGED_SECONDS, WARM_EVENTS, relay_settings
from bench.script import answer, await_go

# The index this relay would have instead of ours.
PREPARE = "DROP INDEX outbox_pending; CREATE INDEX outbox_pending_by_id ON outbox (id) WHERE state = 'pending'"

LOCK = """
SELECT event_id, aggregate_id, convert_to(payload::text, 'UTF8'), event_type
  FROM outbox WHERE state = 'pending' ORDER BY id LIMIT %(batch)b FOR UPDATE SKIP LOCKED
"""

# Bounded by the ids, so that only the partitions they are in are looked at.
MARK = """
UPDATE outbox SET state = 'published', published_at = clock_timestamp()
 WHERE event_id = ANY(%(ids)b) AND event_id BETWEEN %(first)b AND %(last)b
"""

Row = tuple[UUID, str, bytes, str]


def main() -> None:
    """Drain the table, and tell when the work began and ended."""
    parser = argparse.ArgumentParser(prog="python -m bench.naive", description=__doc__)
    for name in ("--database-url", "--bootstrap-servers", "--topic", "--warm-topic"):
        parser.add_argument(name, required=True)
    parser.add_argument("--batch", type=int, required=True)
    given = parser.parse_args()
    with (
        psycopg.connect(given.database_url) as connection,
        closing(KafkaProducer(**relay_settings(given.bootstrap_servers))) as producer,
    ):
        producer.partitions_for(given.topic)
        for _ in range(WARM_EVENTS):
            producer.send(given.warm_topic, b"warm", b"warm")
        producer.flush()
        await_go()
        answer(_drain(connection, producer, given))


def _drain(connection: psycopg.Connection[Any], producer: KafkaProducer, given: argparse.Namespace) -> dict[str, Any]:
    started, cpu = time.time(), time.process_time()
    ended, published = started, 0
    while sent := _once(connection, producer, given):
        ended, published = time.time(), published + sent
    return {"started": started, "ended": ended, "published": published, "cpu_seconds": time.process_time() - cpu}


def _once(connection: psycopg.Connection[Any], producer: KafkaProducer, given: argparse.Namespace) -> int:
    with connection.transaction():
        rows = connection.execute(LOCK, {"batch": given.batch}).fetchall()
        if rows:
            _send(producer, given.topic, rows)
            ids = [row[0] for row in rows]
            connection.execute(MARK, {"ids": ids, "first": min(ids), "last": max(ids)})
    return len(rows)


def _send(producer: KafkaProducer, topic: str, rows: list[Row]) -> None:
    futures = [
        producer.send(
            topic,
            key=key.encode(),
            value=bytes(value),
            headers=[("event_id", str(event_id).encode()), ("event_type", event_type.encode())],
        )
        for event_id, key, value, event_type in rows
    ]
    if len(rows) == 1:
        producer.flush()  # nothing more is coming that lingering could wait for
    for future in futures:
        future.get(timeout=ACKNOWLEDGED_SECONDS)


if __name__ == "__main__":
    main()
