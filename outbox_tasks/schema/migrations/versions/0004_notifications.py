"""What notifies of new events, for deployments that switch it on."""

from alembic import op

revision = "0004"
down_revision = "0003"

# Called by a trigger that `outbox notify on` makes: once for each statement that inserts. Of equal notifications of a
# transaction PostgreSQL sends one. Transactions that notify commit one after the other, hence no trigger by default.
NOTIFY = """
CREATE FUNCTION outbox_notify() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('outbox', '');
    RETURN NULL;
END
$$
"""


def upgrade() -> None:
    op.execute(NOTIFY.strip())


def downgrade() -> None:
    op.execute("DROP TRIGGER IF EXISTS outbox_notify ON outbox")
    op.execute("DROP FUNCTION outbox_notify()")
