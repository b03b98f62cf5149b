"""How a lock on the table is asked for: shortly, and again, so that nobody waits long behind the one who asks."""

import psycopg
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random


def asking_again(*, attempts: int, pause_seconds: float) -> Retrying:
    """Return what does a step again that found the table busy, after up to `pause_seconds`; the last error is raised.

    Writers that queued up behind an attempt go on in the pause.
    """
    return Retrying(
        retry=retry_if_exception_type(psycopg.errors.LockNotAvailable),
        stop=stop_after_attempt(attempts),
        wait=wait_random(0, pause_seconds),
        reraise=True,
    )
