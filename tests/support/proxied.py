"""A broker whose clients all come through a proxy, so that a test can break the network between them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outbox_tasks.testing.proxy import TcpProxy
from outbox_tasks.testing.services import Broker, free_port
from outbox_tasks.testing.services.places import LOOPBACK


@dataclass(frozen=True)
class ProxiedBroker:
    """The broker, advertising the proxy's port, and the proxy."""

    broker: Broker
    proxy: TcpProxy


@contextmanager
def behind_proxy(kind: type[Broker], directory: Path) -> Iterator[ProxiedBroker]:
    """Run a broker of its own behind a proxy."""
    port = free_port()
    with (
        TcpProxy(LOOPBACK, port) as proxy,
        kind(directory, port=port, advertised_port=proxy.port) as broker,
    ):
        yield ProxiedBroker(broker, proxy)
