"""Flush: everything pending now is published by one task sent by hand, beat or no beat."""

from dataclasses import replace
from typing import LiteralString

import psycopg
from support.judging import judge, states
from support.leases import settlement_latched
from support.workers import Deployment, client, fleet
from support.writers import Load, write

from outbox_tasks import append
from outbox_tasks.testing.services import free_port
from outbox_tasks.testing.services.places import LOOPBACK

IS_BLOCKED = "wait_event_type = 'Lock'"
HAS_COUNTED = "query LIKE 'SELECT count(*) FROM outbox %'"


def test_flush_publishes_everything_and_tells_what_is_left(deployment: Deployment, topic: str) -> None:
    """Without beat, a flush publishes all that is pending and returns how much that was and what it had to leave."""
    database = deployment.database_url
    committed = write(database, Load(topic=topic, events=2400))
    with psycopg.connect(database) as connection:
        append(connection, aggregate_type="nobody's", aggregate_id="1", event_type="led_nowhere")
    with fleet(deployment) as celery, client(deployment) as by_hand:
        celery.worker(children=2)
        celery.await_ready()
        assert states(database) == {"pending": len(committed) + 1}
        report = by_hand.send_task("outbox.flush").get(timeout=60)
    assert report == {"status": "done", "published": len(committed), "refused": 1, "left_pending": 0, "left_held": 1}
    judgement = judge(deployment.bootstrap_servers, topic, committed)
    assert judgement.faults == {}
    assert judgement.duplicates == 0


def test_flush_waits_for_what_another_run_publishes(deployment: Deployment, topic: str) -> None:
    """A flush that finds all shards leased by another run returns once that run has published everything."""
    database = deployment.database_url
    committed = write(database, Load(topic=topic, events=400, keys=20, writers=4))
    slow = deployment.but(statement_seconds=20, lease_seconds=140, shards_per_run=64, flush_seconds=60)
    with fleet(slow) as celery, client(slow) as by_hand:
        with settlement_latched(database) as latch:
            celery.worker(children=2)
            other = by_hand.send_task("outbox.dispatch", ignore_result=False)
            celery.until(lambda: sessions(database, IS_BLOCKED), "a run has published and cannot settle")
            flush = by_hand.send_task("outbox.flush")
            celery.until(lambda: sessions(database, HAS_COUNTED), "the flush has seen that something is left")
            assert not flush.ready()
            latch.rollback()
            report = flush.get(timeout=60)
        assert other.get(timeout=60) == {"status": "done", "published": len(committed)}
    assert report == {"status": "nothing to do", "left_pending": 0, "left_held": 0}
    assert judge(deployment.bootstrap_servers, topic, committed).duplicates == 0


def test_flush_says_when_the_broker_is_away(deployment: Deployment, topic: str) -> None:
    """A flush does not wait for a broker that is away: it says so, and that everything is left."""
    committed = write(deployment.database_url, Load(topic=topic, events=80))
    away = replace(deployment, bootstrap_servers=f"{LOOPBACK}:{free_port()}")
    with fleet(away) as celery, client(away) as by_hand:
        celery.worker(children=1)
        report = by_hand.send_task("outbox.flush").get(timeout=60)
    assert report["status"] == "broker unavailable"
    assert report["left_pending"] == len(committed)
    assert states(deployment.database_url) == {"pending": len(committed)}


def sessions(database_url: str, condition: LiteralString) -> int:
    """Count the relay's sessions of which a condition is true."""
    ours = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'outbox_tasks' AND "
    with psycopg.connect(database_url) as connection:
        return connection.execute(ours + condition).rowcount
