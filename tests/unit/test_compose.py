"""The container files hang together; no engine is needed to know that."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import flower.options
import pytest
import yaml
from celery.bin.celery import celery

from outbox_tasks.settings import load

CHECKOUT = Path(__file__).parents[2]
COMPOSE = CHECKOUT / "docker-compose.yml"
CONTENT: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
SERVICES: dict[str, dict[str, Any]] = CONTENT["services"]
RELAY = [name for name, service in SERVICES.items() if service["image"] == "outbox-tasks"]
ONE_SHOT = [name for name, service in SERVICES.items() if service["restart"] == "no"]
LASTING = [name for name in SERVICES if name not in ONE_SHOT]

# ${NAME}, ${NAME:-default}, ${NAME:?message}
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*)|:\?(?P<message>[^}]*))?\}")


def interpolated(text: str, **given: str) -> str:
    """Replace variables as compose does."""
    return VARIABLE.sub(lambda match: given.get(match["name"], match["default"] or ""), text)


def environment(service: str, **given: str) -> dict[str, str]:
    """Return the environment of a service."""
    return {name: interpolated(str(value), **given) for name, value in SERVICES[service]["environment"].items()}


def seconds(duration: str) -> float:
    """Read a duration such as 45s."""
    assert duration.endswith("s")
    return float(duration[:-1])


def test_all_services() -> None:
    """Every part of a deployment has a service."""
    assert set(SERVICES) == {"postgres", "redis", "kafka", "topics", "migrate", "worker", "beat", "flower"}
    assert set(RELAY) == {"migrate", "worker", "beat", "flower"}
    assert set(ONE_SHOT) == {"topics", "migrate"}


@pytest.mark.parametrize("service", RELAY)
def test_commands_exist(service: str) -> None:
    """Every command of the relay's image is one of Celery's, and so are its options."""
    program, *arguments = SERVICES[service]["command"]
    assert [program, *arguments[:2]] == ["celery", "-A", "outbox_tasks"]
    parse(celery, click.Context(celery), arguments[2:])


def parse(group: click.Group, context: click.Context, arguments: list[str]) -> None:
    """Follow subcommands to the last one and parse its options without running it."""
    name, command, rest = group.resolve_command(context, arguments)
    assert command is not None
    inner = click.Context(command, info_name=name, parent=context, **command.context_settings)
    if isinstance(command, click.Group):
        parse(command, inner, rest)
    else:
        command.make_parser(inner).parse_args(rest)


def test_flower_options_exist() -> None:
    """The options of Flower, which Celery hands on unread, are Flower's."""
    words = SERVICES["flower"]["command"]
    names = {word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")}
    assert names <= set(flower.options.default_options)


@pytest.mark.parametrize("service", RELAY)
def test_settings_are_real(service: str) -> None:
    """Every OUTBOX_* of a service is a setting, with a value it may have."""
    ours = {name: value for name, value in environment(service).items() if name.startswith("OUTBOX_")}
    settings = load({}, ours)
    assert settings.conninfo == "postgresql://outbox:outbox@postgres:5432/outbox"
    assert settings.bootstrap_servers == "kafka:19092"


def test_passwords_agree() -> None:
    """The relay logs in with the password PostgreSQL is made with."""
    password = environment("postgres", POSTGRES_PASSWORD="other")["POSTGRES_PASSWORD"]
    assert f":{password}@" in environment("worker", POSTGRES_PASSWORD="other")["OUTBOX_DATABASE_URL"]


def test_routes_lead_to_topics_that_are_made() -> None:
    """Every topic of the routes is created before the worker starts."""
    routes = load({}, environment("worker")).routes
    assert {f"--topic={topic}" for topic in routes.values()} <= set(SERVICES["topics"]["command"])


def test_dependencies_exist() -> None:
    """Services wait for services that are there, and for a condition these can meet."""
    for service in SERVICES.values():
        for name, how in service.get("depends_on", {}).items():
            expected = "service_completed_successfully" if name in ONE_SHOT else "service_healthy"
            assert how["condition"] == expected
            assert expected != "service_healthy" or "healthcheck" in SERVICES[name]


@pytest.mark.parametrize("service", ["worker", "beat"])
def test_tables_come_first(service: str) -> None:
    """Worker and beat start when the tables and the topics are made."""
    assert {"migrate", "topics", "redis"} <= SERVICES[service]["depends_on"].keys()


@pytest.mark.parametrize("service", LASTING)
def test_health_is_checked(service: str) -> None:
    """Whatever runs on has a health check and comes back by itself."""
    assert SERVICES[service]["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    assert SERVICES[service]["restart"] == "unless-stopped"


def test_ports_are_loopback() -> None:
    """Nothing can be reached from another machine."""
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_versions_are_pinned() -> None:
    """Images of others name a version, and PostgreSQL's major version is one we support."""
    images = {service["image"] for service in SERVICES.values()} - {"outbox-tasks"}
    assert all(re.fullmatch(r"[a-z/]+:\d+(\.\d+)*", image) for image in images)
    (postgres,) = [image for image in images if image.startswith("postgres:")]
    assert 14 <= int(postgres.removeprefix("postgres:")) <= 18


def test_flower_needs_a_password() -> None:
    """Compose refuses to start without FLOWER_PASSWORD, and Flower is handed nothing it does not know."""
    ours = SERVICES["flower"]["environment"]
    (password,) = [
        match for match in VARIABLE.finditer(ours["FLOWER_BASIC_AUTH"]) if match["name"] == "FLOWER_PASSWORD"
    ]
    assert password["message"]
    # Flower ends with a KeyError at any other FLOWER_* that is none of its options.
    assert [name for name in ours if name.startswith("FLOWER_")] == ["FLOWER_BASIC_AUTH"]


def test_worker_may_finish() -> None:
    """A worker that is asked to stop is killed no sooner than a run must have ended."""
    settings = load({}, environment("worker"))
    assert seconds(SERVICES["worker"]["stop_grace_period"]) >= settings.time_limit_seconds


def test_volumes_are_declared() -> None:
    """Every named volume is declared, and every declared one is used."""
    used = {volume.partition(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert used == CONTENT["volumes"].keys()


def dockerfile(instruction: str) -> list[str]:
    """Return the arguments of every such instruction."""
    lines = (CHECKOUT / "Dockerfile").read_text().splitlines()
    return [line.removeprefix(instruction).strip() for line in lines if line.startswith(f"{instruction} ")]


def test_image_is_not_root() -> None:
    """The image ends as a user that is not root."""
    assert dockerfile("USER") == ["outbox"]


def test_image_gets_what_it_copies() -> None:
    """Whatever the Dockerfile copies is in the checkout and not kept out by .dockerignore."""
    copies = [line.split() for line in dockerfile("COPY") if not line.startswith("--from")]
    sources = {source for *names, _target in copies for source in names}
    let_in = {line[1:] for line in (CHECKOUT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == let_in
    assert all((CHECKOUT / source).exists() for source in sources)
    assert "celeryconfig.py" in sources


def has_compose() -> bool:
    """Whether docker and its compose plugin are installed; no engine need run."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not has_compose(), reason="docker has no compose plugin here")
@pytest.mark.parametrize(("password", "accepted"), [("secret", True), ("", False)])
def test_compose_reads_it(password: str, *, accepted: bool) -> None:
    """Docker compose accepts the file with a password for Flower, and without one refuses it."""
    done = subprocess.run(
        ["docker", "compose", "--file", COMPOSE, "config", "--quiet"],
        env={**os.environ, "FLOWER_PASSWORD": password},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) is accepted, done.stderr
