"""Which queue the outbox's tasks are in: the setting's, that of the app's routes, or the app's default."""

from typing import Any

import pytest
from celery import Celery
from kombu.entity import Queue

from outbox_tasks import worker


def to_relay(name: str, *_arguments: Any, **_options: Any) -> str | None:
    """Route the outbox's tasks, as a service may do it in code."""
    return "relay" if name.startswith("outbox.") else None


@pytest.mark.parametrize(
    ("configuration", "queue"),
    [
        ({}, "celery"),
        ({"task_default_queue": "jobs"}, "jobs"),
        ({"task_routes": {"shop.*": "jobs"}}, "celery"),
        ({"task_routes": {"outbox.*": "relay"}}, "relay"),
        ({"task_routes": {"outbox.dispatch": {"queue": Queue("relay")}}}, "relay"),  # type: ignore[no-untyped-call]
        ({"task_routes": {"outbox.dispatch": {"priority": 3}}}, "celery"),
        ({"task_routes": [to_relay]}, "relay"),
        ({"task_routes": {"outbox.*": "relay"}, "outbox_queue": "ours"}, "ours"),
    ],
)
def test_the_queue_of_the_tasks(configuration: dict[str, Any], queue: str) -> None:
    """The setting wins over the app's routes, and they over its default; asking makes no queue."""
    app = Celery("shop", set_as_current=False)
    app.conf.outbox_database_url = "postgresql://db.example/shop"
    app.conf.update(configuration)
    before = set(app.amqp.queues)
    assert worker.queue_of(app) == queue
    assert set(app.amqp.queues) == before
