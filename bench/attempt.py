"""The one place where a measurement may fail: what went wrong becomes part of the results, and the bench goes on."""

import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from rich.console import Console

console = Console(stderr=True)


def attempt(what: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a measurement finds, or `{"error": …}`."""
    console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {what} …", highlight=False)
    started = time.monotonic()
    try:
        figures = measure()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other measurements are worth having
        figures = {"error": f"{type(error).__name__}: {error}"}
        console.print(f"         failed: {figures['error']}", markup=False, highlight=False, style="red")
        traceback.print_exc(file=sys.stderr)
    return figures | {"took_seconds": round(time.monotonic() - started, 1)}
