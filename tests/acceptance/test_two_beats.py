"""Beat is a floor, not a lock: one too many does no harm."""

from support.judging import judge, states
from support.workers import Deployment, fleet
from support.writers import Load, write


def test_two_beats_at_once(deployment: Deployment, topic: str) -> None:
    """With two beats sending every tick twice, everything arrives in order and once."""
    database = deployment.database_url
    with fleet(deployment.but(dispatch_seconds=0.2)) as celery:
        celery.worker(children=2)
        first, second = celery.beat(), celery.beat()
        celery.await_ready()
        committed = write(database, Load(topic=topic, events=8000))
        celery.until(lambda: states(database) == {"published": len(committed)}, "everything is published")
        assert all("Sending due task outbox.dispatch" in beat.output for beat in (first, second))
    judgement = judge(deployment.bootstrap_servers, topic, committed)
    assert judgement.faults == {}
    assert judgement.duplicates == 0
