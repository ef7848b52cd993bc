"""Limits have the names that they have in the settings, [tenants.NAME]."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_NAMES = {
    "n_waiting_max": "queue_size",
    "n_active_max": "max_streams",
    "n_prompt_max": "max_prompt_tokens",
    "n_output_max": "max_output_tokens",
    "priority_max": "max_priority",
    "n_draft_max": "draft_max",
    "end_user_active_max": "end_user_max_streams",
}


def upgrade() -> None:
    """Renames those that had other names."""
    limits = sa.table("limits", sa.column("name"))
    for old, new in _NAMES.items():
        op.execute(limits.update().where(limits.c.name == old).values(name=new))
