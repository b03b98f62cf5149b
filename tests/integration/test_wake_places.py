"""Redis behind TLS and on a Unix socket: the bell is rung and heard there, as Celery's broker and by its own URL."""

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from support.waiting import until
from support.waking import keys, messages, service

from outbox_tasks import wake, worker
from outbox_tasks.testing.proxy import TcpProxy
from outbox_tasks.testing.services import RedisServer, scratch_directory
from outbox_tasks.testing.services.guard import Launch
from outbox_tasks.testing.services.places import LOOPBACK
from outbox_tasks.waking import parts
from outbox_tasks.waking.check import check_wake

PATIENCE = 5.0
"""Seconds a TLS handshake may take beside other tests."""


class SocketRedis(RedisServer):
    """Redis that listens on a Unix socket besides."""

    @property
    def socket(self) -> Path:
        """Where the socket is."""
        return self.directory / "redis.sock"

    def _launch(self) -> Launch:
        launch = super()._launch()
        return replace(launch, command=[*launch.command, "--unixsocket", str(self.socket)])


@pytest.fixture
def own_redis() -> Iterator[SocketRedis]:
    """Run a Redis of the test's own, in a directory whose name is short enough for a socket."""
    with scratch_directory("outbox-test-") as directory, SocketRedis(directory / "redis") as server:
        yield server


@dataclass(frozen=True)
class Tls:
    """Where Redis is reached through TLS, and the certificate it shows."""

    port: int
    certificate: Path

    @property
    def url(self) -> str:
        """The address, for a client that trusts the certificate."""
        return f"{self.bare}?ssl_ca_certs={self.certificate}&ssl_cert_reqs=required"

    @property
    def bare(self) -> str:
        """The address alone."""
        return f"rediss://{LOOPBACK}:{self.port}/0"


@pytest.fixture
def tls(own_redis: SocketRedis, tmp_path: Path) -> Iterator[Tls]:
    """Put TLS before Redis: the packaged server is built without, so a proxy speaks it, as stunnel would."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate = new_certificate(tmp_path)
    context.load_cert_chain(certificate, tmp_path / "key.pem")
    with TcpProxy(LOOPBACK, own_redis.port, tls=context) as proxy:
        yield Tls(proxy.port, certificate)


def new_certificate(directory: Path) -> Path:
    """Make a key and a certificate for it that speaks for itself."""
    if shutil.which("openssl") is None:
        pytest.skip("a certificate needs openssl, which is not installed")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=redis"]
    names = ["-addext", f"subjectAltName=IP:{LOOPBACK}"]
    files = ["-keyout", str(directory / "key.pem"), "-out", str(directory / "certificate.pem")]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
    return directory / "certificate.pem"


def assert_rung_and_heard(app: Celery, url: str) -> None:
    """Assert that `outbox check` is content, that a run that stays hears a wake, and that the bell hangs in `url`."""
    settings = worker.settings_of(app)
    finding = check_wake(app, settings)
    assert finding.right, finding.detail
    with closing(parts.bell(app, settings)) as bell, bell.stay() as stay, ThreadPoolExecutor(1) as pool:
        heard = pool.submit(stay.wait, 1)
        until(lambda: any(key.endswith("listening") for key in keys(url)), "the run listens")
        wake()
        assert heard.result() is True
        bell.answer()


@pytest.mark.parametrize("how", ["parameters", "broker_use_ssl"])
def test_a_broker_behind_tls(own_redis: SocketRedis, tls: Tls, how: str) -> None:
    """Where Celery's broker is reached through TLS the bell is rung and heard there, and messages are sent."""
    trust = {"ssl_ca_certs": str(tls.certificate), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    options: dict[str, Any] = {"broker_use_ssl": trust} if how == "broker_use_ssl" else {}
    with service(tls.bare if options else tls.url, wake_timeout_seconds=PATIENCE, **options) as app:
        assert_rung_and_heard(app, own_redis.url)
        wake()
        until(lambda: messages(own_redis.url) == 1, "a message is sent")


def test_a_bell_behind_tls(own_redis: SocketRedis, tls: Tls) -> None:
    """`outbox_wake_url` may lead through TLS."""
    with service("memory://", wake_url=tls.url, wake_timeout_seconds=PATIENCE) as app:
        assert_rung_and_heard(app, own_redis.url)


def test_a_certificate_that_nobody_trusts(tls: Tls) -> None:
    """Where the certificate of Redis is not trusted `outbox check` says so, and a wake raises nothing."""
    with service("memory://", wake_url=tls.bare, wake_timeout_seconds=PATIENCE) as app:
        finding = check_wake(app, worker.settings_of(app))
        wake()
    assert not finding.right
    assert "certificate" in finding.detail.lower()


def test_a_broker_on_a_unix_socket(own_redis: SocketRedis) -> None:
    """Where Celery's broker is reached on a Unix socket the bell is rung and heard there, and messages are sent."""
    with service(f"redis+socket://{own_redis.socket}?virtual_host=0") as app:
        assert_rung_and_heard(app, own_redis.url)
        wake()
        until(lambda: messages(own_redis.url) == 1, "a message is sent")


def test_a_bell_on_a_unix_socket(own_redis: SocketRedis) -> None:
    """`outbox_wake_url` may lead to a Unix socket; `outbox check` names it."""
    with service("memory://", wake_url=f"unix://{own_redis.socket}?db=0") as app:
        assert_rung_and_heard(app, own_redis.url)
        assert f"{own_redis.socket}/0" in check_wake(app, worker.settings_of(app)).detail


def test_a_socket_that_is_not_there(own_redis: SocketRedis) -> None:
    """Where there is no socket `outbox check` names it, and a wake raises nothing."""
    with service("memory://", wake_url=f"unix://{own_redis.socket}.not") as app:
        finding = check_wake(app, worker.settings_of(app))
        wake()
    assert not finding.right
    assert f"{own_redis.socket}.not" in finding.detail
