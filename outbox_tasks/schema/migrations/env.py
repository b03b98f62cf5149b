"""How Alembic runs the migrations: over a psycopg connection, or as text."""

import psycopg
from alembic import context
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

# Serialises upgrades of one database; the number is the package's name in ASCII, cut to 8 bytes ("outbox_t").
MIGRATION_LOCK = 8031453476610924404


def run_online(conninfo: str, version_table: str) -> None:
    """Upgrade under an advisory lock, all in one transaction."""
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(conninfo), poolclass=NullPool)
    with engine.connect() as connection:
        context.configure(connection=connection, version_table=version_table)
        with context.begin_transaction():
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
            context.run_migrations()


def run_offline(version_table: str) -> None:
    """Write the statements out."""
    # Named parameters, for the other style doubles every percent sign of the text.
    context.configure(
        dialect_name="postgresql",
        dialect_opts={"paramstyle": "named"},
        version_table=version_table,
        literal_binds=True,
    )
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    run_offline(context.config.attributes["version_table"])
else:
    run_online(context.config.attributes["conninfo"], context.config.attributes["version_table"])
