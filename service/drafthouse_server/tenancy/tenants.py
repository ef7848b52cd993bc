"""Who asks: keys and the tenants that they are of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from drafthouse_server.config import Config
from drafthouse_server.errors import PermissionDenied, Unauthenticated

__all__ = ["Tenant", "TenantRegistry"]

_DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Tenant:
    """A customer of the server; keys, limits and fairness are counted per tenant."""

    name: str
    """Unique name."""
    weight: float = 1.0
    """Share of the server relative to other tenants' weights, > 0."""
    n_waiting_max: int | None = None
    """Requests that may wait for a slot; None is unlimited."""
    n_active_max: int | None = None
    """Requests that may wait or run at once; None is unlimited."""
    models: frozenset[str] | None = None
    """Names of the models that it may use; None is all."""

    def check_model(self, model: str) -> None:
        """Checks that the tenant may use a model, whether or not the model exists.

        Raises:
            PermissionDenied: it may not (MODEL_NOT_ALLOWED).
        """
        if self.models is not None and model not in self.models:
            raise PermissionDenied(model)


def _digest(api_key: str) -> bytes:
    return hashlib.sha256(api_key.encode()).digest()


class TenantRegistry:
    """Finds the tenant of an API key. Without any key the server is open to everybody.

    Args:
        tenants: Tenants by API key.
        open_tenant: The tenant of every call when there are no keys.
    """

    def __init__(self, tenants: Mapping[str, Tenant], open_tenant: Tenant | None = None) -> None:
        # Looked up by digest, so that the time of a lookup tells nothing of a key.
        self._tenants = {_digest(api_key): tenant for api_key, tenant in tenants.items()}
        self._open_tenant = open_tenant or Tenant(_DEFAULT_TENANT)

    @classmethod
    def from_config(cls, config: Config) -> TenantRegistry:
        """Returns the registry of `Config.api_keys`."""
        tenants = {}
        for entry in config.api_keys:
            name, _, api_key = entry.partition(":")
            tenants[api_key] = Tenant(name, n_waiting_max=config.tenant_queue_size)
        open_tenant = Tenant(_DEFAULT_TENANT, n_waiting_max=config.tenant_queue_size)
        return cls(tenants, open_tenant)

    @property
    def is_open(self) -> bool:
        """Whether calls need no key."""
        return not self._tenants

    def authenticate(self, api_key: str | None) -> Tenant:
        """Returns the tenant of a key.

        Args:
            api_key: As the client sent it, without a scheme; None if it sent none.

        Raises:
            Unauthenticated: the key is missing or unknown (INVALID_API_KEY).
        """
        if self.is_open:
            return self._open_tenant
        tenant = self._tenants.get(_digest(api_key)) if api_key else None
        if tenant is None:
            raise Unauthenticated
        return tenant
