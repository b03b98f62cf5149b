"""The customers: several at a time, who place orders, add to them, pay and ship, in an order nobody planned."""

import random
import threading
import time
from dataclasses import dataclass, field
from uuid import UUID

import httpx

from outbox_tasks.demo.lags import Lags
from outbox_tasks.errors import OutboxError

CLIENTS = 4
PAUSE_SECONDS = 0.05
"""From the start of one request of a client to that of its next: 80 requests a second from 4 clients."""

_TIMEOUT_SECONDS = 30
_OPEN_ORDERS = 16
"""How many orders are worked on at a time: few enough that customers meet at the same one."""

_STEPS = {"items": 6, "pay": 3, "ship": 2}
"""What is done to an order, and how often."""
_ROLLED_BACK = 0.3
"""Share of payments that are declined, and of shipments whose wrapping is sold out."""


class LoadError(OutboxError):
    """The order service did not answer as it should."""


@dataclass(slots=True)
class Load:
    """What all customers share, under its lock."""

    lags: Lags
    open_orders: list[str] = field(default_factory=list)
    rolled_back: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def shop_until(stop: threading.Event, load: Load, *, url: str, seed: int) -> None:
    """Be one customer until asked to stop.

    Raises:
        LoadError: the service answered with an error that no order has deserved.
        httpx.HTTPError: it did not answer.
    """
    choose, due = random.Random(seed), time.monotonic()
    with httpx.Client(base_url=url, timeout=_TIMEOUT_SECONDS) as client:
        while not stop.wait(max(0.0, due - time.monotonic())):
            due = max(due, time.monotonic() - PAUSE_SECONDS) + PAUSE_SECONDS
            _next_step(client, load, choose)


def _next_step(client: httpx.Client, load: Load, choose: random.Random) -> None:
    order_id = _choose_order(load, choose)
    if order_id is None:
        placed = client.post("/orders", json={"customer": f"customer-{choose.randrange(100)}"})
        _note(placed, load)
        with load.lock:
            load.open_orders.append(placed.json()["order_id"])
        return
    step = choose.choices(list(_STEPS), list(_STEPS.values()))[0]
    answer = client.post(f"/orders/{order_id}/{step}", json=_details(step, choose))
    _note(answer, load)
    if step == "ship" and answer.is_success:
        with load.lock:
            load.open_orders.remove(order_id)


def _choose_order(load: Load, choose: random.Random) -> str | None:
    with load.lock:
        return choose.choice(load.open_orders) if len(load.open_orders) >= _OPEN_ORDERS else None


def _details(step: str, choose: random.Random) -> dict[str, str]:
    fails = choose.random() < _ROLLED_BACK
    return {
        "items": {"sku": f"sku-{choose.randrange(1000)}"},
        "pay": {"card": "declined" if fails else "good"},
        "ship": {"wrapping": "sold out" if fails else "none"},
    }[step]


def _note(answer: httpx.Response, load: Load) -> None:
    """Note what was committed when, and count what was rolled back."""
    if answer.status_code not in (httpx.codes.OK, httpx.codes.CONFLICT):
        raise LoadError(f"the order service answered {answer.request.url} with {answer.status_code}: {answer.text}")
    did = answer.json()
    if answer.is_success:
        load.lags.committed(UUID(did["event_id"]), at=did["committed_at"])
    if did["rolled_back"]:
        with load.lock:
            load.rolled_back += 1
