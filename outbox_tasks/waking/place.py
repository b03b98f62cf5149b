"""Finds the Redis the bell hangs in, and the names of its keys there."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qs, urlsplit

import redis
from celery import Celery
from kombu.connection import Connection
from psycopg.conninfo import conninfo_to_dict
from redis.backoff import NoBackoff
from redis.connection import ConnectionInterface, parse_url
from redis.retry import Retry

from outbox_tasks.errors import SettingsError
from outbox_tasks.settings import Settings
from outbox_tasks.waking.wire import Wire

_DATABASE = {"service": "", "host": "", "hostaddr": "", "port": "5432", "dbname": "", "options": ""}
"""The parts of a database's address that tell which outbox it is, whoever asks, and what stands for one not given.

`options` may hold a search_path, which tells two outboxes of one database apart.
"""


@dataclass(frozen=True)
class Place:
    """A Redis, how to get there, and what all names of the bell's keys begin with."""

    options: Mapping[str, Any] = field(repr=False)
    prefix: str

    def wire(self, *, seconds: float) -> Wire:
        """Return a connection that gives up after so many seconds of silence. Nothing is opened, nor can it fail."""
        return Wire(partial(self.connection, seconds=seconds))

    def connection(self, *, seconds: float) -> ConnectionInterface:
        """Return a connection that is not open yet; raises what redis-py does where an option is wrong."""
        options: dict[str, Any] = {**self.options, "socket_timeout": seconds, "protocol": 2}  # 2 needs no handshake
        if "path" not in options:
            options["socket_connect_timeout"] = seconds
        retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
        return redis.ConnectionPool(retry=retry, **options).make_connection()

    @property
    def address(self) -> str:
        """Where the Redis is, without credentials."""
        options = self.options
        host = f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        return f"{options.get('path', host)}/{options.get('db', 0)}"

    def beside(self, name: str) -> "Place":
        """Return a place in the same Redis whose keys lie beside these; nobody else rings or answers there."""
        return replace(self, prefix=f"{self.prefix}{name}:")

    @cached_property
    def pending(self) -> str:
        """Set while a message is on its way that nobody has answered."""
        return f"{self.prefix}pending"

    @cached_property
    def listening(self) -> str:
        """Set while a run stays to hear the bell; its value tells which."""
        return f"{self.prefix}listening"

    @cached_property
    def bell(self) -> str:
        """The list the staying run waits on."""
        return f"{self.prefix}bell"


def find(app: Celery, settings: Settings) -> Place | None:
    """Return where the bell hangs; None where the app's broker is no Redis that one address leads to.

    That is `outbox_wake_url`, else the broker's: with its credentials, TLS settings and prefix of keys.

    Raises:
        SettingsError: redis-py cannot make anything of `outbox_wake_url`.
    """
    if settings.wake_url is not None:
        return _named(settings.wake_url, _prefix(settings))
    with app.connection_for_write() as connection:
        options = _options(connection)
        outer = connection.transport_options.get("global_keyprefix", "")
    return None if options is None else Place(options, outer + _prefix(settings))


def _named(url: str, prefix: str) -> Place:
    try:
        place = Place(parse_url(url), prefix)  # type: ignore[no-untyped-call]
        place.connection(seconds=1)
    except (TypeError, ValueError, redis.RedisError) as error:
        raise SettingsError(f"outbox_wake_url: redis-py cannot connect by it: {error}; see redis.from_url") from None
    return place


def _prefix(settings: Settings) -> str:
    """Return a prefix for this deployment; in braces, so that a cluster keeps its keys together."""
    address = conninfo_to_dict(settings.conninfo)
    database = "\n".join(str(address.get(part) or absent) for part, absent in _DATABASE.items())
    return f"outbox:{{{settings.client_id}:{sha256(database.encode()).hexdigest()[:12]}}}:"


def _options(connection: Connection) -> dict[str, Any] | None:
    """Return how to get to a message broker that is a Redis, read as kombu reads it."""
    if connection.transport_cls not in ("redis", "rediss") or connection.credential_provider:
        return None
    host = connection.hostname or "127.0.0.1"
    credentials = {"username": connection.userid or None, "password": connection.password or None}
    number = {"db": int(str(connection.virtual_host or "").strip("/") or 0)}
    if "://" in host:
        return _socket_options(host) | credentials
    tls = dict(connection.ssl) if isinstance(connection.ssl, Mapping) else {}
    if tls or connection.transport_cls == "rediss":
        tls["connection_class"] = redis.SSLConnection
    return {"host": host, "port": connection.port or 6379} | credentials | number | tls


def _socket_options(address: str) -> dict[str, Any]:
    parts = urlsplit(address)
    (number,) = parse_qs(parts.query).get("virtual_host", ["0"])
    return {"connection_class": redis.UnixDomainSocketConnection, "path": parts.path, "db": int(number.strip("/"))}
