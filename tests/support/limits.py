"""What is known of the limits of tenants in this process."""

from __future__ import annotations

from drafthouse_server.tenancy.limits import Limits, Month
from drafthouse_server.tenancy.tenants import Tenant

__all__ = ["n_of_month"]


def n_of_month(limits: Limits, tenant: Tenant, month: Month) -> int:
    """Returns the tokens that a tenant has used in a month, those reserved included."""
    return limits._used(tenant).n_of_months.get(month.name, 0)
