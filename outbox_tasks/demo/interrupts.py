"""Turns Ctrl-C, SIGTERM and a closed terminal into one orderly end."""

import signal
import threading
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Notes the first signal while the demo looks for it; any other raises KeyboardInterrupt, once.

    After that, and once `ignore` was called, signals are without effect: stopping everything takes its time,
    and cut short it would leave something behind.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self._looked_for = False
        self._ignored = False

    def listen(self) -> None:
        """Take the signals over; to be called in the main thread."""
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def look_for(self) -> threading.Event:
        """Return what the first signal sets from now on."""
        self._looked_for = True
        return self.requested

    def ignore(self) -> None:
        """Let nothing come in between any more."""
        self._ignored = True

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._ignored:
            return
        if self._looked_for and not self.requested.is_set():
            self.requested.set()
            return
        self._ignored = True
        raise KeyboardInterrupt
