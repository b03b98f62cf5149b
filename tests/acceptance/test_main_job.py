"""The main job: what business transactions commit reaches Kafka, in order per key and once."""

from support.clients import Client, on_brokers_and_clients
from support.judging import judge, states, table_of
from support.workers import Deployment, fleet
from support.writers import Load, write


@on_brokers_and_clients
def test_what_is_committed_arrives_once_and_in_order(deployment: Deployment, topic: str, client: Client) -> None:
    """20,000 events by 8 writers through two workers: all that is committed arrives, in order per key, once."""
    load = Load(topic=topic)
    with fleet(deployment.but(publisher=client.name)) as celery:
        workers = [celery.worker(children=2), celery.worker(children=1)]
        celery.beat()
        celery.await_ready()
        committed = write(deployment.database_url, load)
        celery.until(lambda: states(deployment.database_url)["published"] == load.committed, "everything is published")
        assert all("outbox.dispatch: {'status': 'done', 'published':" in worker.output for worker in workers)
    assert len(committed) == load.committed
    assert sorted(table_of(deployment.database_url)) == sorted(committed)
    judgement = judge(deployment.bootstrap_servers, topic, committed)
    assert judgement.faults == {}
    assert judgement.duplicates == 0
