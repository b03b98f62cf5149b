"""What every Kafka broker of the demo and the tests can do, whoever made it."""

import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic

from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient

from outbox_tasks.testing.services.places import LOOPBACK
from outbox_tasks.testing.services.process import ServerError, ServerProcess

# Metadata request, version 1, for no topics (https://kafka.apache.org/protocol#The_Messages_Metadata):
# api key, version, correlation id, client id, number of topics; each request is preceded by its length.
_METADATA_REQUEST = struct.pack(">hhih5si", 3, 1, 1, 5, b"probe", 0)
# Its answer begins with length, correlation id and number of brokers.
_METADATA_ANSWER = struct.Struct(">iii")
_PROBE_TIMEOUT_SECONDS = 2.0
_SETTINGS_TIMEOUT_SECONDS = 10.0


class Broker(ServerProcess):
    """A single Kafka broker.

    A Kafka client connects to the address it is given first, and from then on to the address that the broker
    advertises. For a broker behind a proxy, `advertised_port` is the proxy's.
    """

    def __init__(self, directory: Path, *, port: int | None = None, advertised_port: int | None = None) -> None:
        super().__init__(directory, port=port)
        self.advertised_port = self.port if advertised_port is None else advertised_port

    @property
    def bootstrap_servers(self) -> str:
        """Where clients connect to: the advertised address."""
        return f"{LOOPBACK}:{self.advertised_port}"

    def create_topic(self, name: str, *, partitions: int = 8, config: Mapping[str, str] | None = None) -> None:
        """Create a topic and return when all its partitions have a leader.

        Raises:
            kafka.errors.TopicAlreadyExistsError: there is one of that name.
        """
        topic = {"num_partitions": partitions, "replication_factor": 1, "configs": dict(config or {})}
        with self._admin() as admin:
            admin.create_topics({name: topic}, wait_for_metadata=True)

    def alter_topic(self, name: str, config: Mapping[str, str]) -> None:
        """Change settings of a topic, leaving its others as they are, and return when they are in force.

        Raises:
            ServerError: the broker refused them, or did not take them over in time.
        """
        resource = ConfigResource(ConfigResourceType.TOPIC, name, dict(config))
        with self._admin() as admin:
            # Whether a setting exists is the broker's to say: Tansu lists none but those that were set.
            outcome = admin.alter_configs([resource], raise_on_unknown=False)["topic"][name]
            if outcome != "OK":
                raise ServerError(f"{self.name} refused {dict(config)} for topic {name!r}: {outcome}")
            _await_settings(admin, name, config)

    def topic_config(self, name: str) -> dict[str, str]:
        """Return the settings the broker reports for a topic, defaults included where it knows them."""
        with self._admin() as admin:
            return _reported_settings(admin, name)

    @contextmanager
    def _admin(self) -> Iterator[KafkaAdminClient]:
        with closing(KafkaAdminClient(bootstrap_servers=self.bootstrap_servers)) as admin:
            yield admin

    def _is_ready(self) -> bool:
        """Whether the broker knows of itself; asked at its own port, since the advertised one may be cut."""
        try:
            return _brokers_known(self.port) > 0
        except (ConnectionError, TimeoutError):
            return False


def _reported_settings(admin: KafkaAdminClient, topic: str) -> dict[str, str]:
    # Without a list of settings: asked for some by name, Tansu closes the connection.
    resource = ConfigResource(ConfigResourceType.TOPIC, topic)
    reported = admin.describe_configs([resource], config_filter="all")["topic"][topic]
    return {setting: str(entry["value"]) for setting, entry in reported.items()}


def _await_settings(admin: KafkaAdminClient, topic: str, wanted: Mapping[str, str]) -> None:
    """Ask again until the broker has learnt what its controller agreed to; a matter of milliseconds."""
    deadline = monotonic() + _SETTINGS_TIMEOUT_SECONDS
    while not wanted.items() <= _reported_settings(admin, topic).items():
        if monotonic() > deadline:
            raise ServerError(f"topic {topic!r} still without {dict(wanted)}: the broker did not take them over")


def _brokers_known(port: int) -> int:
    with socket.create_connection((LOOPBACK, port), timeout=_PROBE_TIMEOUT_SECONDS) as connection:
        connection.sendall(struct.pack(">i", len(_METADATA_REQUEST)) + _METADATA_REQUEST)
        answer = connection.recv(_METADATA_ANSWER.size, socket.MSG_WAITALL)
    if len(answer) < _METADATA_ANSWER.size:
        raise ConnectionResetError("the broker closed the connection before it answered")
    _length, _correlation_id, brokers = _METADATA_ANSWER.unpack(answer)
    return int(brokers)
