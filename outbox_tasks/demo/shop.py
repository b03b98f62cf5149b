"""The order service: business transactions behind HTTP, as an application that uses the outbox has them."""

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal
from uuid import UUID

from celery import Celery
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session, sessionmaker

from outbox_tasks import settings, setup
from outbox_tasks.demo import orders
from outbox_tasks.demo.orders import OrderError


class NewOrder(BaseModel):
    """Who orders."""

    customer: str


class Item(BaseModel):
    """What is put into an order."""

    sku: str


class Payment(BaseModel):
    """How it is paid; a declined card is what rolls a transaction back."""

    card: Literal["good", "declined"] = "good"


class Shipment(BaseModel):
    """How it is shipped; sold out wrapping is what rolls a savepoint back."""

    wrapping: Literal["none", "sold out"] = "none"


class Done(BaseModel):
    """What a transaction did: the event it told, and one that it took back."""

    order_id: str
    event_id: UUID
    committed_at: float
    """Seconds since 1970, read when the commit had returned."""
    rolled_back: UUID | None = None


def create_app() -> FastAPI:
    """Make the service for the database of OUTBOX_DATABASE_URL; its tables are made when it starts."""
    celery = setup(Celery("shop", broker=os.environ["CELERY_BROKER_URL"]))  # so that commits wake the relay
    ours = settings.load(celery.conf, os.environ)
    settings.use(ours)
    engine = create_engine(make_url(ours.conninfo).set(drivername="postgresql+psycopg"), pool_size=10)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        orders.Base.metadata.create_all(engine)
        yield
        engine.dispose()

    app = FastAPI(title="Order service of the outbox_tasks demo", lifespan=lifespan)
    app.add_exception_handler(OrderError, _refuse)
    _add_routes(app, sessionmaker(engine))
    return app


def _add_routes(app: FastAPI, sessions: sessionmaker[Session]) -> None:
    @app.get("/health")
    def health() -> str:
        return "ok"

    @app.post("/orders")
    def place(new: NewOrder) -> Done:
        with sessions.begin() as session:
            order, event_id = orders.place(session, customer=new.customer)
            order_id = order.id
        return _done(order_id, event_id)

    @app.post("/orders/{order_id}/items")
    def add_item(order_id: str, item: Item) -> Done:
        return _done(order_id, _commit(sessions, lambda session: orders.add_item(session, order_id, sku=item.sku)))

    @app.post("/orders/{order_id}/pay")
    def pay(order_id: str, payment: Payment) -> Done:
        return _done(order_id, _commit(sessions, lambda session: orders.pay(session, order_id, card=payment.card)))

    @app.post("/orders/{order_id}/ship")
    def ship(order_id: str, shipment: Shipment) -> Done:
        with sessions.begin() as session:
            event_id, undone = orders.ship(session, order_id, wrapping=shipment.wrapping)
        return _done(order_id, event_id, rolled_back=undone)


def _commit(sessions: sessionmaker[Session], work: Callable[[Session], UUID]) -> UUID:
    with sessions.begin() as session:
        return work(session)


def _done(order_id: str, event_id: UUID, *, rolled_back: UUID | None = None) -> Done:
    return Done(order_id=order_id, event_id=event_id, committed_at=time.time(), rolled_back=rolled_back)


async def _refuse(_request: Request, error: Exception) -> JSONResponse:
    """Answer after the transaction was rolled back: the error left its block first."""
    assert isinstance(error, OrderError)
    told = None if error.told is None else str(error.told)
    return JSONResponse(status_code=409, content={"problem": str(error), "rolled_back": told})
