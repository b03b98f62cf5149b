"""Where writers ring: what wakes the relay is installed here by the Celery app, and called after commits."""

from typing import Protocol


class Waker(Protocol):
    """What wakes the relay."""

    def wake(self) -> None:
        """Wake the relay; raises nothing, and never keeps an event loop waiting."""


_installed: Waker | None = None


def install(waker: Waker | None) -> None:
    """Make this what wakes the relay in this process; None: nothing does."""
    global _installed  # noqa: PLW0603 - besides the app and its settings the only state of the process
    _installed = waker


def installed() -> Waker | None:
    """Return what wakes the relay, or None where no app was set up or `outbox_wake` is off."""
    return _installed


def wake() -> None:
    """Wake the relay: events were committed that it cannot know of.

    For events appended over a `Connection`, `AsyncConnection` or a connection of psycopg, or inserted by other means:
    call it after their commit. Over a Session it is called for you. In an event loop it hands the work to a thread and
    returns at once; elsewhere it takes one exchange with Redis, or about `outbox_wake_timeout_seconds` where Redis
    does not answer. It raises nothing, and does nothing where no app was set up or `outbox_wake` is off: beat's next
    tick then finds the events.
    """
    if _installed is not None:
        _installed.wake()
