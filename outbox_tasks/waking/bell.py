"""The bell: rung by writers, answered by runs, one message or one listening run at a time.

Whoever rings sets a mark, and further rings do nothing until a run answers: it takes the mark away and then looks at
the table. So a run sees what was committed before its answer, and what is committed later rings anew. While a run stays
to listen the mark is an entry in the list it waits on; else it is a key, and whoever sets it sends a message.
"""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Self
from uuid import uuid4

import redis

from outbox_tasks.deadline import Deadline
from outbox_tasks.waking.breaker import Breaker
from outbox_tasks.waking.place import Place
from outbox_tasks.waking.wire import Script, Wire

log = logging.getLogger(__name__)

LISTENING_SECONDS = 2.0
"""How long a run that stays is believed to listen after its last word: one that is killed swallows rings so long."""

RENEW_SECONDS = 0.5
"""How often it says so again."""

LONGEST_WAIT_SECONDS = 1.0
"""The longest a run waits in one go."""

# Answers whether a message has to be sent. KEYS: pending, listening, bell. ARGV: how long a ring is believed to be
# heard, in milliseconds, should it get lost.
RING = Script("""
if redis.call('EXISTS', KEYS[2]) == 1 then
    if redis.call('LLEN', KEYS[3]) == 0 then
        redis.call('RPUSH', KEYS[3], 1)
        redis.call('PEXPIRE', KEYS[3], ARGV[1])
    end
    return 0
end
if redis.call('SET', KEYS[1], 1, 'NX', 'PX', ARGV[1]) then return 1 end
return 0
""")

# Makes a run the one that listens, or lets it go on, unless another does (-1). Answers how many rings nobody has
# answered: one, whose message may be on its way to a child that is not free, or none.
ENTER = Script("""
local listener = redis.call('GET', KEYS[2])
if listener and listener ~= ARGV[1] then return -1 end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return redis.call('DEL', KEYS[1]) + redis.call('DEL', KEYS[3])
""")

# Answers all rings but those another run is about to hear. Answers whether there is such a run.
ANSWER = Script("""
redis.call('DEL', KEYS[1])
local listener = redis.call('GET', KEYS[2])
if listener and listener ~= ARGV[1] then return 1 end
redis.call('DEL', KEYS[2], KEYS[3])
return 0
""")

# Rings for another run that listens, if there is one, and answers whether there is. ARGV: this one, and for how long
# the ring is believed to be heard, in milliseconds.
HAND_OVER = Script("""
local listener = redis.call('GET', KEYS[2])
if not listener or listener == ARGV[1] then return 0 end
if redis.call('LLEN', KEYS[3]) == 0 then
    redis.call('RPUSH', KEYS[3], 1)
    redis.call('PEXPIRE', KEYS[3], ARGV[2])
end
return 1
""")

# Ends a stay and answers how many rings came meanwhile that nobody has answered. If another listens now they are its.
LEAVE = Script("""
local listener = redis.call('GET', KEYS[2])
if listener and listener ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[2])
return redis.call('DEL', KEYS[3])
""")


class Ringer:
    """The writers' side of the bell; any thread may use it.

    Args:
        place: where the bell hangs.
        timeout_seconds: how long Redis may take to answer.
        lost_after_seconds: after this a ring that was not answered is taken for lost, and the next one rings again.
    """

    def __init__(self, place: Place, *, timeout_seconds: float, lost_after_seconds: float) -> None:
        self._keys = (place.pending, place.listening, place.bell)
        self._milliseconds = round(lost_after_seconds * 1000)
        self._new_wire = partial(place.wire, seconds=timeout_seconds)
        self._idle: deque[Wire] = deque()

    def ring(self) -> bool:
        """Ring; returns whether a message has to be sent, since no run listens and none is on its way.

        Raises:
            redis.RedisError: Redis is away.
        """
        with self._wire() as wire:
            return bool(wire.run(RING, self._keys, self._milliseconds))

    @contextmanager
    def _wire(self) -> Iterator[Wire]:
        """Lend a connection: one that has nothing to do, or a new one where all are in use."""
        try:
            wire = self._idle.pop()
        except IndexError:
            wire = self._new_wire()
        try:
            yield wire
        finally:
            self._idle.append(wire)


class RedisBell:
    """The runs' side of the bell, for one thread. Where Redis fails it is mute for a while.

    Args:
        place: where the bell hangs.
        timeout_seconds: how long Redis may take to answer.
        breaker: what keeps it from a Redis that has just failed.
    """

    def __init__(self, place: Place, *, timeout_seconds: float, breaker: Breaker) -> None:
        self._keys = (place.pending, place.listening, place.bell)
        self._place = place
        self._breaker = breaker
        self._answered = False
        self._refused = False
        self._token = uuid4().hex
        self._wire = place.wire(seconds=timeout_seconds)
        self._waiting = place.wire(seconds=LONGEST_WAIT_SECONDS + timeout_seconds)

    def answer(self) -> bool:
        """Answer the bell: called before a run looks at the table, never after. What rings later rings anew.

        Returns whether another run listens, whose rings are left to it.
        """
        answered, self._answered = self._answered, False
        if answered:
            return False
        return self._breaker.attempt(lambda: bool(self._wire.run(ANSWER, self._keys, self._token)), otherwise=False)

    def hand_over(self) -> bool:
        """Have another run that listens look at the table; returns whether there is one."""
        milliseconds = round(LISTENING_SECONDS * 1000)
        return self._breaker.attempt(
            lambda: bool(self._wire.run(HAND_OVER, self._keys, self._token, milliseconds)), otherwise=False
        )

    def stay(self) -> "RedisStay":
        """Return a stay that has not begun; it begins with its first `wait`."""
        return RedisStay(self)

    def close(self) -> None:
        """Close what is open; the next use opens it again."""
        self._wire.close()
        self._waiting.close()

    def enter(self) -> int:
        """Listen from now on; returns how many rings nobody has answered, or -1 if another listens or Redis fails.

        -1 for good once Redis has refused to have this bell waited for.
        """
        if self._refused:
            return -1
        milliseconds = round(LISTENING_SECONDS * 1000)
        return self._breaker.attempt(
            lambda: int(self._wire.run(ENTER, self._keys, self._token, milliseconds)), otherwise=-1
        )

    def hear(self, seconds: float) -> bool:
        """Wait for a ring, for so many seconds at most; returns whether one came. Hearing it has answered it."""
        bounded = min(max(seconds, 0.001), LONGEST_WAIT_SECONDS)  # 0 would be for ever
        return self._breaker.attempt(lambda: self._pop(bounded), otherwise=False)

    def leave(self) -> bool:
        """Listen no more; returns whether a ring came that nobody has answered."""
        return self._breaker.attempt(lambda: bool(self._wire.run(LEAVE, self._keys, self._token)), otherwise=False)

    def take_as_answered(self) -> None:
        """Spare the next answer: it has been given, and nothing was looked at since."""
        self._answered = True

    def give_up_answered(self) -> bool:
        """Forget an answer after which nothing was looked at; returns whether there was one."""
        unseen, self._answered = self._answered, False
        return unseen

    def _pop(self, seconds: float) -> bool:
        """Wait; a Redis that refuses is not away, so that the one who stays can take the mark back, and rings send."""
        try:
            return self._waiting.command("BLPOP", self._place.bell, seconds) is not None
        except redis.ResponseError as error:
            if _is_failover(error):
                raise
            self._refused = True
            log.warning("no run stays, since that needs Redis 6 or later, and the right to use BLPOP: %s", error)
            return False


class RedisStay:
    """A run that has nothing left to do stays for a moment to hear the bell; one of a deployment at a time."""

    def __init__(self, bell: RedisBell) -> None:
        self.missed = False
        self._bell = bell
        self._renew_at: Deadline | None = None

    def wait(self, seconds: float) -> bool:
        """Wait for the bell, `seconds` or a second if that is less; returns whether to look at the table again.

        False: the stay is over, and nothing was missed. So it is at once where another run listens, or Redis fails.
        """
        unanswered = 0
        if self._renew_at is None or self._renew_at.passed:
            unanswered = self._bell.enter()
            self._renew_at = None if unanswered < 0 else Deadline.after(RENEW_SECONDS)
        rung = unanswered > 0 or (unanswered == 0 and (self._bell.hear(seconds) or self._leave()))
        if rung:
            self._bell.take_as_answered()
        return rung

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        rung = self._renew_at is not None and self._leave()
        self.missed = self._bell.give_up_answered() or rung

    def _leave(self) -> bool:
        self._renew_at = None
        return self._bell.leave()


def _is_failover(error: redis.ResponseError) -> bool:
    """Say whether Redis has just become a replica, which passes: it then ends what waits, and refuses to write."""
    return isinstance(error, redis.ReadOnlyError) or str(error).startswith("UNBLOCKED")
