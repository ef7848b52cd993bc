"""What all that know callers have in common; where calls come from, and how often one may be wrong.

`TenantRegistry` knows the keys of the settings, `KeyRing` those of a store.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote

from drafthouse_server.errors import TooManyBadKeys, Unauthenticated
from drafthouse_server.tenancy.counters import Turns
from drafthouse_server.tenancy.tenants import Identity, Tenant

if TYPE_CHECKING:  # it needs SQLAlchemy, which servers without a store do not load
    from drafthouse_server.tenancy.records import TenantRecord

__all__ = [
    "BadKeys",
    "KnownTenants",
    "LastUses",
    "RingRules",
    "Tenants",
    "UnknownTenant",
    "source_of",
]

_N_ADDRESSES_MAX = 10_000
_N_AT_ONCE = 8
_MINUTE_S = 60.0


class Tenants(Protocol):
    """Knows who calls, by key."""

    def identify(self, api_key: str | None, address: str) -> Identity | Awaitable[Identity]:
        """Returns whom a key is of: at once, or, where somebody must be asked, as an awaitable.

        Args:
            api_key: As the client sent it, without a scheme; None if it sent none.
            address: Where it was sent from, as `source_of` returns it.
        """
        ...

    def certified(self, name: str) -> Identity | Awaitable[Identity]:
        """Returns the tenant that a client's certificate names; such a client needs no key.

        At once, or, where somebody must be asked, as an awaitable.

        Raises, here or when it is awaited:
            UnknownTenant: there is a store, and no such tenant (INVALID_API_KEY).
        """
        ...

    def hold(
        self, identity: Identity, on_end: Callable[[], object] = ...
    ) -> AbstractContextManager[None]:
        """Returns the block in which a call runs; it may end the call, when its key is revoked.

        Args:
            identity: Whose call it is.
            on_end: Called when the call is about to be ended for that.
        """
        ...


def source_of(peer: str) -> str:
    """Returns the address of a gRPC peer without its port; of IPv6 the network that one user has.

    Args:
        peer: Such as "ipv4:10.0.0.7:52114" or "ipv6:%5B2001:db8::1%5D:52114".
    """
    kind, _, rest = peer.partition(":")
    host = unquote(rest).rpartition(":")[0].strip("[]")
    if kind != "ipv6":
        return host if kind == "ipv4" else peer
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))


class UnknownTenant(Unauthenticated):
    """The client's certificate names a tenant that the store does not have.

    Args:
        tenant: As the certificate names it.
    """

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        super().__init__(
            f"the client certificate names tenant {tenant!r}, which the store does not have; add it"
            f" (drafthouse tenants add {tenant}), or show a certificate of a tenant that exists"
        )

    def metadata(self) -> dict[str, str]:
        """Returns the tenant's name."""
        return {"tenant": self.tenant}


class BadKeys:
    """Counts wrong keys by address, so that guessing costs the guesser and not the server.

    A bucket of `n_max` tokens for each address, filled within a minute. Pure: time is an argument.

    Args:
        n_max: Wrong keys of an address per minute; 0: any number.
    """

    def __init__(self, n_max: int) -> None:
        self._n_max = n_max
        self._debts: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self.turns = Turns(_N_AT_ONCE)
        """Of addresses to look for unknown keys: such as come at once are counted in between."""

    def check(self, address: str, now: float) -> None:
        """Checks that an unknown key of an address may be looked at.

        Args:
            address: As `source_of` returns it.
            now: Time in seconds.

        Raises:
            TooManyBadKeys: too many were wrong (TOO_MANY_BAD_KEYS).
        """
        if not self._n_max:
            return
        debt = self._debt(address, now)
        if debt > self._n_max - 1:
            wait_s = (debt - self._n_max + 1) * _MINUTE_S / self._n_max
            raise TooManyBadKeys(self._n_max, wait_s)

    def note(self, address: str, now: float) -> None:
        """Counts a wrong key.

        Keys whose id is known are counted and not refused; what they add has a bound, too, or a
        client that goes on with an expired one would lock its address out for days.
        """
        if not self._n_max:
            return
        self._debts[address] = min(self._debt(address, now) + 1, self._n_max), now
        self._debts.move_to_end(address)
        while len(self._debts) > _N_ADDRESSES_MAX:
            self._debts.popitem(last=False)

    def _debt(self, address: str, now: float) -> float:
        debt, since = self._debts.get(address, (0.0, now))
        return max(0.0, debt - (now - since) * self._n_max / _MINUTE_S)


class KnownTenants:
    """The tenants of the store whose keys the server has seen, and which of them were deleted.

    One that was deleted and made again is another one, whatever its name.
    """

    def __init__(self) -> None:
        self._created_at: dict[str, int] = {}
        self.on_deleted: Callable[[str], None] | None = None
        """Called with the name of each that was deleted: nothing of it shall be kept."""
        self.on_read: Callable[[Iterable[Tenant]], None] | None = None
        """Called with those that the store has told, as they are now."""

    @property
    def names(self) -> set[str]:
        """Names of all."""
        return set(self._created_at)

    def note(self, tenants: Iterable[TenantRecord]) -> None:
        """Notes tenants that exist."""
        for record in tenants:
            self._created_at.setdefault(record.name, record.created_at)

    def tell(self, tenants: Iterable[Tenant]) -> None:
        """Tells whom it concerns of tenants that the store has told."""
        if self.on_read is not None:
            self.on_read(tenants)

    def take_deleted(
        self, asked: AbstractSet[str], found: Iterable[TenantRecord], suspects: AbstractSet[str]
    ) -> set[str]:
        """Returns the names of those that were deleted, and forgets them.

        Args:
            asked: Names that the store was asked for.
            found: Of these, all that exist.
            suspects: Names of tenants that have lost a key: keys go with their tenant alone.
        """
        created_at = {record.name: record.created_at for record in found}
        known = self._created_at
        deleted = {n for n in asked if n in known and created_at.get(n) != known[n]} | suspects
        for name in deleted:
            self._created_at.pop(name, None)
        return deleted


@dataclass(frozen=True, slots=True)
class RingRules:
    """How a `KeyRing` decides."""

    grace_s: float = 900.0
    """Seconds that known keys go on without the store."""
    ends_streams: bool = True
    """Whether the calls of a revoked key are ended."""
    retry_after_s: float = 1.0
    """Advice to those whose key could not be looked for."""


class LastUses:
    """When keys were used last, until it is written."""

    def __init__(self) -> None:
        self.pending: dict[str, int] = {}
        """By the key's id, seconds since 1970."""
        self.is_flushed = True
        """Whether the last attempt to write was a good one."""

    def take(self, n_max: int) -> dict[str, int]:
        """Returns some of what is pending, `n_max` keys at most, which is so no more."""
        return {key_id: self.pending.pop(key_id) for key_id in [*islice(self.pending, n_max)]}

    def put_back(self, uses: dict[str, int]) -> None:
        """Has uses pending again that could not be written; later ones of the same keys stay."""
        self.pending = uses | self.pending
        self.is_flushed = False
