"""Looks for what a deployment gets wrong about Celery: its broker, its workers, their queue."""

from collections.abc import Iterator

import redis
from celery import Celery
from kombu.exceptions import OperationalError

from outbox_tasks import worker
from outbox_tasks.settings import Settings
from outbox_tasks.upkeep.check import Finding

REPLY_SECONDS = 1.0
"""How long workers may take to answer."""


def check_celery(app: Celery, settings: Settings) -> list[Finding]:
    """Look at Celery's broker and at who consumes the queue of the tasks."""
    try:
        return [*_broker(app, settings), _consumers(app)]
    except (OperationalError, redis.RedisError, OSError) as error:
        return [Finding("celery broker", right=False, detail=f"{app.connection().as_uri()}: {error}")]


def _broker(app: Celery, settings: Settings) -> Iterator[Finding]:
    with app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, timeout=REPLY_SECONDS)
        yield Finding("celery broker", right=True, detail=connection.as_uri())
        if connection.transport.driver_type == "redis":
            yield _eviction(connection.default_channel.client)
            yield _visibility(connection.default_channel.visibility_timeout, settings)


def _eviction(client: "redis.Redis") -> Finding:
    try:
        policy = str(client.config_get("maxmemory-policy").get("maxmemory-policy", "unknown"))
    except redis.ResponseError:
        return Finding("redis eviction", right=True, detail="the server does not tell: see that it is noeviction")
    wrong = f"{policy}: when memory is short Redis may drop messages and queues; set maxmemory-policy noeviction"
    return Finding("redis eviction", right=policy == "noeviction", detail=policy if policy == "noeviction" else wrong)


def _visibility(seconds: float, settings: Settings) -> Finding:
    right = seconds > settings.lease_seconds
    advice = (
        f": raise visibility_timeout in broker_transport_options over {settings.lease_seconds:g}, else Redis delivers"
    )
    detail = f"{seconds:g} s" + ("" if right else f"{advice} a task again while it runs")
    return Finding("redis visibility", right=right, detail=detail)


def _consumers(app: Celery) -> Finding:
    queue = worker.queue_of(app)
    active = app.control.inspect(timeout=REPLY_SECONDS).active_queues() or {}
    consumers = [name for name, queues in active.items() if any(found["name"] == queue for found in queues)]
    if consumers:
        return Finding("workers", right=True, detail=f"queue {queue!r} is consumed by {', '.join(sorted(consumers))}")
    others = f", though {len(active)} others answer" if active else ""
    detail = f"nobody consumes queue {queue!r}{others}: start a worker with -Q {queue}"
    return Finding("workers", right=False, detail=detail)
