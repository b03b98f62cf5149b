"""A Celery app that is there already: one line adds the outbox, and takes nothing away."""

from dataclasses import replace
from pathlib import Path

import pytest
from celery import Celery
from support.judging import judge, states
from support.workers import Deployment, client, fleet
from support.writers import Load, write

# The settings of the app win over those of the environment, which lead nowhere here.
NOWHERE = "postgresql://127.0.0.1:1/nowhere"

SHOP = """
from pathlib import Path
from celery import Celery
from outbox_tasks import setup

app = Celery("shop", broker={redis_url!r}, backend={redis_url!r})
app.conf.outbox_database_url = {database_url!r}
app.conf.outbox_bootstrap_servers = {bootstrap_servers!r}
setup(app)
app.conf.beat_schedule = {{"greeting": {{"task": "shop.greet", "schedule": 0.5, "args": ["beat"]}}}}

@app.task(name="shop.greet")
def greet(whom):
    Path(__file__).with_name("greeted-" + whom).touch()
    return "hello " + whom
"""


@pytest.fixture
def shop(deployment: Deployment, tmp_path: Path) -> Deployment:
    """Write an app with a task and a schedule of its own, which adds the outbox before it sets them."""
    places = {name: getattr(deployment, name) for name in ("redis_url", "database_url", "bootstrap_servers")}
    (tmp_path / "shop.py").write_text(SHOP.format(**places))
    return replace(deployment, app="shop", directory=tmp_path, database_url=NOWHERE, bootstrap_servers="127.0.0.1:1")


def test_setup_adds_the_outbox_to_an_app(deployment: Deployment, shop: Deployment, topic: str, tmp_path: Path) -> None:
    """An app with `setup(app)` publishes events, and goes on to run its own tasks by hand and by its own schedule."""
    committed = write(deployment.database_url, Load(topic=topic, events=800))
    with fleet(shop) as celery, client(shop) as by_hand:
        celery.worker(children=2)
        celery.beat()
        celery.until(lambda: states(deployment.database_url) == {"published": len(committed)}, "all is published")
        celery.until((tmp_path / "greeted-beat").exists, "its own schedule has sent its own task")
        assert by_hand.send_task("shop.greet", ["you"]).get(timeout=60) == "hello you"
    judgement = judge(deployment.bootstrap_servers, topic, committed)
    assert judgement.faults == {}
    assert judgement.duplicates == 0


def test_setup_connects_to_nothing_and_needs_no_settings_yet() -> None:
    """Adding the outbox reads no settings: they are read when the app is finalized."""
    from outbox_tasks import setup  # noqa: PLC0415 - as a service does it

    app = setup(Celery("shop", set_as_current=False))
    assert not app.finalized
