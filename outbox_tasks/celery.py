"""The Celery app of a deployment that has none of its own: `celery -A outbox_tasks worker`."""

import logging
import sys
from pathlib import Path
from typing import Any

from celery import Celery, signals

from outbox_tasks.embed import setup

DEFAULTS = {
    "broker_connection_max_retries": None,
    "broker_connection_retry_on_startup": True,
    "broker_transport_options": {"socket_connect_timeout": 5, "socket_timeout": 10, "socket_keepalive": True},
    "result_expires": 3600,
    "task_send_sent_event": True,
    "timezone": "UTC",
    "worker_consumer": "outbox_tasks.consumer:Consumer",
    "worker_prefetch_multiplier": 1,
    "worker_send_task_events": True,
}
"""What a relay wants of Celery; the deployment's celeryconfig.py has the last word."""

CONFIGURATION = "celeryconfig"


def create_app(directory: Path) -> Celery:
    """Make the app, with the celeryconfig.py of a directory if there is one; connects to nothing."""
    app = Celery("outbox_tasks")
    app.add_defaults(DEFAULTS)
    if (directory / f"{CONFIGURATION}.py").is_file():
        if str(directory) not in sys.path:
            sys.path.insert(0, str(directory))
        app.config_from_object(CONFIGURATION)
    signals.after_setup_logger.connect(_quieten_kafka)
    return setup(app)


def _quieten_kafka(**_signal: Any) -> None:
    """Keep the Kafka client from telling of every connection; what goes wrong it still tells."""
    logging.getLogger("kafka").setLevel(logging.WARNING)


app = create_app(Path.cwd())
