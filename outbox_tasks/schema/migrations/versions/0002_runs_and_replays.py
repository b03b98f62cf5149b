"""What runs did, and replays."""

from alembic import op

revision = "0002"
down_revision = "0001"

TABLES = [
    # One row a run that did something, or had nothing to do for a while: what people and `outbox check` look at.
    """
CREATE TABLE outbox_run (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task text NOT NULL,
    owner text NOT NULL,
    host text NOT NULL,
    started_at timestamptz NOT NULL,
    ended_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    report jsonb NOT NULL
)
""",
    "CREATE INDEX outbox_run_ended ON outbox_run (ended_at)",
    "CREATE INDEX outbox_run_task ON outbox_run (task, id)",
    # A replay sends events again that were published: which, in the order of their ids, is written down at its start,
    # some hundred ids a row, so that it can go on anywhere after a kill without looking for them again.
    """
CREATE TABLE outbox_replay (
    replay_id uuid PRIMARY KEY DEFAULT outbox_uuidv7(),
    wanted jsonb NOT NULL,
    to_topic text,
    rate integer NOT NULL CHECK (rate > 0),
    total bigint NOT NULL DEFAULT 0,
    sent bigint NOT NULL DEFAULT 0,
    refused bigint NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at timestamptz,
    lease_token uuid,
    lease_owner text,
    leased_until timestamptz,
    CONSTRAINT outbox_replay_lease_whole CHECK ((lease_token IS NULL) = (leased_until IS NULL))
)
""",
    "CREATE INDEX outbox_replay_open ON outbox_replay (created_at) WHERE finished_at IS NULL",
    """
CREATE TABLE outbox_replay_chunk (
    replay_id uuid NOT NULL REFERENCES outbox_replay ON DELETE CASCADE,
    place integer NOT NULL,
    event_ids uuid[] NOT NULL,
    PRIMARY KEY (replay_id, place)
)
""",
]


def upgrade() -> None:
    for statement in TABLES:
        op.execute(statement.strip())


def downgrade() -> None:
    op.execute("DROP TABLE outbox_replay_chunk")
    op.execute("DROP TABLE outbox_replay")
    op.execute("DROP TABLE outbox_run")
