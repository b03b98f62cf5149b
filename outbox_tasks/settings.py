"""What can be set: one frozen object, made from Celery's configuration and the environment."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from outbox_tasks.errors import SettingsError

PREFIX = "outbox_"

_OURS_ALONE = frozenset({
    "acks", "api_version", "bootstrap_servers", "bootstrap_timeout_ms", "client_id", "delivery_timeout_ms",
    "enable_idempotence", "key_serializer", "max_block_ms", "max_in_flight_requests_per_connection", "partitioner",
    "request_timeout_ms", "retries", "transactional_id", "transaction_timeout_ms", "value_serializer",
})  # fmt: skip
"""Producer settings the guarantees rest on: `outbox_kafka` may not change them."""

_LIBRDKAFKAS_OURS_ALONE = frozenset({
    "acks", "request.required.acks", "api.version.request", "bootstrap.servers", "metadata.broker.list",
    "broker.version.fallback", "client.id", "default.topic.config", "delivery.report.only.error",
    "delivery.timeout.ms", "message.timeout.ms", "enable.gapless.guarantee", "enable.idempotence", "error_cb", "logger",
    "max.in.flight", "max.in.flight.requests.per.connection", "on_delivery", "partitioner", "queuing.strategy",
    "request.timeout.ms", "retries", "message.send.max.retries", "socket.timeout.ms",
    "topic.metadata.propagation.max.ms", "transactional.id", "transaction.timeout.ms",
})  # fmt: skip
"""The same by librdkafka's names, second names among them."""

PublisherName = Literal["kafka-python", "confluent-kafka"]

_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")

_REDIS_SCHEMES = ("redis", "rediss", "unix")

_STATEMENTS = 3
"""While a run publishes its last batch it may settle the one before and read; after that it settles and releases."""


def _json_if_text(value: object) -> object:
    """Decode a value that comes from the environment."""
    return json.loads(value) if isinstance(value, str) else value


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
Name = Annotated[str, Field(min_length=1)]


class Settings(BaseModel):
    """Everything that can be set. In Celery's configuration `outbox_x`, in the environment `OUTBOX_X`.

    Durations are seconds, sizes bytes. Mappings in the environment are JSON. Celery's configuration wins.

    Raises:
        SettingsError: from `load`, when a value is wrong or values contradict each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    database_url: Name = Field(
        repr=False, description="PostgreSQL: a libpq URL or string; `postgresql+psycopg://` is understood"
    )
    bootstrap_servers: Name = Field("localhost:9092", description="Kafka brokers, `host:port` with commas between")
    client_id: Name = Field("outbox_tasks", description="how the relay names itself to Kafka and PostgreSQL")
    kafka: Annotated[dict[str, Any], BeforeValidator(_json_if_text)] = Field(
        default_factory=dict,
        repr=False,
        description="more settings of the chosen client's producer, such as SASL, TLS, compression",
    )
    publisher: PublisherName = Field(
        "kafka-python", description="the Kafka client; confluent-kafka needs `outbox-tasks[confluent]`"
    )
    routes: Annotated[dict[Name, Name], BeforeValidator(_json_if_text)] = Field(
        default_factory=dict, description="topic by event type, else by aggregate type"
    )
    max_payload_bytes: Count = Field(1_000_000, description="largest payload `append` takes, encoded")

    queue: Name | None = Field(None, description="Celery queue of the tasks; without it the app's default queue")
    dispatch_seconds: Seconds = Field(1.0, description="time between two ticks of `outbox.dispatch`")
    retry_tick_seconds: Seconds = Field(1.0, description="time between two ticks of `outbox.retry`")
    partitions_tick_seconds: Seconds = Field(3600.0, description="time between two `outbox.maintain_partitions`")
    partitions_ahead_days: Count = Field(7, description="days for which partitions are made ahead")
    retention_days: Count = Field(7, description="days for which published events are kept")
    retention_action: Literal["drop", "detach"] = Field("drop", description="what becomes of a day past retention")
    dead_letter_retention_days: Count = Field(90, description="days for which decided dead letters are kept")
    lock_seconds: Seconds = Field(0.5, description="how long maintenance waits for a lock, and writers behind it")
    replay_tick_seconds: Seconds = Field(1.0, description="time between two ticks of `outbox.replay`")
    replay_rate: Count = Field(500, description="events a second a replay sends unless told otherwise")

    wake: bool = Field(True, description="whether commits wake the relay between two ticks, through Redis")
    wake_url: Name | None = Field(
        None, repr=False, description="Redis the wake-up goes through; without it Celery's broker, where that is one"
    )
    wake_timeout_seconds: Seconds = Field(0.1, description="how long a commit may wait for a Redis that is away")
    stay_seconds: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        0.2, description="how long a run that published something waits for more, within one tick; a second at most"
    )
    listen: bool = Field(False, description="whether workers listen for PostgreSQL's notifications")

    batch_size: Count = Field(2000, description="events published between two settlements")
    shards_per_run: Annotated[int, Field(ge=1, le=64)] = Field(
        16, description="shards one claim of a backlog takes at most"
    )
    run_seconds: Seconds = Field(10.0, description="after this a run claims and reads no more")
    delivery_seconds: Seconds = Field(10.0, description="how long a batch may take to be acknowledged")
    probe_seconds: Seconds = Field(2.0, description="how long a broker may take to answer a new connection")
    statement_seconds: Seconds = Field(5.0, description="statement timeout of the relay's own connections")
    lease_seconds: Seconds = Field(45.0, description="how long a lost machine keeps its shards from others")
    flush_seconds: Seconds = Field(30.0, description="how long `outbox.flush` waits if it is told nothing else")

    retry_base_seconds: Seconds = Field(1.0, description="upper bound of the wait after the first refusal")
    retry_max_seconds: Seconds = Field(300.0, description="upper bound of the wait after any refusal")
    retry_attempts: Count = Field(10, description="refusals after which an event becomes a dead letter")
    dead_letter_policy: Literal["skip", "block"] = Field(
        "skip", description="skip: a dead letter's key goes on with the next event; block: it waits for a person"
    )
    dead_letter_topic: Name | None = Field(None, description="topic that gets a copy of every dead letter")
    misconfigured_seconds: Seconds = Field(
        30.0, description="wait before a key is tried again whose topic is missing, forbidden or unknown"
    )
    topic_facts_seconds: Seconds = Field(60.0, description="how long limits of a topic are believed")

    @model_validator(mode="after")
    def _read_the_database_url(self) -> Settings:
        try:
            conninfo_to_dict(self.conninfo)
        except ProgrammingError:  # whose message repeats the password
            raise ValueError(
                "outbox_database_url is neither a URL such as postgresql://user@host/database nor a string such as "
                "'host=… dbname=…'"
            ) from None
        return self

    @field_validator("wake_url")
    @classmethod
    def _know_the_wake_url(cls, url: str | None) -> str | None:
        if url is not None and urlsplit(url).scheme not in _REDIS_SCHEMES:
            raise ValueError(f"it begins with one of {', '.join(f'{scheme}://' for scheme in _REDIS_SCHEMES)}")
        return url

    @model_validator(mode="after")
    def _leave_guarantees_alone(self) -> Settings:
        ours = _OURS_ALONE if self.publisher == "kafka-python" else _LIBRDKAFKAS_OURS_ALONE
        taken = sorted(name for name in self.kafka if name in ours or self._is_mock(name))
        if taken:
            raise ValueError(f"outbox_kafka may not set {', '.join(taken)}: the relay's guarantees rest on them")
        return self

    def _is_mock(self, name: str) -> bool:
        """Say whether a setting has librdkafka talk to a broker of its own making, which forgets what it takes."""
        return self.publisher == "confluent-kafka" and name.startswith("test.")

    @model_validator(mode="after")
    def _know_the_protocol(self) -> Settings:
        name = "security_protocol" if self.publisher == "kafka-python" else "security.protocol"
        protocol = self.kafka.get(name, "PLAINTEXT")
        if protocol not in _PROTOCOLS:  # kafka-python takes any other word for PLAINTEXT
            raise ValueError(f"outbox_kafka has {name} {protocol!r}: it is one of {', '.join(_PROTOCOLS)}")
        return self

    @model_validator(mode="after")
    def _end_runs_before_leases(self) -> Settings:
        if self.lease_seconds < self.shortest_lease_seconds:
            raise ValueError(
                f"outbox_lease_seconds is {self.lease_seconds:g}, but a run can take {self.shortest_lease_seconds:g} s "
                "(outbox_run_seconds + outbox_probe_seconds + the longer of outbox_delivery_seconds and "
                f"{_STATEMENTS} * outbox_statement_seconds + {_STATEMENTS} * outbox_statement_seconds + 1): "
                "raise the first or lower the others"
            )
        return self

    @property
    def shortest_lease_seconds(self) -> float:
        """The shortest lease that every run ends before."""
        statements = _STATEMENTS * self.statement_seconds
        return self.run_seconds + self.probe_seconds + max(self.delivery_seconds, statements) + statements + 1

    @property
    def time_limit_seconds(self) -> int:
        """Celery's hard time limit of a run: what is still going then is killed before its lease ends."""
        return math.floor(self.lease_seconds)

    @property
    def conninfo(self) -> str:
        """The database as libpq takes it."""
        scheme, separator, rest = self.database_url.partition("://")
        return f"postgresql://{rest}" if separator and scheme.startswith("postgresql+") else self.database_url


_in_use: Settings | None = None


def use(settings: Settings) -> None:
    """Make these the settings of this process, as the Celery app does: `append` then knows routes and limits."""
    global _in_use  # noqa: PLW0603 - besides the app the only state of the process
    _in_use = settings


def in_use() -> Settings | None:
    """Return the settings of this process, or None where nothing has set them."""
    return _in_use


Origin = Literal["Celery's configuration", "the environment"]


def load(configuration: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Make the settings from the `outbox_*` of a Celery configuration and the `OUTBOX_*` of an environment.

    Raises:
        SettingsError: a name is unknown (the message has the nearest known one), a value is wrong, or two contradict.
    """
    found = {name: value for name, value in environment.items() if name.startswith(PREFIX.upper())}
    values = _known({name.lower(): value for name, value in found.items()}, origin="the environment")
    values |= _known(_configured(configuration), origin="Celery's configuration")
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError(_explain(error)) from None
    except json.JSONDecodeError as error:
        raise SettingsError(f"a setting is not valid JSON: {error}") from None


def _configured(configuration: Mapping[str, Any]) -> dict[str, Any]:
    return {name: configuration[name] for name in configuration if name.startswith(PREFIX)}


def _known(values: Mapping[str, Any], *, origin: Origin) -> dict[str, Any]:
    """Strip the prefix of every name, refusing unknown ones."""
    fields = Settings.model_fields
    for name in values:
        if name.removeprefix(PREFIX) not in fields:
            raise SettingsError(
                f"{origin} has {_cased(name, origin)}, which is no setting{_hint(name, fields, origin)}"
            )
    return {name.removeprefix(PREFIX): value for name, value in values.items()}


def _hint(name: str, fields: Iterable[str], origin: Origin) -> str:
    near = difflib.get_close_matches(name, [PREFIX + field for field in fields], n=1, cutoff=0)
    return f": did you mean {_cased(near[0], origin)}?" if near else ""


def _cased(name: str, origin: Origin) -> str:
    return name.upper() if origin == "the environment" else name


def _explain(error: ValidationError) -> str:
    return "; ".join(_explain_one(dict(problem)) for problem in error.errors(include_url=False))


def _explain_one(problem: Mapping[str, Any]) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return str(message)
    name = PREFIX + ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"{name} is not set: put it into celeryconfig.py or set {name.upper()}"
    return f"{name} is {_shown(problem)}: {message}"


def _shown(problem: Mapping[str, Any]) -> str:
    """Return a wrong value as it may be read by anybody: settings that can hold a password stay unseen."""
    return repr(problem["input"]) if Settings.model_fields[problem["loc"][0]].repr else "wrong"
