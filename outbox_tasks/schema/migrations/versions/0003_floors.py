"""Floors: up to which id nothing of a shard is pending, so that nobody reads again what was published."""

from alembic import op

revision = "0003"
down_revision = "0002"

# The default below and the one before it take a lock that stops writers, for a moment: better to fail than to make
# them wait behind a long transaction.
_IMPATIENCE = "SET LOCAL lock_timeout = '5s'"

UPGRADE = [
    _IMPATIENCE,
    # A transaction has its own id before it draws the id of an event: whoever sees that all transactions up to some
    # point have ended then knows that no event with a lower id is still to come.
    """
ALTER TABLE outbox ALTER id SET DEFAULT
      CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('outbox_id_seq') END
""",
    # No event of the shard with this id or a lower one is pending, or ever will be.
    "ALTER TABLE outbox_shard ADD COLUMN floor bigint NOT NULL DEFAULT 0",
]

DOWNGRADE = [
    _IMPATIENCE,
    "ALTER TABLE outbox_shard DROP COLUMN floor",
    "ALTER TABLE outbox ALTER id SET DEFAULT nextval('outbox_id_seq')",
]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement.strip())


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
