"""Looks for what a deployment gets wrong, and says how to put it right."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

import psycopg

from outbox_tasks.errors import BrokerUnavailableError, MisconfiguredError, SchemaVersionError
from outbox_tasks.publishing.publisher import Publisher, TopicFacts
from outbox_tasks.publishing.verdicts import describe
from outbox_tasks.settings import Settings
from outbox_tasks.store import notifications, partitions, runs, status
from outbox_tasks.store.connection import Connection, connect

OLDEST_POSTGRESQL = 14
CLOCK_SECONDS = 5.0
"""How far this machine's clock may be from the database's: ids carry the time, and people compare logs."""

BEAT_SECONDS = 30.0
"""A beat that has not made a dispatch run in this time, idle ones included, is taken for dead."""


FULL_QUEUE = 0.5
"""Where PostgreSQL begins to warn in its own log: half of what it keeps of notifications, 4 GB as it comes."""


class Finding(NamedTuple):
    """One thing looked at: what it is, whether it is right, and what was seen or is to be done."""

    subject: str
    right: bool
    detail: str


def check(settings: Settings, publisher: Publisher) -> list[Finding]:
    """Look at the database, its schema, the brokers and every topic the routes name."""
    return [*_check_database(settings), *_check_kafka(settings, publisher)]


def _check_database(settings: Settings) -> Iterator[Finding]:
    try:
        with connect(settings) as connection:
            yield _version(connection)
            yield Finding("schema", right=True, detail="of this version of outbox_tasks")
            yield _sequence(connection)
            yield _clock(connection)
            yield _today(connection)
            yield notifying(
                on=notifications.is_on(connection),
                listen=settings.listen,
                queue_usage=notifications.queue_usage(connection),
            )
    except SchemaVersionError as error:
        yield Finding("schema", right=False, detail=describe(error))
    except psycopg.Error as error:
        yield Finding("database", right=False, detail=describe(error))


def _version(connection: Connection) -> Finding:
    version = connection.info.server_version // 10000
    detail = f"PostgreSQL {version}" + ("" if version >= OLDEST_POSTGRESQL else f": {OLDEST_POSTGRESQL} is the oldest")
    return Finding("database", right=version >= OLDEST_POSTGRESQL, detail=detail)


def _sequence(connection: Connection) -> Finding:
    sequence = status.sequence(connection)
    if sequence is None:
        return Finding("sequence", right=False, detail="outbox_id_seq is no sequence any more")
    wrong = {
        f"sessions draw {sequence.cache} ids at once, so order is lost: ALTER SEQUENCE outbox_id_seq CACHE 1": (
            sequence.cache != 1
        ),
        "it was set back, so new events get ids that were passed already: "
        "SELECT setval('outbox_id_seq', (SELECT max(id) FROM outbox))": sequence.set_back,
    }
    found = [text for text, is_so in wrong.items() if is_so]
    return Finding("sequence", right=not found, detail="; ".join(found) or "ids are drawn one by one")


def _clock(connection: Connection) -> Finding:
    ahead = (datetime.now(UTC) - partitions.now(connection)).total_seconds()
    right = abs(ahead) <= CLOCK_SECONDS
    detail = f"{ahead:+.1f} s from the database's" + ("" if right else ": synchronise it (NTP)")
    return Finding("this clock", right=right, detail=detail)


def _today(connection: Connection) -> Finding:
    today = partitions.now(connection).astimezone(UTC).date()
    days = [partition.day for partition in partitions.find(connection)]
    ahead = sum(day > today for day in days)
    if today in days and ahead:
        return Finding("partitions", right=True, detail=f"today and {ahead} days ahead")
    what = "there is none for today" if today not in days else "there is none for tomorrow"
    return Finding("partitions", right=False, detail=f"{what}: send the task outbox.maintain_partitions")


def notifying(*, on: bool, listen: bool, queue_usage: float) -> Finding:
    """See that inserts notify (`on`) exactly where workers `listen`, and that PostgreSQL's queue, 0 to 1, has room."""
    wrong = {
        "workers listen (outbox_listen), but inserts do not notify: `outbox notify on`, or leave outbox_listen off": (
            listen and not on
        ),
        "inserts notify, so commits wait for each other, and no worker listens (outbox_listen is off): "
        "set outbox_listen, or `outbox notify off`": on and not listen,
        f"PostgreSQL's queue of notifications is {queue_usage:.0%} full; once it is full, commits of events fail: "
        "end the session that listens and takes nothing, which PostgreSQL's log names (NOTIFY queue)": (
            on and queue_usage > FULL_QUEUE
        ),
    }
    found = [text for text, is_so in wrong.items() if is_so]
    return Finding("notifications", right=not found, detail="; ".join(found) or ("on" if on else "off"))


def check_beat(settings: Settings) -> Finding:
    """See that dispatch runs come regularly: that beat sends ticks and a worker runs them."""
    try:
        with connect(settings) as connection:
            return _beat(connection, settings)
    except (SchemaVersionError, psycopg.Error) as error:
        return Finding("beat and worker", right=False, detail=f"cannot be told: {describe(error)}")


def _beat(connection: Connection, settings: Settings) -> Finding:
    now = partitions.now(connection)
    ended = [run.ended_at for run in runs.last(connection) if run.task == "outbox.dispatch"]
    allowed = max(BEAT_SECONDS, 3 * settings.dispatch_seconds)
    if ended and (now - ended[0]).total_seconds() <= allowed:
        return Finding("beat and worker", right=True, detail=f"last run {(now - ended[0]).total_seconds():.0f} s ago")
    last = "never" if not ended else f"last {(now - ended[0]).total_seconds():.0f} s ago"
    queue = f"queue {settings.queue!r}" if settings.queue else "the app's default queue"
    detail = f"outbox.dispatch ran {last}: is `celery beat` running, and a worker on {queue}?"
    return Finding("beat and worker", right=False, detail=detail)


def _check_kafka(settings: Settings, publisher: Publisher) -> Iterator[Finding]:
    topics = sorted({*settings.routes.values(), *filter(None, [settings.dead_letter_topic])})
    try:
        publisher.open()
        facts = publisher.topics.facts(topics)
    except (BrokerUnavailableError, MisconfiguredError) as error:
        yield Finding("brokers", right=False, detail=describe(error))
        return
    yield Finding("brokers", right=True, detail=settings.bootstrap_servers)
    for topic in topics:
        yield _check_topic(topic, facts[topic], publisher)


def _check_topic(topic: str, facts: TopicFacts | BaseException, publisher: Publisher) -> Finding:
    if not isinstance(facts, TopicFacts):
        return Finding(f"topic {topic}", right=False, detail=describe(facts))
    worries = list(_worries(facts, publisher))
    detail = "; ".join([f"{facts.partitions} partitions", *worries])
    return Finding(f"topic {topic}", right=not worries, detail=detail)


def _worries(facts: TopicFacts, publisher: Publisher) -> Iterator[str]:
    limit = publisher.limits.max_request_bytes
    if facts.max_message_bytes is not None and facts.max_message_bytes < limit:
        yield (
            f"it takes records of {facts.max_message_bytes} bytes, the producer sends up to {limit}: "
            "raise max.message.bytes, or lower outbox_max_payload_bytes and max_request_size"
        )
    if facts.replicas is not None and facts.min_insync is not None and facts.min_insync > facts.replicas:
        yield f"it wants {facts.min_insync} in-sync replicas and has {facts.replicas}: nothing can be written"
    if facts.replicas is not None and facts.replicas > 1 and facts.min_insync == 1:
        yield "acknowledged by one broker alone, an event is lost with it: set min.insync.replicas to 2"
    if facts.unclean_election:
        yield "unclean.leader.election.enable loses acknowledged events: turn it off"
