"""Looks for what a deployment gets wrong, and says how to put it right."""

from collections.abc import Iterator
from typing import NamedTuple

import psycopg

from outbox_tasks.errors import BrokerUnavailableError, MisconfiguredError, SchemaVersionError
from outbox_tasks.publishing.publisher import Publisher, TopicFacts
from outbox_tasks.publishing.verdicts import describe
from outbox_tasks.settings import Settings
from outbox_tasks.store.connection import connect


class Finding(NamedTuple):
    """One thing looked at: what it is, whether it is right, and what was seen or is to be done."""

    subject: str
    right: bool
    detail: str


def check(settings: Settings, publisher: Publisher) -> list[Finding]:
    """Look at the database, its schema, the brokers and every topic the routes name."""
    return [_check_database(settings), *_check_kafka(settings, publisher)]


def _check_database(settings: Settings) -> Finding:
    try:
        with connect(settings) as connection:
            version = connection.info.server_version
    except (psycopg.Error, SchemaVersionError) as error:
        return Finding("database", right=False, detail=describe(error))
    return Finding("database", right=True, detail=f"PostgreSQL {version // 10000}, outbox schema as expected")


def _check_kafka(settings: Settings, publisher: Publisher) -> Iterator[Finding]:
    topics = sorted(set(settings.routes.values()))
    try:
        publisher.open()
        facts = publisher.facts(topics)
    except (BrokerUnavailableError, MisconfiguredError) as error:
        yield Finding("brokers", right=False, detail=describe(error))
        return
    yield Finding("brokers", right=True, detail=settings.bootstrap_servers)
    for topic in topics:
        yield _check_topic(topic, facts[topic])


def _check_topic(topic: str, facts: TopicFacts | BaseException) -> Finding:
    if isinstance(facts, TopicFacts):
        return Finding(f"topic {topic}", right=True, detail=f"{facts.partitions} partitions")
    return Finding(f"topic {topic}", right=False, detail=describe(facts))
