"""The writing service of a measurement: a business row, and an event that goes with it."""

from sqlalchemy import BigInteger, Engine, Identity, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

PADDING = "x" * 176
"""With it a payload has about 200 bytes."""


class Base(DeclarativeBase):
    """Tables of the service."""


class Order(Base):
    """The business row."""

    __tablename__ = "bench_order"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    customer: Mapped[str]
    total: Mapped[int]


def engine_of(database_url: str) -> Engine:
    """Return an engine for a database given by a libpq URL."""
    return create_engine(database_url.replace("postgresql://", "postgresql+psycopg://", 1))


def create_tables(database_url: str) -> None:
    """Make the service's tables."""
    engine = engine_of(database_url)
    Base.metadata.create_all(engine)
    engine.dispose()
