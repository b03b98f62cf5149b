"""Pools: a worker publishes in processes, in threads and alone, and stops cleanly whichever it is."""

import pytest
from support.judging import judge, states
from support.leases import lease_owners
from support.workers import Deployment, fleet
from support.writers import Load, write


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_each_pool_drains_in_order_and_stops_cleanly(deployment: Deployment, topic: str, pool: str) -> None:
    """Whatever its pool, a worker publishes 2,000 events in order and once, and SIGTERM ends it with no lease held."""
    database = deployment.database_url
    committed = write(database, Load(topic=topic, events=2560))
    with fleet(deployment) as celery:
        worker, _ = celery.worker(pool=pool, children=2), celery.beat()
        celery.until(lambda: states(database) == {"published": len(committed)}, "everything is published")
        assert worker.stop() == 0
    assert not lease_owners(database)
    judgement = judge(deployment.bootstrap_servers, topic, committed)
    assert judgement.faults == {}
    assert judgement.duplicates == 0


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_sigterm_with_a_backlog_ends_each_pool(deployment: Deployment, topic: str, pool: str) -> None:
    """A worker without child processes too gives its shards back in mid-run and exits with 0."""
    database = deployment.database_url
    committed = write(database, Load(topic=topic, events=8000))
    with fleet(deployment.but(batch_size=20)) as celery:
        worker, _ = celery.worker(pool=pool, children=2), celery.beat()
        celery.until(lambda: states(database)["published"] > 100 and lease_owners(database), "a run is under way")
        assert worker.stop() == 0
    assert not lease_owners(database)
    left = states(database)
    assert left.keys() == {"published", "pending"}
    assert judge(deployment.bootstrap_servers, topic, committed).out_of_order == frozenset()
