"""What kafka-python's clients are given: our settings, those of `outbox_kafka`, and TLS that does not hang."""

import difflib
import ssl
from typing import Any

from kafka import KafkaProducer
from kafka.net.transport import KafkaSSLTransport

from outbox_tasks.errors import MisconfiguredError, SettingsError
from outbox_tasks.settings import Settings

LINGER_MILLISECONDS = 5

NUMBERS = ("batch_size", "linger_ms", "max_request_size")
"""Settings of `outbox_kafka` that are calculated with."""


class HandshakeInTime:
    """A TLS context whose handshakes end after some seconds.

    kafka-python 3.0 shakes hands without a limit that its own timeouts would cover: with a broker that takes the
    connection and says nothing, opening a client would never end. It asks a context for nothing but `wrap_socket`.
    """

    def __init__(self, context: ssl.SSLContext, *, seconds: float) -> None:
        self._context = context
        self._seconds = seconds

    def wrap_socket(self, sock: Any, **options: Any) -> ssl.SSLSocket:
        """Return the socket with the handshake done.

        Raises:
            OSError: the other side did not answer in time, or not with TLS, or is not who it should be.
        """
        wrapped = self._context.wrap_socket(sock, **(options | {"do_handshake_on_connect": False}))
        wrapped.settimeout(self._seconds)
        try:
            wrapped.do_handshake()
        except OSError:
            wrapped.close()
            raise
        wrapped.setblocking(False)
        return wrapped


def client_config(settings: Settings, *, of: type[Any]) -> dict[str, Any]:
    """Return the settings of a client class: its address and times, and of `outbox_kafka` what it knows.

    Raises:
        MisconfiguredError: the files TLS needs cannot be used.
    """
    milliseconds = round(settings.probe_seconds * 1000)
    theirs = {name: value for name, value in settings.kafka.items() if name in of.DEFAULT_CONFIG}
    return {"request_timeout_ms": milliseconds, "reconnect_backoff_max_ms": 1000} | theirs | _tls(settings) | {
        "bootstrap_servers": [server.strip() for server in settings.bootstrap_servers.split(",")],
        "client_id": settings.client_id,
        "bootstrap_timeout_ms": milliseconds,
    }  # fmt: skip


def producer_config(settings: Settings) -> dict[str, Any]:
    """Return the producer's settings, TLS apart. What the guarantees rest on comes last and cannot be changed.

    Raises:
        SettingsError: `outbox_kafka` has an unknown name, or something else where a number is to be.
    """
    defaults = {name: KafkaProducer.DEFAULT_CONFIG[name] for name in ("max_request_size", "compression_type")}
    ours = {"linger_ms": LINGER_MILLISECONDS, "batch_size": 131_072, "allow_auto_create_topics": False}
    base = defaults | ours | {"metrics_enabled": False} | settings.kafka
    unknown = sorted(settings.kafka.keys() - KafkaProducer.DEFAULT_CONFIG.keys())
    if unknown:
        near = difflib.get_close_matches(unknown[0], KafkaProducer.DEFAULT_CONFIG, n=1, cutoff=0)
        raise SettingsError(
            f"outbox_kafka has {', '.join(unknown)}, which kafka-python has not: did you mean {near[0]}?"
        )
    for name in NUMBERS:
        if not isinstance(base[name], int):
            raise SettingsError(f"outbox_kafka has {name} {base[name]!r}: it is to be a whole number")
    delivery = round(settings.delivery_seconds * 1000)
    return base | {
        "acks": "all",
        "enable_idempotence": True,
        "delivery_timeout_ms": delivery,
        # Half of it, so that a request without an answer is sent once more before its records are given up.
        "request_timeout_ms": max(1, (delivery - base["linger_ms"]) // 2),
        "max_block_ms": round(settings.probe_seconds * 1000),
    }


def _tls(settings: Settings) -> dict[str, Any]:
    if settings.kafka.get("security_protocol") not in ("SSL", "SASL_SSL"):
        return {}
    names = KafkaSSLTransport.DEFAULT_CONFIG
    given = names | {name: value for name, value in settings.kafka.items() if name in names}
    try:
        context = KafkaSSLTransport._build_ssl_context(given)  # noqa: SLF001 - reads the settings as the client would
    except (OSError, ValueError) as error:
        raise MisconfiguredError(f"TLS for Kafka: {error}: see the ssl_ settings in outbox_kafka") from error
    return {"ssl_context": HandshakeInTime(context, seconds=settings.probe_seconds)}
