"""Pools of green threads, gevent's and eventlet's: refused where they would get the outbox's tasks, and only there."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.judging import states
from support.workers import Deployment, client, fleet
from support.writers import Load, write

from outbox_tasks.errors import PoolError

# A pool that says what gevent's and eventlet's say of themselves, and is not one: neither has to be installed.
POOL = """
from celery.concurrency.thread import TaskPool as ThreadPool

class TaskPool(ThreadPool):
    is_green = True

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.is_green = False  # from here on Celery treats it as what it is
"""

SHOP = """
from celery import Celery
from outbox_tasks import setup

app = Celery("shop")
app.conf.worker_pool = "greenish:TaskPool"
app.conf.task_routes = {{"outbox.*": {queue!r}}}
setup(app)

@app.task(name="shop.greet")
def greet(whom):
    return "hello " + whom
"""

REFUSAL = "this worker's pool is greenish, in which the outbox's tasks do not run: they need prefork, threads or solo"


def shop(deployment: Deployment, directory: Path, *, queue: str) -> Deployment:
    """Write an app whose workers have green threads, and whose routes name the queue of the outbox's tasks."""
    (directory / "greenish.py").write_text(POOL)
    (directory / "shop.py").write_text(SHOP.format(queue=queue))
    return replace(deployment, app="shop", directory=directory)


def test_a_green_worker_that_takes_our_tasks_is_refused(deployment: Deployment, tmp_path: Path) -> None:
    """A worker with green threads that consumes the queue of the outbox's tasks ends at start and says why."""
    with fleet(shop(deployment, tmp_path, queue="celery")) as celery:
        worker = celery.worker()
        assert worker.await_end(seconds=30) == 1
        assert f"outbox_tasks: {REFUSAL}. It would take them from queue 'celery': start it with" in worker.output
        assert "Traceback" not in worker.output


@pytest.mark.parametrize("where", ["setting", "routes"])
def test_a_green_worker_with_other_work_is_left_alone(
    deployment: Deployment, topic: str, tmp_path: Path, where: str
) -> None:
    """A worker with green threads that merely knows our tasks does its work, does none of ours, and does not listen."""
    queue = "celery" if where == "setting" else "relay"
    here = shop(deployment, tmp_path, queue=queue).but(listen=True)
    write(deployment.database_url, Load(topic=topic, events=80))
    with fleet(here.but(queue="relay") if where == "setting" else here) as celery, client(deployment) as by_hand:
        worker = celery.worker()
        celery.await_ready()
        assert by_hand.send_task("shop.greet", ["you"]).get(timeout=60) == "hello you"
        stray = by_hand.send_task("outbox.flush", queue="celery")
        with pytest.raises(PoolError, match=f"^{REFUSAL}$"):
            stray.get(timeout=60)
        assert states(deployment.database_url).keys() == {"pending"}
        assert worker.output.count("] raised unexpected: ") == 1
        assert "listening to notifications" not in worker.output
        assert worker.stop() == 0
