"""Settings, from Celery's configuration and the environment into one checked object."""

import re
import subprocess
import sys
from typing import Any

import pytest

from outbox_tasks import settings
from outbox_tasks.errors import SettingsError
from outbox_tasks.publishing.confluent_config import Heard
from outbox_tasks.publishing.confluent_config import producer_config as confluent_producer_config
from outbox_tasks.publishing.factory import new_publisher
from outbox_tasks.publishing.kafka_config import producer_config
from outbox_tasks.settings import load

URL = "postgresql://relay:hunter2@db.example/shop"
GIVEN = {"outbox_database_url": URL}

GUARANTEES = {
    "acks": 1,
    "enable_idempotence": False,
    "max_in_flight_requests_per_connection": 50,
    "retries": 0,
    "delivery_timeout_ms": 1,
    "request_timeout_ms": 1,
    "max_block_ms": 1,
    "transactional_id": "x",
    "key_serializer": "x",
    "value_serializer": "x",
    "partitioner": "x",
    "bootstrap_servers": "elsewhere:9092",
}


def refusal(configuration: dict[str, Any], environment: dict[str, str] | None = None) -> str:
    """Return the message with which settings are refused."""
    with pytest.raises(SettingsError) as caught:
        load(configuration, environment or {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("outbox_lease_secnds", "outbox_lease_seconds"),
        ("outbox_batchsize", "outbox_batch_size"),
        ("outbox_route", "outbox_routes"),
        ("outbox_bootstrap_server", "outbox_bootstrap_servers"),
    ],
)
def test_an_unknown_name_in_the_configuration_is_refused(wrong: str, meant: str) -> None:
    """An unknown name in Celery's configuration is refused with the nearest known one."""
    message = refusal(GIVEN | {wrong: 1})
    assert f"Celery's configuration has {wrong}, " in message
    assert f"did you mean {meant}?" in message


def test_an_unknown_name_in_the_environment_is_refused() -> None:
    """An unknown name in the environment is refused with the nearest known one, in capitals."""
    message = refusal(GIVEN, {"OUTBOX_RUN_SECOND": "3"})
    assert "the environment has OUTBOX_RUN_SECOND, " in message
    assert "did you mean OUTBOX_RUN_SECONDS?" in message


def test_names_of_others_are_none_of_our_business() -> None:
    """What does not begin with the prefix is left to whom it belongs."""
    assert load(GIVEN | {"broker_url": "redis://"}, {"OUTBOX": "x", "PATH": "/bin"}).conninfo == URL


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("outbox_batch_size", "many"),
        ("outbox_batch_size", 0),
        ("outbox_batch_size", 1.5),
        ("outbox_shards_per_run", 65),
        ("outbox_run_seconds", -1),
        ("outbox_run_seconds", float("nan")),
        ("outbox_run_seconds", float("inf")),
        ("outbox_bootstrap_servers", ""),
        ("outbox_queue", ""),
        ("outbox_routes", ["order"]),
        ("outbox_routes", {"order": ""}),
        ("outbox_routes", {"order": 1}),
        ("outbox_kafka", 7),
        ("outbox_wake", "perhaps"),
        ("outbox_wake_url", "amqp://localhost"),
        ("outbox_wake_url", "localhost:6379"),
        ("outbox_wake_timeout_seconds", 0),
        ("outbox_stay_seconds", 1.5),
        ("outbox_listen", 2),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(name: str, value: object) -> None:
    """A value of the wrong kind, or out of bounds, is refused by its name."""
    assert name in refusal(GIVEN | {name: value})


def test_a_missing_database_says_how_to_set_it() -> None:
    """Without a database nothing starts, and the message says where to put it."""
    assert "outbox_database_url is not set" in refusal({})
    assert "OUTBOX_DATABASE_URL" in refusal({})


def test_a_run_that_could_outlive_its_lease_is_refused() -> None:
    """A lease that a run could outlive is refused with both numbers."""
    message = refusal(GIVEN | {"outbox_lease_seconds": 37})
    assert "outbox_lease_seconds is 37" in message
    assert "43 s" in message


@pytest.mark.parametrize("name", ["run", "delivery", "probe", "statement"])
def test_the_shortest_lease_counts_every_wait(name: str) -> None:
    """Each wait of a run counts towards the shortest lease: making any longer breaks a lease that just sufficed."""
    shortest = load(GIVEN, {}).shortest_lease_seconds
    just_enough = GIVEN | {"outbox_lease_seconds": shortest}
    longer = getattr(load(just_enough, {}), f"{name}_seconds") + 6
    assert f"outbox_{name}_seconds" in refusal(just_enough | {f"outbox_{name}_seconds": longer})


def test_mappings_in_the_environment_are_json() -> None:
    """Mappings come from the environment as JSON, numbers as text."""
    made = load(
        {},
        {
            "OUTBOX_DATABASE_URL": URL,
            "OUTBOX_ROUTES": '{"order": "orders", "größer": "große"}',
            "OUTBOX_KAFKA": '{"compression_type": "gzip"}',
            "OUTBOX_BATCH_SIZE": "7",
            "OUTBOX_RUN_SECONDS": "2.5",
        },
    )
    assert made.routes == {"order": "orders", "größer": "große"}
    assert made.kafka == {"compression_type": "gzip"}
    assert (made.batch_size, made.run_seconds) == (7, 2.5)


def test_broken_json_is_refused_by_name() -> None:
    """Broken JSON is refused by the name of its setting."""
    assert "outbox_routes" in refusal(GIVEN, {"OUTBOX_ROUTES": '{"order":'})


def test_the_configuration_wins_over_the_environment() -> None:
    """Where both set it, Celery's configuration wins."""
    assert load(GIVEN | {"outbox_batch_size": 3}, {"OUTBOX_BATCH_SIZE": "9"}).batch_size == 3


@pytest.mark.parametrize("name", sorted(GUARANTEES))
def test_kafka_settings_that_break_guarantees_are_refused(name: str) -> None:
    """What the guarantees rest on cannot be set through outbox_kafka."""
    assert f"outbox_kafka may not set {name}" in refusal(GIVEN | {"outbox_kafka": {name: GUARANTEES[name]}})


def test_the_producer_keeps_its_guarantees() -> None:
    """Whatever else is set, the producer is idempotent, acknowledged by all and ends its deliveries in time."""
    config = producer_config(load(GIVEN | {"outbox_kafka": {"linger_ms": 20, "compression_type": "gzip"}}, {}))
    assert config["acks"] == "all"
    assert config["enable_idempotence"] is True
    assert config["delivery_timeout_ms"] == 10_000
    assert config["request_timeout_ms"] * 2 + config["linger_ms"] <= config["delivery_timeout_ms"]
    assert config["linger_ms"] == 20
    assert config["compression_type"] == "gzip"


def test_security_settings_reach_the_producer() -> None:
    """Credentials and TLS settings pass through to the client."""
    kafka = {"security_protocol": "SASL_SSL", "sasl_mechanism": "SCRAM-SHA-512", "sasl_plain_username": "relay"}
    assert kafka.items() <= producer_config(load(GIVEN | {"outbox_kafka": kafka}, {})).items()


def test_no_password_shows() -> None:
    """Neither repr nor str of the settings shows the database's password or Kafka's."""
    secret = {"outbox_kafka": {"sasl_plain_password": "hunter2"}, "outbox_wake_url": "redis://me:hunter2@localhost"}
    made = load(GIVEN | secret, {})
    assert "hunter2" not in f"{made!r} {made}"


@pytest.mark.parametrize(
    ("configuration", "environment"),
    [
        ({}, {"OUTBOX_KAFKA": '{"sasl_plain_password": "hunter2",}'}),
        ({}, {"OUTBOX_KAFKA": '["hunter2"]'}),
        ({"outbox_kafka": [("sasl_plain_password", "hunter2")]}, {}),
        ({"outbox_database_url": [URL]}, {}),
        ({"outbox_lease_seconds": 1}, {}),
        ({"outbox_wake_url": "amqp://me:hunter2@localhost"}, {}),
        ({"outbox_kafka": {"acks": 1, "sasl_plain_password": "hunter2"}}, {}),
        ({"outbox_database_url": "postgres+psycopg://relay:hunter2@db.example/shop"}, {}),
    ],
)
def test_no_password_shows_in_an_error(configuration: dict[str, Any], environment: dict[str, str]) -> None:
    """An error about a setting never shows a password, however the setting is wrong."""
    assert "hunter2" not in refusal(GIVEN | configuration, environment)


def test_settings_cannot_be_changed() -> None:
    """Once made, settings are frozen."""
    made: Any = load(GIVEN, {})
    with pytest.raises(ValueError, match="frozen"):
        made.batch_size = 3


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg", "postgresql+asyncpg"])
def test_sqlalchemy_urls_are_understood(scheme: str) -> None:
    """A URL as SQLAlchemy writes it names the same database."""
    assert load({"outbox_database_url": URL.replace("postgresql", scheme)}, {}).conninfo == URL


@pytest.mark.parametrize("url", ["redis://localhost/1", "rediss://me:secret@localhost:6380", "unix:///run/redis.sock"])
def test_a_redis_for_the_wake_up(url: str) -> None:
    """The wake-up takes any URL that names one Redis."""
    assert load(GIVEN, {"OUTBOX_WAKE_URL": url}).wake_url == url


def test_the_wake_up_is_on_and_listening_is_off() -> None:
    """Commits wake the relay unless that is turned off; workers listen to notifications where it is turned on."""
    made, turned = load(GIVEN, {}), load(GIVEN, {"OUTBOX_WAKE": "false", "OUTBOX_LISTEN": "true"})
    assert (made.wake, made.listen) == (True, False)
    assert (turned.wake, turned.listen) == (False, True)


def test_a_libpq_string_stays_as_it_is() -> None:
    """A libpq string of names and values is passed on untouched."""
    assert load({"outbox_database_url": "host=db dbname=shop"}, {}).conninfo == "host=db dbname=shop"


def test_a_run_is_killed_before_its_lease_ends() -> None:
    """Celery's hard time limit is no later than the end of the lease."""
    made = load(GIVEN | {"outbox_lease_seconds": 44.9}, {})
    assert made.shortest_lease_seconds < made.time_limit_seconds <= made.lease_seconds


def test_settings_in_use_are_those_last_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of the process are none until the app sets them."""
    monkeypatch.setattr(settings, "_in_use", None)
    assert settings.in_use() is None
    made = load(GIVEN, {})
    settings.use(made)
    assert settings.in_use() is made


def test_no_password_shows_in_an_error_about_kafka() -> None:
    """A misspelt name in outbox_kafka is told, with the nearest known one, and its value is not."""
    made = load(GIVEN | {"outbox_kafka": {"sasl_plain_pasword": "hunter2"}}, {})
    with pytest.raises(SettingsError, match="sasl_plain_password") as refused:
        producer_config(made)
    assert "hunter2" not in str(refused.value)


# confluent-kafka, whose settings have librdkafka's names

CONFLUENT = GIVEN | {"outbox_publisher": "confluent-kafka"}

LIBRDKAFKAS_GUARANTEES = {
    "acks": 1,
    "request.required.acks": 1,
    "bootstrap.servers": "elsewhere:9092",
    "metadata.broker.list": "elsewhere:9092",
    "default.topic.config": {"acks": 1},
    "delivery.timeout.ms": 1,
    "message.timeout.ms": 1,
    "delivery.report.only.error": False,
    "enable.gapless.guarantee": False,
    "enable.idempotence": False,
    "error_cb": print,
    "max.in.flight": 50,
    "max.in.flight.requests.per.connection": 50,
    "message.send.max.retries": 0,
    "on_delivery": print,
    "partitioner": "consistent",
    "queuing.strategy": "lifo",
    "request.timeout.ms": 1,
    "retries": 0,
    "socket.timeout.ms": 1,
    "test.mock.num.brokers": 3,
    "transactional.id": "x",
}


def confluent_config(kafka: dict[str, object]) -> dict[str, Any]:
    """Return what the producer is given."""
    return confluent_producer_config(load(CONFLUENT | {"outbox_kafka": kafka}, {}), Heard())


@pytest.mark.parametrize("name", sorted(LIBRDKAFKAS_GUARANTEES))
def test_librdkafkas_settings_that_break_guarantees_are_refused(name: str) -> None:
    """With confluent-kafka too, what the guarantees rest on cannot be set, by whichever of its names."""
    kafka = {name: LIBRDKAFKAS_GUARANTEES[name]}
    assert f"outbox_kafka may not set {name}" in refusal(CONFLUENT | {"outbox_kafka": kafka})


def test_librdkafkas_producer_keeps_its_guarantees() -> None:
    """Whatever else is set, librdkafka is idempotent, gapless, acknowledged by all, and partitions as Java does."""
    config = confluent_config({"linger.ms": 20, "compression.codec": "gzip"})
    assert config["acks"] == "all"
    assert config["enable.idempotence"] is True
    assert config["enable.gapless.guarantee"] is True
    assert config["partitioner"] == "murmur2_random"
    assert config["message.timeout.ms"] == 20_000
    assert config["socket.timeout.ms"] * 2 <= 10_000
    assert config["linger.ms"] == 20
    assert config["compression.type"] == "gzip"


@pytest.mark.parametrize("linger", [0.5, "0.5"])
def test_librdkafka_may_linger_for_less_than_a_millisecond(linger: object) -> None:
    """A linger of a part of a millisecond reaches librdkafka as it is."""
    assert confluent_config({"linger.ms": linger})["linger.ms"] == 0.5


@pytest.mark.parametrize(
    ("kafka", "told"),
    [
        ({"linger.msec": 5}, 'No such configuration property: "linger.msec"'),
        ({"compression_type": "gzip"}, "whose names have dots, not underscores"),
        ({"compression.type": "unheard-of"}, "unheard-of"),
        ({"linger.ms": "soon"}, "outbox_kafka has linger.ms 'soon'"),
        ({"linger.ms": float("nan")}, "outbox_kafka has linger.ms nan"),
        ({"linger.ms": 10_000_000}, "outside allowed range"),
        ({"sasl.pasword": "hunter2"}, "sasl.pasword"),
    ],
)
def test_settings_librdkafka_does_not_know_are_refused(kafka: dict[str, object], told: str) -> None:
    """A misspelt name or a wrong value for librdkafka is refused before anything connects, without showing a secret."""
    with pytest.raises(SettingsError, match=re.escape(told)) as refused:
        confluent_config(kafka)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("publisher", "name"), [("kafka-python", "security_protocol"), ("confluent-kafka", "security.protocol")]
)
def test_a_protocol_that_is_none_is_refused_by_either_name(publisher: str, name: str) -> None:
    """A misspelt security protocol is refused for either client."""
    given = GIVEN | {"outbox_publisher": publisher, "outbox_kafka": {name: "SSLL"}}
    assert f"outbox_kafka has {name} 'SSLL'" in refusal(given)


def test_an_unknown_client_is_refused() -> None:
    """There are two clients, and the message names both."""
    message = refusal(GIVEN | {"outbox_publisher": "librdkafka"})
    assert "'kafka-python' or 'confluent-kafka'" in message


def test_a_client_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing confluent-kafka without its package says what to install."""
    for name in [name for name in sys.modules if name.startswith("outbox_tasks.publishing.confluent")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(SettingsError, match=re.escape("pip install outbox-tasks[confluent]")):
        new_publisher(load(CONFLUENT, {}))


def test_confluent_kafka_is_imported_only_where_it_is_chosen() -> None:
    """Without the extra the package works: nothing imports confluent-kafka unless it is chosen."""
    program = "import sys, outbox_tasks.celery, outbox_tasks.cli; sys.exit('confluent_kafka' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
