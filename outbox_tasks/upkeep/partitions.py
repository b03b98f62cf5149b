"""Keeps the table small: days made ahead, days past retention removed, the DEFAULT partition and the books cleaned."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import partial
from uuid import UUID

import psycopg

from outbox_tasks.event import SHARDS
from outbox_tasks.ports import Ports
from outbox_tasks.store import leases, partitions
from outbox_tasks.upkeep.locks import asking_again

log = logging.getLogger(__name__)

ATTEMPTS = 5
"""How often a lock is asked for before the next hour's run has to do it."""

PAUSE_SECONDS = 2.0
"""Longest pause between two attempts: writers that queued up behind the first one go on meanwhile."""

MOVABLE = 10_000
"""How many events of a day are moved out of the DEFAULT partition at once, while both are locked."""

PAGE = 5_000
"""Events of the DEFAULT partition one statement looks through, and rows of the books one statement deletes."""

RUNS_KEPT = timedelta(days=1)

LAST_ID = UUID(int=2**128 - 1)


@dataclass(slots=True)
class Maintained:
    """What a maintenance did, and what it could not do."""

    alone: bool = True
    made: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    in_the_way: dict[str, partitions.InTheWay] = field(default_factory=dict)
    busy: list[str] = field(default_factory=list)
    in_default: dict[str, int] = field(default_factory=dict)
    cleaned: dict[str, int] = field(default_factory=dict)
    missed: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """Return what is worth reading."""
        if not self.alone:
            return {"status": "another maintenance is at work"}
        kept = {
            name: f"{found.events} unpublished, oldest of {found.oldest:%Y-%m-%d %H:%M}"
            for name, found in self.in_the_way.items()
        }
        told = {
            "made": self.made,
            "removed": self.removed,
            "kept": kept,
            "busy": self.busy,
            "in_default": self.in_default,
            "cleaned": self.cleaned,
            "missed": self.missed,
        }
        return {"status": "done"} | {name: value for name, value in told.items() if value}


def maintain_partitions(ports: Ports, *, now: datetime | None = None) -> Maintained:
    """Make the days ahead, remove what is past retention, clean up. `now` is the database's time unless given.

    Every step is whole in itself: a maintenance that is killed leaves the rest to the next one.
    """
    done = Maintained()
    with partitions.maintenance(ports.connection) as done.alone:
        if done.alone:
            time = partitions.now(ports.connection) if now is None else now
            today = time.astimezone(UTC).date()
            _make_days(ports, today, done)
            _remove_days(ports, today, done)
            _clean_default(ports, time, done)
            _clean_books(ports, time, done)
            _look_under_floors(ports, done)
    return done


def name_of(day: date) -> str:
    """Return the name of a day's partition."""
    return f"outbox_{day:%Y%m%d}"


def _make_days(ports: Ports, today: date, done: Maintained) -> None:
    there = {partition.day for partition in partitions.find(ports.connection)}
    ahead = (today + timedelta(days=days) for days in range(ports.settings.partitions_ahead_days + 1))
    _with_locks({name_of(day): partial(_make_day, ports, day, done) for day in ahead if day not in there}, done)


def _make_day(ports: Ports, day: date, done: Maintained) -> None:
    """Make a day's partition, of what the DEFAULT partition has of it if that is little."""
    lock_seconds = ports.settings.lock_seconds
    try:
        made = partitions.make(ports.connection, day=day, lock_seconds=lock_seconds)
    except psycopg.errors.CheckViolation:
        count = partitions.count_in_default(ports.connection, day=day, limit=MOVABLE)
        if count > MOVABLE:
            done.in_default[name_of(day)] = count
            log.warning("the DEFAULT partition holds the events of %s: they leave it as they get old", day)
            return
        partitions.make_from_default(ports.connection, day=day, name=name_of(day), lock_seconds=lock_seconds)
        made = True
    if made:
        done.made.append(name_of(day))


def _remove_days(ports: Ports, today: date, done: Maintained) -> None:
    oldest_kept = today - timedelta(days=ports.settings.retention_days)
    past = [partition.name for partition in partitions.find(ports.connection) if partition.day < oldest_kept]
    _with_locks({name: partial(_remove_day, ports, name, done) for name in past}, done)


def _remove_day(ports: Ports, name: str, done: Maintained) -> None:
    settings = ports.settings
    found = partitions.remove(
        ports.connection, name=name, action=settings.retention_action, lock_seconds=settings.lock_seconds
    )
    if found is None:
        done.removed.append(name)
        return
    done.in_the_way[name] = found
    log.warning("%s is past retention, but %s events in it are not published", name, found.events)


def _with_locks(steps: Mapping[str, Callable[[], None]], done: Maintained) -> None:
    """Do steps that need a lock on the table. Where it stays busy, leave them to the next maintenance: all need it."""
    attempts = asking_again(attempts=ATTEMPTS, pause_seconds=PAUSE_SECONDS)
    left = dict(steps)
    try:
        for name, step in steps.items():
            attempts(step)
            del left[name]
    except (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled) as error:
        done.busy += left
        log.warning("%s: the next maintenance tries %s again", str(error).strip(), ", ".join(left))


def _clean_default(ports: Ports, now: datetime, done: Maintained) -> None:
    """Delete old published events of the DEFAULT partition page by page, for `outbox_run_seconds` at most.

    It begins anywhere and goes round, so that every part has its turn though time may run out each time.
    """
    before = now - timedelta(days=ports.settings.retention_days)
    end = ports.deadline(ports.settings.run_seconds)
    start = UUID(int=ports.chance.getrandbits(128))
    first, wrapped, deleted = start, False, 0
    while not end.passed and not ports.stopping() and not (wrapped and first >= start):
        last, count = partitions.clean_default(ports.connection, first=first, before=before, limit=PAGE)
        deleted += count
        at_the_end = last is None or last == LAST_ID
        if at_the_end and wrapped:
            break
        wrapped = wrapped or at_the_end
        first = UUID(int=0) if last is None or at_the_end else UUID(int=last.int + 1)
    if deleted:
        done.cleaned["default"] = deleted


def _clean_books(ports: Ports, now: datetime, done: Maintained) -> None:
    dead_before = now - timedelta(days=ports.settings.dead_letter_retention_days)
    steps: dict[str, Callable[[], int]] = {
        "dead_letters": partial(partitions.clean_dead_letters, ports.connection, before=dead_before, limit=PAGE),
        "runs": partial(partitions.clean_runs, ports.connection, before=now - RUNS_KEPT, limit=PAGE),
    }
    for name, step in steps.items():
        count = _repeat(step, ports)
        if count:
            done.cleaned[name] = count


def _look_under_floors(ports: Ports, done: Maintained) -> None:
    """Find what no run looks at any more: it must not be there, so it is told loudly."""
    waiting = list(range(SHARDS))
    for pause in (0, *[PAUSE_SECONDS / ATTEMPTS] * ATTEMPTS):
        threading.Event().wait(pause if waiting else 0)
        waiting = [shard for shard in waiting if not ports.stopping() and not _look_under_floor(ports, shard, done)]
    if waiting:
        log.warning("shards %s were leased all the time: nobody looked under their floors", waiting)


def _look_under_floor(ports: Ports, shard: int, done: Maintained) -> bool:
    look = leases.look_under_floor(ports.connection, shard=shard)
    if look.missed is not None:
        done.missed.append(look.missed)
        log.error("event %s was written with an id that was passed already: its shard is read from there", look.missed)
    return look.done


def _repeat(step: Callable[[], int], ports: Ports) -> int:
    total = 0
    while not ports.stopping():
        count = step()
        total += count
        if count < PAGE:
            break
    return total
