"""Keys and their tenants."""

from __future__ import annotations

import pytest

from drafthouse_server.config import Config
from drafthouse_server.errors import PermissionDenied, Unauthenticated
from drafthouse_server.tenancy.tenants import Tenant, TenantRegistry


def tenant_of(registry: TenantRegistry, api_key: str | None) -> Tenant:
    return registry.identify(api_key, "").tenant


def test_without_keys_everybody_is_the_default_tenant() -> None:
    registry = TenantRegistry.from_config(Config())
    assert registry.is_open
    assert tenant_of(registry, None).name == "default"
    assert tenant_of(registry, "whatever").name == "default"


def test_keys_lead_to_their_tenants() -> None:
    registry = TenantRegistry.from_config(Config(api_keys=("acme:one", "acme:t:wo", "bob:three")))
    assert not registry.is_open
    assert tenant_of(registry, "one") == tenant_of(registry, "t:wo")
    assert tenant_of(registry, "three").name == "bob"


@pytest.mark.parametrize("api_key", [None, "", "acme", "ONE", "one ", "acme:one"])
def test_other_keys_are_refused(api_key: str | None) -> None:
    registry = TenantRegistry.from_config(Config(api_keys=("acme:one",)))
    with pytest.raises(Unauthenticated):
        tenant_of(registry, api_key)


def test_models_can_be_kept_from_a_tenant() -> None:
    Tenant("acme").check_model("any")
    tenant = Tenant("acme", models=frozenset({"small"}))
    tenant.check_model("small")
    with pytest.raises(PermissionDenied):
        tenant.check_model("big")


def test_a_certificate_stands_for_a_key() -> None:
    keys = ("acme:one", "bob:two")
    config = Config(
        api_keys=keys,
        tenant_queue_size=7,
        ssl_cert_file="c",
        ssl_key_file="k",
        ssl_client_ca_file="a",
    )
    registry = TenantRegistry.from_config(config)
    assert registry.certified("acme").tenant == tenant_of(registry, "one")
    unknown = registry.certified("carol").tenant
    assert (unknown.name, unknown.n_waiting_max) == ("carol", 7)


def test_where_certificates_are_asked_for_nobody_enters_without_a_name() -> None:
    config = Config(ssl_cert_file="c", ssl_key_file="k", ssl_client_ca_file="a")
    registry = TenantRegistry.from_config(config)
    assert not registry.is_open
    for key in (None, "", "x"):
        with pytest.raises(Unauthenticated):
            tenant_of(registry, key)
