"""Kills: whatever dies between publishing and settling, everything arrives, in order."""

from datetime import timedelta

from support.clients import Client, on_brokers_and_clients
from support.consuming import consume_all
from support.judging import event_id_of, judge, states
from support.leases import (
    await_blocked,
    end_backend,
    lease_history,
    lease_owners,
    owner_of_port,
    record_leases,
    settlement_latched,
)
from support.workers import Deployment, fleet
from support.writers import Load, write

LONG_LEASE = {"statement_seconds": 20, "lease_seconds": 140, "shards_per_run": 64, "batch_size": 5000}
"""A lease that nobody waits for in a test, and a settlement that waits at a latch for as long as a test needs."""

SHORT_LEASE = {
    "run_seconds": 2,
    "delivery_seconds": 2,
    "probe_seconds": 1,
    "statement_seconds": 2,
    "lease_seconds": 16,
    "shards_per_run": 64,
    "batch_size": 100,
}


@on_brokers_and_clients
def test_a_child_killed_between_publish_and_settle(deployment: Deployment, topic: str, client: Client) -> None:
    """When a child is killed with everything published and nothing settled, its shards are free at once."""
    database = deployment.database_url
    committed = write(database, Load(topic=topic, events=800, keys=50, writers=4))
    record_leases(database)
    with fleet(deployment.but(publisher=client.name, **LONG_LEASE)) as celery, settlement_latched(database) as latch:
        worker, _ = celery.worker(children=2), celery.beat()
        port = await_blocked(database)
        published = {event_id_of(record) for record in consume_all(deployment.bootstrap_servers, topic)}
        assert published == {event.event_id for event in committed}
        assert states(database) == {"pending": len(committed)}
        (lost,) = lease_owners(database)
        owner_of_port(worker.children, port).kill()
        end_backend(database, port)
        latch.rollback()
        celery.until(lambda: states(database) == {"published": len(committed)}, "everything is published")
        worker.await_word(f"leases of lost run {lost}")
    history = lease_history(database)
    granted = {change.shard: change for change in history if change.is_claim and change.owner == lost}
    expiries = [change for change in history if change.is_expiry]
    takeovers = [change for change in history if change.is_takeover]
    assert {change.shard for change in expiries} == {change.shard for change in takeovers} == granted.keys()
    assert all(change.owner_before == lost and change.takeovers == 1 for change in takeovers)
    assert all(change.at < granted[change.shard].at + timedelta(seconds=60) for change in takeovers)
    judgement = judge(deployment.bootstrap_servers, topic, committed)
    assert judgement.faults == {}
    assert judgement.duplicates == len(committed)


@on_brokers_and_clients
def test_a_whole_worker_killed_in_mid_run(deployment: Deployment, topic: str, client: Client) -> None:
    """When a whole worker is killed in mid-run, another takes its shards over once their leases have ended."""
    database = deployment.database_url
    committed = write(database, Load(topic=topic, events=4000, keys=50))
    record_leases(database)
    with fleet(deployment.but(publisher=client.name, **SHORT_LEASE)) as celery:
        with settlement_latched(database, spared=len(committed) * 3 // 4):
            doomed, _ = celery.worker(children=2), celery.beat()
            port = await_blocked(database)
            doomed.kill()
            end_backend(database, port)
        (lost,) = lease_owners(database)
        settled = states(database)
        assert settled["published"] > 0
        assert settled["pending"] >= len(committed) // 4
        celery.worker(children=2)
        celery.until(lambda: states(database) == {"published": len(committed)}, "everything is published")
    takeovers = [change for change in lease_history(database) if change.is_takeover]
    assert takeovers
    assert {change.owner_before for change in takeovers} == {lost}
    assert all(change.until_before and change.at >= change.until_before for change in takeovers)
    judgement = judge(deployment.bootstrap_servers, topic, committed)
    assert judgement.faults == {}
    assert judgement.duplicates > 0
