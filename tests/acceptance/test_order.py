"""Order: what a transaction wrote of a key stays in order, whenever it commits."""

import psycopg
from support.judging import judge, states
from support.leases import await_blocked
from support.workers import Deployment, fleet
from support.writers import AGGREGATE_TYPE, Written

from outbox_tasks import append

TWO_KEYS_OF_A_SHARD = """
SELECT min(key), max(key)
  FROM (SELECT key, hashtextextended(%s || '/' || key, 0) & 63 AS shard
          FROM (SELECT 'key-' || n AS key FROM generate_series(1, 65) AS n) AS keys) AS hashed
 GROUP BY shard HAVING count(*) > 1 LIMIT 1
"""
"""Of 65 keys two share one of 64 shards."""


def write_one(connection: psycopg.Connection, topic: str, key: str, sequence: int) -> Written:
    """Write one event in the transaction that is open."""
    payload = {"key": key, "sequence": sequence}
    event_id = append(
        connection,
        aggregate_type=AGGREGATE_TYPE,
        aggregate_id=key,
        event_type="order_changed",
        topic=topic,
        payload=payload,
    )
    return Written(key, sequence, event_id)


def test_a_transaction_that_commits_behind_a_run_keeps_its_order(deployment: Deployment, topic: str) -> None:
    """Events whose ids lie on both sides of what a run has read are published in order when they commit during it."""
    database = deployment.database_url
    with psycopg.connect(database) as slow, psycopg.connect(database) as latch:
        found = latch.execute(TWO_KEYS_OF_A_SHARD, (topic,)).fetchone()
        assert found is not None
        key, neighbour = found
        committed = [write_one(slow, topic, key, 1)]
        committed += [write_one(latch, topic, neighbour, sequence) for sequence in (1, 2)]
        latch.commit()
        committed += [write_one(slow, topic, key, 2)]
        latch.execute("SELECT FROM outbox FOR UPDATE")
        with fleet(deployment.but(batch_size=1)) as celery:
            celery.worker(children=1)
            celery.beat()
            await_blocked(database)
            slow.commit()
            latch.commit()
            celery.until(lambda: states(database) == {"published": 4}, "everything is published")
    assert judge(deployment.bootstrap_servers, topic, committed).faults == {}
