"""A script: a consumer that notes when each event came first, `python -m bench.consumer`."""

import argparse
import sys
import threading
import time

from bench.script import answer, await_go
from bench.topics import Poll, reading


def main() -> None:
    """Read, and tell what came when."""
    parser = argparse.ArgumentParser(prog="python -m bench.consumer", description=__doc__)
    for name in ("--bootstrap-servers", "--topic"):
        parser.add_argument(name, required=True)
    parser.add_argument("--patience-seconds", type=float, default=30, help="how long to wait for the next record")
    given = parser.parse_args()
    with reading(given.bootstrap_servers, given.topic) as poll:
        poll()
        await_go()
        wanted: list[int] = []
        threading.Thread(target=lambda: wanted.append(int(sys.stdin.readline() or 0)), daemon=True).start()
        answer(_read(poll, wanted=wanted, patience_seconds=given.patience_seconds))


def _read(poll: Poll, *, wanted: list[int], patience_seconds: float) -> dict[str, float]:
    """Read until as many have come as are wanted, which is told at some time, or none comes any more."""
    first: dict[str, float] = {}
    newest = time.monotonic()
    while not wanted or (len(first) < wanted[0] and time.monotonic() < newest + patience_seconds):
        for arrival in poll():
            first.setdefault(arrival.event_id, arrival.at)
            newest = time.monotonic()
    return first


if __name__ == "__main__":
    main()
