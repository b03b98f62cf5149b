"""The business: orders and what is done to them, each in a transaction that writes the row and the event."""

from typing import Any, Literal
from uuid import UUID, uuid4

from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox_tasks import append

AGGREGATE = "order"
"""The aggregate type of the shop's events: what the route map knows."""


class OrderError(Exception):
    """The order cannot do this; the transaction is to be rolled back."""

    def __init__(self, problem: str, *, told: UUID | None = None) -> None:
        super().__init__(problem)
        self.told = told
        """The event that was appended before it turned out, and so must never be seen."""


class Base(DeclarativeBase):
    """The shop's own tables."""


class Order(Base):
    """One order; `version` counts the changes to it, and each change tells one event."""

    __tablename__ = "orders"

    id: Mapped[str] = mapped_column(primary_key=True)
    customer: Mapped[str]
    state: Mapped[str]
    items: Mapped[int]
    version: Mapped[int]


def place(session: Session, *, customer: str) -> tuple[Order, UUID]:
    """Place an order."""
    order = Order(id=str(uuid4()), customer=customer, state="open", items=0, version=0)
    session.add(order)
    return order, _tell(session, order, "order_placed", customer=customer)


def add_item(session: Session, order_id: str, *, sku: str) -> UUID:
    """Put an item into an order that is not shipped."""
    order = _locked(session, order_id, states=("open", "paid"))
    order.items += 1
    return _tell(session, order, "item_added", sku=sku)


def pay(session: Session, order_id: str, *, card: Literal["good", "declined"]) -> UUID:
    """Pay an order. That a card is declined turns out last, when the event is written already.

    Such an event is marked as doomed, so that whoever saw it in the topic would know it at once.
    """
    order = _locked(session, order_id, states=("open",))
    order.state = "paid"
    told = _tell(session, order, "order_paid", doomed=card == "declined", card=card)
    if card == "declined":
        raise OrderError("the card was declined", told=told)
    return told


def ship(session: Session, order_id: str, *, wrapping: Literal["none", "sold out"]) -> tuple[UUID, UUID | None]:
    """Ship a paid order. Gift wrapping is tried in a savepoint; sold out, it is rolled back, and the parcel leaves.

    Returns:
        The event of the shipping, and that of the wrapping that was rolled back.
    """
    order = _locked(session, order_id, states=("paid",))
    undone = _try_to_wrap(session, order) if wrapping == "sold out" else None
    order.state = "shipped"
    return _tell(session, order, "order_shipped"), undone


def _try_to_wrap(session: Session, order: Order) -> UUID:
    with session.begin_nested() as savepoint:
        told = _tell(session, order, "order_wrapped", doomed=True)
        savepoint.rollback()
    return told


def _locked(session: Session, order_id: str, *, states: tuple[str, ...]) -> Order:
    """Lock the order's row first: the events of an order then get their ids in the order of commits."""
    order = session.get(Order, order_id, with_for_update=True)
    if order is None:
        raise OrderError(f"there is no order {order_id}")
    if order.state not in states:
        raise OrderError(f"order {order_id} is {order.state}")
    return order


def _tell(session: Session, order: Order, event_type: str, *, doomed: bool = False, **facts: Any) -> UUID:
    """Count the change and append its event, in the session's transaction."""
    order.version += 1
    payload = {"order_id": order.id, "version": order.version, "items": order.items, "doomed": doomed, **facts}
    return append(session, aggregate_type=AGGREGATE, aggregate_id=order.id, event_type=event_type, payload=payload)
