"""Why a Kafka client could not be opened: kafka-python tells its log, and then only raises that time ran out."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER = "kafka.net.manager"

# Such as "Bootstrap connection to bootstrap-0 failed: KafkaConnectionError: … (backoff 0.05 secs)".
_FAILED = re.compile(r"connection to \S+ failed: (?P<why>.*?)(?: \(backoff .*\))?$", re.DOTALL)


class _Listener(logging.Handler):
    """Keeps every reason it hears of once."""

    def __init__(self, words: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._words = words

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a reason."""
        found = _FAILED.search(record.getMessage())
        if found and found["why"] not in self._words:
            self._words.append(found["why"])


@contextmanager
def last_words() -> Iterator[list[str]]:
    """Collect why connections failed meanwhile, as far as the client's log is not set to say less than warnings."""
    words: list[str] = []
    listener, logger = _Listener(words), logging.getLogger(LOGGER)
    logger.addHandler(listener)
    try:
        yield words
    finally:
        logger.removeHandler(listener)
