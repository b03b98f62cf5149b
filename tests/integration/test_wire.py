"""One connection to Redis: every command gets its own answer, whatever happened to the one before."""

import signal
from collections.abc import Iterator
from contextlib import closing

import pytest
import redis
from redis.connection import parse_url
from support.workers import redis_url_of_its_own

from outbox_tasks.testing.services import RedisServer
from outbox_tasks.waking.place import Place
from outbox_tasks.waking.wire import Script, Wire

ADD = Script("return redis.call('INCRBY', KEYS[1], ARGV[1])")


def wire_to(url: str, *, seconds: float = 10) -> Wire:
    """Return a connection to a Redis."""
    return Place(parse_url(url), "test:").wire(seconds=seconds)  # type: ignore[no-untyped-call]


@pytest.fixture
def wire(redis_server: RedisServer) -> Iterator[Wire]:
    """Give a connection to a Redis database of this test's own."""
    with closing(wire_to(redis_url_of_its_own(redis_server))) as opened:
        yield opened


def test_a_script_that_redis_has_forgotten(wire: Wire) -> None:
    """A script that Redis has never seen, or no longer knows, is given to it whole, and carried out once."""
    assert wire.run(ADD, ("n",), 1) == 1
    wire.command("SCRIPT", "FLUSH")
    assert wire.run(ADD, ("n",), 1) == 2
    assert wire.run(ADD, ("n",), 1) == 3


def test_a_refusal_is_an_answer(wire: Wire) -> None:
    """What Redis refuses raises, and the next command has its own answer, over the same connection."""
    connection = wire.command("CLIENT", "ID")
    with pytest.raises(redis.ResponseError, match="unknown command"):
        wire.command("NONSENSE")
    assert wire.command("CLIENT", "ID") == connection


def test_a_command_that_is_interrupted_leaves_no_answer_behind(wire: Wire) -> None:
    """A signal that interrupts a command while its answer is on the way does not give that answer to the next one."""
    wire.command("PING")

    def wait_and_be_interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        wire.command("BLPOP", "nothing", 1)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait_and_be_interrupted()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert wire.command("ECHO", "mine") == b"mine"


def test_an_answer_that_comes_too_late_is_nobodys(own_redis: RedisServer) -> None:
    """A command that Redis did not answer in time raises, and its late answer is not taken for the next one's."""
    with closing(wire_to(own_redis.url, seconds=0.5)) as wire:
        wire.command("PING")
        own_redis.freeze()
        with pytest.raises(redis.TimeoutError):
            wire.command("ECHO", "late")
        own_redis.thaw()
        assert wire.command("ECHO", "mine") == b"mine"


def test_a_connection_that_was_lost_is_made_again(own_redis: RedisServer) -> None:
    """After a restart of Redis the next command goes through; with Redis gone it raises."""
    with closing(wire_to(own_redis.url)) as wire:
        wire.command("PING")
        own_redis.kill()
        with pytest.raises(redis.ConnectionError):
            wire.command("PING")
        own_redis.start()
        assert wire.command("PING") == b"PONG"
        own_redis.kill()
        own_redis.start()
        assert wire.command("PING") == b"PONG"
