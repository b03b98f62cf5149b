"""Makes the parts of the wake-up for a Celery app; nothing is connected yet."""

import logging
import time

from celery import Celery

from outbox_tasks.ports import SILENCE, Bell
from outbox_tasks.settings import Settings
from outbox_tasks.waking.bell import RedisBell, Ringer
from outbox_tasks.waking.breaker import Breaker
from outbox_tasks.waking.listener import Listener
from outbox_tasks.waking.message import Messenger
from outbox_tasks.waking.place import Place, find
from outbox_tasks.waking.rings import Rings

log = logging.getLogger(__name__)

LONGEST_REST_SECONDS = 5.0
"""However long a tick is: after this a lost ring is no longer waited for, and a service that failed is tried again."""

RING_EVERY_SECONDS = 0.004
"""How often a listener rings at most: a run that stays looks no more often."""

MESSAGE_EVERY_SECONDS = 0.1
"""How often a listener without a bell sends a message at most: it cannot know whether the last one was answered."""


def has_bell(app: Celery, settings: Settings) -> bool:
    """Say whether there is a Redis for the bell, and the wake-up is on."""
    return _place(app, settings) is not None


def bell(app: Celery, settings: Settings) -> Bell:
    """Return the runs' side of the bell, for one thread."""
    place = _place(app, settings)
    if place is None:
        return SILENCE
    breaker = Breaker("the bell's Redis", seconds=_rest_seconds(settings), clock=time.monotonic)
    return RedisBell(place, timeout_seconds=settings.wake_timeout_seconds, breaker=breaker)


def rings(app: Celery, settings: Settings) -> Rings:
    """Return what rings the bell, or sends a message each time where there is none."""
    place, rest = _place(app, settings), _rest_seconds(settings)
    ringer = None
    if place is not None:
        ringer = Ringer(place, timeout_seconds=settings.wake_timeout_seconds, lost_after_seconds=rest)
    return Rings(ringer, Messenger(app, settings), rest_seconds=rest)


def listener(app: Celery, settings: Settings) -> Listener:
    """Return what rings for PostgreSQL's notifications."""
    pause = RING_EVERY_SECONDS if has_bell(app, settings) else MESSAGE_EVERY_SECONDS
    return Listener(settings, rings(app, settings).ring, pause_seconds=pause)


def _place(app: Celery, settings: Settings) -> Place | None:
    if not settings.wake:
        return None
    place = find(app, settings)
    if place is None:
        log.info("the message broker is no Redis the bell can hang in: see outbox_wake_url")
    return place


def _rest_seconds(settings: Settings) -> float:
    return min(settings.dispatch_seconds, LONGEST_REST_SECONDS)
