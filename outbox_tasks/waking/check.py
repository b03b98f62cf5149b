"""Tries whether the bell can be rung, heard and answered, and says what to do where it cannot."""

from contextlib import closing
from uuid import uuid4

import redis
from celery import Celery

from outbox_tasks.errors import SettingsError
from outbox_tasks.settings import Settings
from outbox_tasks.upkeep.check import Finding
from outbox_tasks.waking.bell import ENTER, LEAVE, RING
from outbox_tasks.waking.place import Place, find

COMMANDS = "EVALSHA, EVAL, SET, GET, DEL, EXISTS, LLEN, RPUSH, PEXPIRE and BLPOP"
"""What writers and runs need of Redis."""

MILLISECONDS = 1000
"""How long a key of the trial lives if the trial breaks off."""


def check_wake(app: Celery, settings: Settings) -> Finding:
    """See that commits can wake the relay; rings nobody, and leaves nothing in Redis."""
    if not settings.wake:
        return Finding("wake-up", right=True, detail="off (outbox_wake): events wait for beat's ticks")
    try:
        place = find(app, settings)
    except SettingsError as error:
        return _wrong(str(error))
    if place is None:
        return _wrong(
            "Celery's broker is no Redis that one address leads to, so events wait for beat's ticks: set "
            "outbox_wake_url to a Redis, or outbox_wake to False where ticks are soon enough"
        )
    return _tried(place, seconds=settings.wake_timeout_seconds)


def _tried(place: Place, *, seconds: float) -> Finding:
    where = f"the Redis at {place.address}"
    try:
        unheard = _try(place.beside(uuid4().hex), seconds=seconds)
    except (redis.ResponseError, redis.AuthenticationError) as error:
        return _wrong(
            f"{where} refuses, so events wait for beat's ticks: {error}; "
            f"grant {_needed(place)} on {place.prefix}*, or name another by outbox_wake_url"
        )
    except (redis.RedisError, TypeError, ValueError) as error:  # redis-py's, of options it does not take
        return _wrong(
            f"{where} does not answer within {seconds:g} s (outbox_wake_timeout_seconds), so events wait for beat's "
            f"ticks: {error}; see that it runs and can be reached from here, or name another by outbox_wake_url"
        )
    if unheard is not None:
        return _wrong(
            f"no run can stay at {where} to hear commits, so each sends a message, which takes longer: {unheard}; "
            f"that needs Redis 6 or later, and the right to use BLPOP on {place.prefix}*"
        )
    return Finding("wake-up", right=True, detail=f"through {where}, by its keys {place.prefix}*")


def _try(place: Place, *, seconds: float) -> redis.ResponseError | None:
    """Do all that writers and runs do, once; returns why a run cannot wait for a ring, None if it can.

    Raises:
        redis.RedisError: Redis is away, or refuses anything else.
    """
    keys, token = (place.pending, place.listening, place.bell), "trial"
    with closing(place.wire(seconds=seconds)) as wire:
        for script, *arguments in (RING, MILLISECONDS), (ENTER, token, MILLISECONDS):
            wire.command("EVAL", script.text, len(keys), *keys, *arguments)  # known by its digest from then on
        wire.run(RING, keys, MILLISECONDS)
        try:
            heard = wire.command("BLPOP", place.bell, 0.01)
        except redis.ResponseError as error:
            return error
        finally:
            wire.run(LEAVE, keys, token)
    return None if heard is not None else redis.ResponseError("a ring was not heard")


def _needed(place: Place) -> str:
    return f"SELECT, {COMMANDS}" if place.options.get("db") else COMMANDS


def _wrong(detail: str) -> Finding:
    return Finding("wake-up", right=False, detail=detail)
