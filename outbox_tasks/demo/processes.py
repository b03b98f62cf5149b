"""The programs of a deployment as child processes: order service, Celery worker, beat and Flower."""

import sys
from collections.abc import Mapping
from pathlib import Path
from signal import SIGTERM

import httpx

from outbox_tasks.testing.services import ServerProcess
from outbox_tasks.testing.services.guard import Launch
from outbox_tasks.testing.services.places import LOOPBACK

CHILDREN = 2
"""Processes of the worker's pool."""


class Program(ServerProcess):
    """A Python program that runs in the directory and with the environment of the deployment."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        super().__init__(directory)
        self._environment = environment

    def _prepare(self) -> None:
        """Nothing to make."""

    def _run(self, *command: str) -> Launch:
        return Launch(
            command=[sys.executable, "-m", *command],
            directory=self.directory,
            log=self.log,
            environment=self._environment,
            # a worker asked to stop takes its children along; a killed one may leave them
            orphan_signal=SIGTERM,
        )

    def _log_has(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")


class WebProgram(Program):
    """A program that serves HTTP."""

    health = "/health"

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://{LOOPBACK}:{self.port}"

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}{self.health}", timeout=2).is_success
        except httpx.TransportError:
            return False


class Shop(WebProgram):
    """The order service."""

    name = "shop"

    def _launch(self) -> Launch:
        options = ["--factory", f"--host={LOOPBACK}", f"--port={self.port}", "--no-access-log"]
        return self._run("uvicorn", "outbox_tasks.demo.shop:create_app", *options)


class Worker(Program):
    """The Celery worker that runs the outbox's tasks."""

    name = "worker"

    def _launch(self) -> Launch:
        options = [f"--concurrency={CHILDREN}", "--hostname=demo@%h", "--loglevel=INFO"]
        return self._run("celery", "-A", "outbox_tasks", "worker", *options)

    def _is_ready(self) -> bool:
        return self._log_has(" ready.")


class Beat(Program):
    """Celery beat, which sends the tasks that are due."""

    name = "beat"

    def _launch(self) -> Launch:
        options = [f"--schedule={self.directory / 'celerybeat-schedule'}", "--loglevel=INFO"]
        return self._run("celery", "-A", "outbox_tasks", "beat", *options)

    def _is_ready(self) -> bool:
        return self._log_has("beat: Starting...")


class Flower(WebProgram):
    """Flower, which shows workers and tasks to whoever has the password."""

    name = "flower"
    health = "/healthcheck"

    def __init__(self, directory: Path, environment: Mapping[str, str], *, user: str, password: str) -> None:
        # In the environment, since everyone on the machine can read command lines.
        super().__init__(directory, {**environment, "FLOWER_BASIC_AUTH": f"{user}:{password}"})
        self.user = user
        self.password = password

    def _launch(self) -> Launch:
        return self._run("celery", "-A", "outbox_tasks", "flower", f"--address={LOOPBACK}", f"--port={self.port}")
