"""Apache Kafka as a child process: one node in KRaft mode, broker and controller at once."""

import subprocess
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from outbox_tasks.testing.services.broker import Broker
from outbox_tasks.testing.services.guard import Launch
from outbox_tasks.testing.services.kafka_jars import kafka_jars, require_tools
from outbox_tasks.testing.services.places import LOOPBACK, free_port
from outbox_tasks.testing.services.process import ServerError

# Any will do: 16 bytes in URL-safe base64.
_CLUSTER_ID = "b3V0Ym94LXRhc2tzLXRlcw"
# One broker with little to do: start fast, take few threads and little memory.
_JVM_OPTIONS = (
    "-Xms128m",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
)


class ApacheKafka(Broker):
    """Apache Kafka from Maven Central; needs `java` and `mvn`. Data outlive `stop`, `kill` and `restart`.

    `partitions` is the broker's default for topics created without a number. Topics are never created
    by being asked for. `properties` are more lines of its server.properties, or other values for those there are.
    """

    name = "kafka"
    start_timeout = timedelta(seconds=90)

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        advertised_port: int | None = None,
        partitions: int = 8,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(directory, port=port, advertised_port=advertised_port)
        self._controller_port = free_port()
        self._partitions = partitions
        self._more = dict(properties or {})

    @property
    def _properties(self) -> Path:
        return self.directory / "server.properties"

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def _prepare(self) -> None:
        require_tools()
        lines = [f"{name}={value}" for name, value in self._settings().items()]
        self._properties.write_text("\n".join([*lines, ""]))
        if not (self._data / "meta.properties").exists():
            self._format()

    def _launch(self) -> Launch:
        command = [*_java(), "kafka.Kafka", str(self._properties)]
        return Launch(command=command, directory=self.directory, log=self.log)

    def _format(self) -> None:
        options = ["format", "--cluster-id", _CLUSTER_ID, "--config", str(self._properties)]
        done = subprocess.run(
            [*_java(), "kafka.tools.StorageTool", *options],
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ServerError(f"Kafka's StorageTool failed with {done.returncode}: {done.stdout}{done.stderr}")

    def _settings(self) -> dict[str, str]:
        return {**self._addresses(), **self._sizes(), **self._more}

    def _addresses(self) -> dict[str, str]:
        controller = f"{LOOPBACK}:{self._controller_port}"
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{controller}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{LOOPBACK}:{self.port},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.bootstrap_servers}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": str(self._data),
        }

    def _sizes(self) -> dict[str, str]:
        return {
            "num.partitions": str(self._partitions),
            "auto.create.topics.enable": "false",
            "default.replication.factor": "1",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "share.coordinator.state.topic.num.partitions": "1",
            "group.initial.rebalance.delay.ms": "0",
            # One second is the default wait of a freshly started node for the election it is going to win.
            "controller.quorum.election.timeout.ms": "200",
            # A killed broker's successor is let in when this has passed; 9 seconds is the default.
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
            "num.network.threads": "2",
            "num.io.threads": "2",
        }


def _java() -> list[str]:
    return ["java", *_JVM_OPTIONS, "-cp", f"{kafka_jars()}/*"]
