"""Tenants, their limits, their keys, and who changed what."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Makes the tables."""
    op.create_table(
        "state",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    tenant = sa.ForeignKey("tenants.name", ondelete="CASCADE")
    op.create_table(
        "limits",
        sa.Column("tenant", sa.String(64), tenant, primary_key=True),
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
    tenant = sa.ForeignKey("tenants.name", ondelete="CASCADE")
    op.create_table(
        "keys",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("tenant", sa.String(64), tenant, nullable=False),
        sa.Column("label", sa.String(128), nullable=False),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("revoked_at", sa.BigInteger),
        sa.Column("last_used_at", sa.BigInteger),
    )
    op.create_index("keys_of_tenant", "keys", ["tenant"])
    op.create_index("keys_by_last_use", "keys", ["last_used_at"])
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "audit",
        sa.Column("id", number, primary_key=True),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("actor", sa.String(128), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("subject", sa.String(128), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
    )
    op.create_index("audit_by_time", "audit", ["at"])
