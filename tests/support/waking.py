"""The wake-up in a test: an app as a service sets it up, and what its Redis holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from celery import Celery

from outbox_tasks import settings, setup, waker

QUEUE = "celery"


@contextmanager
def service(redis_url: str, database_url: str = "postgresql://db.example/shop", **changed: Any) -> Iterator[Celery]:
    """Give an app that was set up as a service does it, and take it out again; `changed` are `outbox_*` settings."""
    before = waker.installed(), settings.in_use()
    app = Celery("service", broker=redis_url, set_as_current=False)
    app.conf.outbox_database_url = database_url
    for name, value in changed.items():
        app.conf[name if name.startswith("broker_") else f"outbox_{name}"] = value
    setup(app)
    try:
        yield app
    finally:
        app.close()
        waker.install(before[0])
        settings.use(before[1])  # type: ignore[arg-type]


def messages(redis_url: str, queue: str = QUEUE) -> int:
    """Return how many messages wait in a queue."""
    with redis.Redis.from_url(redis_url) as client:
        return int(client.llen(queue))


def keys(redis_url: str) -> set[str]:
    """Return the names of the bell's keys that there are."""
    with redis.Redis.from_url(redis_url) as client:
        return {key.decode() for key in client.scan_iter("*outbox:*")}
