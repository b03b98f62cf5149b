"""What `outbox check` says of the wake-up: whether the bell can be rung and heard, and what to do where it cannot."""

import time
from contextlib import closing
from typing import Any

import pytest
import redis
from celery import Celery, signals
from support.waiting import until
from support.waking import keys, messages, service

from outbox_tasks import wake, worker
from outbox_tasks.testing.services import RedisServer, free_port
from outbox_tasks.testing.services.places import LOOPBACK
from outbox_tasks.upkeep.check import Finding
from outbox_tasks.waking import parts
from outbox_tasks.waking.check import COMMANDS, check_wake

NEEDED = COMMANDS.replace(" and", ",").split(", ")


def found(broker: str, **changed: Any) -> Finding:
    """Return what is found of an app's wake-up."""
    with service(broker, **{"wake_timeout_seconds": 5} | changed) as app:
        return check_wake(app, worker.settings_of(app))


def user(server: RedisServer, *rules: str) -> str:
    """Make a user of Redis who may do nothing but what the rules give; returns the URL to come as that user."""
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "relay", "reset", "on", ">hunter2", "resetchannels", *rules)
    return server.url.replace("//", "//relay:hunter2@")


def grants(commands: list[str]) -> list[str]:
    """Return the rules that allow commands."""
    return [f"+{command.replace(' ', '|').lower()}" for command in commands]


def test_a_bell_that_works(own_redis: RedisServer) -> None:
    """Where the bell works the line says where it hangs; nobody is rung, and nothing is left in Redis."""
    finding = found(own_redis.url)
    assert finding.right
    assert f"{LOOPBACK}:{own_redis.port}/0, by its keys outbox:{{outbox_tasks:" in finding.detail
    assert messages(own_redis.url) == 0
    assert keys(own_redis.url) == set()


def test_a_look_does_not_mix_with_what_goes_on(own_redis: RedisServer) -> None:
    """A look at a bell that has been rung, and that a run listens to, changes neither."""
    with (
        service(own_redis.url, wake_timeout_seconds=5, dispatch_seconds=5) as app,
        closing(parts.bell(app, worker.settings_of(app))) as bell,
    ):
        with bell.stay() as stay:
            wake()
            assert stay.wait(1) is True
            before = keys(own_redis.url)
            assert check_wake(app, worker.settings_of(app)).right
            assert keys(own_redis.url) == before
            bell.answer()
            assert stay.wait(0.01) is False
        sent = messages(own_redis.url)
        wake()
        until(lambda: messages(own_redis.url) == sent + 1, "a message is sent")
        before = keys(own_redis.url)
        assert check_wake(app, worker.settings_of(app)).right
        assert keys(own_redis.url) == before
        assert messages(own_redis.url) == sent + 1


@pytest.mark.parametrize("broker", ["memory://", "amqp://rabbit.example", "sentinel://localhost:26379"])
def test_a_broker_the_bell_cannot_hang_in(broker: str, own_redis: RedisServer) -> None:
    """Where Celery's broker is no Redis with one address the line names `outbox_wake_url`, which puts it right."""
    finding = found(broker)
    assert not finding.right
    assert "outbox_wake_url" in finding.detail
    assert found(broker, wake_url=own_redis.url).right


def test_a_wake_up_that_is_off() -> None:
    """Without the wake-up nothing is wrong, and nothing is asked for."""
    finding = found(f"redis://{LOOPBACK}:{free_port()}/0", wake=False)
    assert finding.right
    assert "outbox_wake" in finding.detail


def test_a_redis_that_is_not_there() -> None:
    """An address where nobody listens is named, with the setting that names another, and without the password."""
    port = free_port()
    finding = found(f"redis://me:hunter2@{LOOPBACK}:{port}/3")
    assert not finding.right
    assert f"{LOOPBACK}:{port}/3 does not answer" in finding.detail
    assert "outbox_wake_url" in finding.detail
    assert "hunter2" not in finding.detail


def test_a_redis_that_says_nothing(own_redis: RedisServer) -> None:
    """A Redis that stands still is told of after `outbox_wake_timeout_seconds`."""
    own_redis.freeze()
    began = time.monotonic()
    finding = found(own_redis.url, wake_timeout_seconds=0.3)
    assert time.monotonic() - began < 10 * 0.3
    own_redis.thaw()
    assert not finding.right
    assert "within 0.3 s (outbox_wake_timeout_seconds)" in finding.detail


def test_the_rights_that_are_named_are_enough(own_redis: RedisServer) -> None:
    """A user of Redis with the rights that the line names, on keys of the bell's prefix alone, finds all right."""
    url = user(own_redis, "~outbox:*", *grants(NEEDED))
    assert found(url).right
    elsewhere = url.replace("/0", "/3")
    finding = found(elsewhere)
    assert f"SELECT, {COMMANDS}" in finding.detail
    user(own_redis, "~outbox:*", *grants(["SELECT", *NEEDED]))
    assert found(elsewhere).right


@pytest.mark.parametrize("missing", [command for command in NEEDED if command != "BLPOP"])
def test_each_right_that_is_named_is_needed(own_redis: RedisServer, missing: str) -> None:
    """Where the user lacks one of the rights the line says that Redis refuses, and which rights it takes."""
    assert found(own_redis.url).right  # leaves scripts there, for those who may not load them
    finding = found(user(own_redis, "~outbox:*", *grants([command for command in NEEDED if command != missing])))
    assert not finding.right
    assert "refuses" in finding.detail
    assert COMMANDS in finding.detail


def test_other_keys_than_the_bells(own_redis: RedisServer) -> None:
    """Where the user may use other keys only, the line names the keys."""
    finding = found(user(own_redis, "~celery*", *grants(NEEDED)))
    assert not finding.right
    assert "on outbox:{outbox_tasks:" in finding.detail


def test_a_wrong_password(own_redis: RedisServer) -> None:
    """Where Redis does not know the user the line says so, without the password."""
    user(own_redis, "~*", "+@all")
    finding = found(own_redis.url.replace("//", "//relay:swordfish@"))
    assert not finding.right
    assert "refuses" in finding.detail
    assert "swordfish" not in finding.detail


def test_a_redis_that_lets_nobody_wait(own_redis: RedisServer) -> None:
    """Without the right to BLPOP, or before Redis 6, the line says that no run can stay; nothing is left in Redis."""
    finding = found(user(own_redis, "~outbox:*", *grants([command for command in NEEDED if command != "BLPOP"])))
    assert not finding.right
    assert "no run can stay" in finding.detail
    assert "Redis 6" in finding.detail
    assert keys(own_redis.url) == set()


class Starting:
    """What Celery says of a worker that starts."""

    def __init__(self, app: Celery) -> None:
        self.app = app


@pytest.mark.parametrize(
    "url",
    ["redis://h/0?timeout=5", "redis://h:port/0", "redis://h/0?ssl_ca_certs=/x", "rediss://h/0?ssl_cert_reqs=often"],
)
def test_an_address_that_redis_py_does_not_take(url: str) -> None:
    """An address by which redis-py cannot connect is told by the line, and ends a worker at its start."""
    finding = found("memory://", wake_url=url)
    assert not finding.right
    assert "outbox_wake_url: redis-py cannot connect by it" in finding.detail
    with service("memory://", wake_url=url) as app, pytest.raises(SystemExit, match="outbox_wake_url"):
        signals.worker_init.send(sender=Starting(app))
