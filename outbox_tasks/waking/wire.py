"""One connection to Redis, one command at a time: half of what a client costs a writer that waits for its commit."""

from collections.abc import Callable
from hashlib import sha1
from typing import Any

import redis
from redis.connection import ConnectionInterface
from redis.exceptions import NoScriptError


class Script:
    """A script that Redis carries out, known to it by its digest once it has seen it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = sha1(text.encode()).hexdigest()  # noqa: S324 - Redis's own name for it, no secret


class Wire:
    """A connection without a pool around it, for one thread at a time; it is made, and connects, when first used.

    A connection that was lost since is made again once; nothing else is tried twice.
    """

    def __init__(self, make: Callable[[], ConnectionInterface]) -> None:
        self._make = make
        self._connection: ConnectionInterface | None = None
        self._worked = False

    def command(self, *words: str | float) -> Any:
        """Have Redis carry out a command, and return what it answers.

        Raises:
            redis.RedisError: it is away, does not answer in time, or refuses.
        """
        worked = self._worked
        try:
            return self._exchange(words)
        except redis.ConnectionError:
            if not worked:
                raise
            return self._exchange(words)

    def run(self, script: Script, keys: tuple[str, ...], *arguments: str | int) -> Any:
        """Have Redis carry out a script, and return what it answers; raises as `command`."""
        try:
            return self.command("EVALSHA", script.digest, len(keys), *keys, *arguments)
        except NoScriptError:
            return self.command("EVAL", script.text, len(keys), *keys, *arguments)

    def close(self) -> None:
        """Close the connection; the next command opens it again."""
        if self._connection is not None:
            self._connection.disconnect()  # type: ignore[no-untyped-call]

    def _exchange(self, words: tuple[str | float, ...]) -> Any:
        """Send and read; where that is interrupted the connection ends, so that no answer is left for the next."""
        self._worked = False
        if self._connection is None:
            self._connection = self._make()
        try:
            self._connection.send_command(*words)  # type: ignore[no-untyped-call]
            answer = self._connection.read_response()
        except redis.ResponseError:
            self._worked = True
            raise
        except BaseException:
            self.close()
            raise
        self._worked = True
        return answer
