"""Real servers as child processes, made from packages alone: PostgreSQL, Redis, Tansu, Apache Kafka."""

from outbox_tasks.testing.services.apache_kafka import ApacheKafka
from outbox_tasks.testing.services.broker import Broker
from outbox_tasks.testing.services.places import free_port, scratch_directory
from outbox_tasks.testing.services.postgres import PostgresServer
from outbox_tasks.testing.services.process import ServerError, ServerProcess
from outbox_tasks.testing.services.redis import RedisServer
from outbox_tasks.testing.services.tansu import TansuBroker

__all__ = [
    "ApacheKafka",
    "Broker",
    "PostgresServer",
    "RedisServer",
    "ServerError",
    "ServerProcess",
    "TansuBroker",
    "free_port",
    "scratch_directory",
]
