"""Stopping: a worker asked to stop gives its shards back at once and ends cleanly; another goes on."""

from datetime import timedelta

from support.clients import Client
from support.judging import judge, states
from support.leases import database_time, lease_history, lease_owners, record_leases
from support.workers import Deployment, fleet
from support.writers import Load, write

from outbox_tasks.testing.services import TansuBroker


def test_sigterm_with_a_backlog_frees_the_leases_within_a_second(deployment: Deployment, topic: str) -> None:
    """On SIGTERM in mid-run a worker's leases are free within a second, it exits with 0, and another goes on."""
    database = deployment.database_url
    committed = write(database, Load(topic=topic, events=8000))
    record_leases(database)
    with fleet(deployment.but(batch_size=20)) as celery:
        worker, _ = celery.worker(children=2), celery.beat()
        celery.until(lambda: states(database)["published"] > 100 and lease_owners(database), "a run is under way")
        asked_at = database_time(database)
        worker.ask_to_stop()
        assert worker.await_end() == 0
        assert not lease_owners(database)
        left = states(database)["pending"]
        assert left > 0
        changes = lease_history(database)
    with fleet(deployment) as celery:
        celery.worker(children=2)
        celery.beat()
        celery.until(lambda: states(database) == {"published": len(committed)}, "everything is published")
    assert changes[-1].at < asked_at + timedelta(seconds=1)
    assert judge(deployment.bootstrap_servers, topic, committed).faults == {}


def test_sigterm_while_the_broker_is_frozen(
    deployment: Deployment, topic: str, tansu: TansuBroker, client: Client
) -> None:
    """On SIGTERM with a batch on its way to a broker that does not answer, leases are free within a second too."""
    deployment = deployment.but(publisher=client.name)
    database = deployment.database_url
    committed = write(database, Load(topic=topic, events=8000))
    record_leases(database)
    with fleet(deployment.but(batch_size=20)) as celery:
        worker, _ = celery.worker(children=2), celery.beat()
        celery.until(lambda: states(database)["published"] > 100 and lease_owners(database), "a run is under way")
        tansu.freeze()
        try:
            asked_at = database_time(database)
            worker.ask_to_stop()
            assert worker.await_end() == 0
            assert not lease_owners(database)
        finally:
            tansu.thaw()
        changes = lease_history(database)
        assert states(database)["pending"] > 0
    with fleet(deployment) as celery:
        celery.worker(children=2)
        celery.beat()
        celery.until(lambda: states(database) == {"published": len(committed)}, "everything is published")
    assert changes[-1].at < asked_at + timedelta(seconds=1)
    assert judge(deployment.bootstrap_servers, topic, committed).faults == {}
