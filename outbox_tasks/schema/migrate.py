"""Makes and upgrades the tables, through Alembic with a version table of its own."""

from pathlib import Path
from typing import TextIO

import psycopg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy.exc import OperationalError

from outbox_tasks.errors import SchemaVersionError

VERSION_TABLE = "outbox_alembic_version"

_SCRIPTS = Path(__file__).parent / "migrations"

# Reads the one row of the version table; regclass of an absent table is NULL, so no error aborts a transaction.
_CURRENT_VERSION = """
SELECT to_regclass('outbox_alembic_version') IS NOT NULL
"""
_READ_VERSION = """
SELECT version_num FROM outbox_alembic_version
"""


def upgrade(conninfo: str, *, revision: str = "head") -> None:
    """Bring the database at `conninfo` (libpq string or URL) to `revision`; safe to run again, and twice at once.

    Raises:
        psycopg.OperationalError: no database answers there.
    """
    try:
        command.upgrade(_config(conninfo=conninfo), revision)
    except OperationalError as error:
        if isinstance(error.orig, psycopg.OperationalError):
            raise error.orig from None
        raise


def write_sql(out: TextIO, *, revision: str = "head") -> None:
    """Write the statements of an upgrade from nothing to `revision`, for a person to run."""
    command.upgrade(_config(output=out), revision, sql=True)


def head() -> str:
    """Return the schema version this package works with."""
    (revision,) = ScriptDirectory.from_config(_config()).get_heads()
    return revision


def current(connection: psycopg.Connection[tuple[object, ...]]) -> str | None:
    """Return the schema version of the database, or None where there is none."""
    known = connection.execute(_CURRENT_VERSION).fetchone()
    if known is None or not known[0]:
        return None
    row = connection.execute(_READ_VERSION).fetchone()
    return None if row is None else str(row[0])


def check(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    """Raise `SchemaVersionError` unless the database is at the version this package works with."""
    found, expected = current(connection), head()
    if found != expected:
        raise SchemaVersionError(found=found, expected=expected)


def _config(*, conninfo: str | None = None, output: TextIO | None = None) -> Config:
    config = Config(output_buffer=output)
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    config.attributes["conninfo"] = conninfo
    config.attributes["version_table"] = VERSION_TABLE
    return config
