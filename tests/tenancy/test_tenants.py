"""Keys, tenants and who may enter."""

from __future__ import annotations

import pytest

from drafthouse_server.config import Config
from drafthouse_server.errors import (
    DrafthouseError,
    Draining,
    PermissionDenied,
    QueueFull,
    QuotaExceeded,
    Unauthenticated,
)
from drafthouse_server.tenancy.tenants import Admission, Load, Tenant, TenantRegistry


def test_without_keys_everybody_is_the_default_tenant() -> None:
    registry = TenantRegistry.from_config(Config())
    assert registry.is_open
    assert registry.authenticate(None).name == "default"
    assert registry.authenticate("whatever").name == "default"


def test_keys_lead_to_their_tenants() -> None:
    registry = TenantRegistry.from_config(Config(api_keys=("acme:one", "acme:t:wo", "bob:three")))
    assert not registry.is_open
    assert registry.authenticate("one") == registry.authenticate("t:wo")
    assert registry.authenticate("three").name == "bob"


@pytest.mark.parametrize("api_key", [None, "", "acme", "ONE", "one ", "acme:one"])
def test_other_keys_are_refused(api_key: str | None) -> None:
    registry = TenantRegistry.from_config(Config(api_keys=("acme:one",)))
    with pytest.raises(Unauthenticated):
        registry.authenticate(api_key)


def test_models_can_be_kept_from_a_tenant() -> None:
    Tenant("acme").check_model("any")
    tenant = Tenant("acme", models=frozenset({"small"}))
    tenant.check_model("small")
    with pytest.raises(PermissionDenied):
        tenant.check_model("big")


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (Load(0, 0, 0), None),
        (Load(9, 3, 5), None),
        (Load(10, 0, 0), QueueFull),
        (Load(4, 4, 4), QuotaExceeded),
        (Load(0, 0, 6), QuotaExceeded),
        (Load(10, 4, 6), QuotaExceeded),  # the tenant's own limit is told first
        (Load(0, 0, 0, is_draining=True), Draining),
        (Load(10, 4, 6, is_draining=True), Draining),
    ],
)
def test_limits_are_checked_in_order(load: Load, expected: type[DrafthouseError] | None) -> None:
    tenant = Tenant("acme", n_waiting_max=4, n_active_max=6)
    admission = Admission(n_waiting_max=10, retry_after_s=2.5)
    if expected is None:
        admission.admit(tenant, load, now=0.0)
        return
    with pytest.raises(expected) as caught:
        admission.admit(tenant, load, now=0.0)
    assert isinstance(caught.value, QueueFull | QuotaExceeded | Draining)
    assert caught.value.retry_after_s == 2.5


def test_a_tenant_without_limits_is_bound_by_the_queue_alone() -> None:
    admission = Admission(n_waiting_max=1000, retry_after_s=1.0)
    admission.admit(Tenant("acme"), Load(999, 999, 5000), now=0.0)
    with pytest.raises(QueueFull) as caught:
        admission.admit(Tenant("acme"), Load(1000, 0, 0), now=0.0)
    assert caught.value.n_waiting == 1000
