"""What each accepted stream took."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_COUNTS = ("n_prompt", "n_reused", "n_output", "n_drafted", "n_accepted")
_SECONDS = ("queue_s", "prefill_s", "decode_s", "preempted_s", "started_at", "ended_at")


def upgrade() -> None:
    """Makes the table."""
    op.create_table(
        "usage",
        sa.Column("record_id", sa.String(32), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("end_user", sa.String(64), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("outcome", sa.String(64), nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in _COUNTS),
        *(sa.Column(name, sa.Float(53), nullable=False) for name in _SECONDS),
    )
    op.create_index("usage_of_tenant", "usage", ["tenant", "ended_at", "record_id"])
    op.create_index("usage_by_end", "usage", ["ended_at", "record_id"])
