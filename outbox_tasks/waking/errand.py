"""Runs an action in a thread of its own, so that an event loop need not wait for it."""

import atexit
import queue
import threading
from collections.abc import Callable
from contextlib import suppress


class Errand:
    """Runs one action in a thread of its own; what is asked while it waits for its turn is done once."""

    def __init__(self, action: Callable[[], None], *, name: str) -> None:
        self._action = action
        self._asked: queue.Queue[bool] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._starting = threading.Lock()

    def ask(self) -> None:
        """Have the action done after this; returns at once."""
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()
                atexit.register(self._finish)
        with suppress(queue.Full):
            self._asked.put_nowait(True)

    def _run(self) -> None:
        while self._asked.get():
            self._action()

    def _finish(self) -> None:
        """Let what was asked last be done before the interpreter ends: the action takes but a moment."""
        with suppress(queue.Full):
            self._asked.put(False, timeout=1)
        self._thread.join(1)
