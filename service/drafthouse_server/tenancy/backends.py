"""What a server keeps outside of itself: opened, closed, and asked how it does.

The modules behind it are imported when they are needed: SQLAlchemy takes a third of a second, and
many servers have no store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drafthouse_server.config import Config
from drafthouse_server.tenancy.admission import Admission
from drafthouse_server.tenancy.counters import SharedRates
from drafthouse_server.tenancy.identity import BadKeys, Tenants
from drafthouse_server.tenancy.keys import id_of_key
from drafthouse_server.tenancy.redis_counters import RedisCounters, open_redis, redis_counters
from drafthouse_server.tenancy.tenants import TenantRegistry
from drafthouse_server.usage.journal import Journal
from drafthouse_server.usage.record import UsageStore
from drafthouse_server.usage.stores import STORE_NAME, SqliteUsageStore

if TYPE_CHECKING:
    from drafthouse_server.tenancy.key_ring import KeyRing
    from drafthouse_server.tenancy.store import StoreUsage

__all__ = ["BackendState", "Backends", "check_backends"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackendState:
    """How something does that is kept outside of the server."""

    is_up: bool
    """Whether it has answered when it was asked last."""
    silent_s: float
    """Seconds since it has answered last; what is asked only when there is something to ask, and
    was not, is silent."""


def check_backends(config: Config) -> None:
    """Checks settings of tenants, store and Redis as far as nothing of these must be asked.

    Raises:
        ConfigError: one is wrong.
    """
    TenantRegistry.from_config(config)
    if config.store:
        from drafthouse_server.tenancy.store import store_url  # noqa: PLC0415  # see above

        store_url(config.store)
    if config.rate_counters_url:
        redis_counters(config.rate_counters_url)


class Backends:
    """The store of tenants, keys and usage of one server, and the Redis of its rates.

    Args:
        config: All settings.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.key_ring: KeyRing | None = None
        """The keys of the store."""
        self.usage: StoreUsage | None = None
        """The usage of the store."""
        self.rates: SharedRates | None = None
        """The rates that servers share."""
        self._redis: RedisCounters | None = None

    async def open_tenants(self) -> Tenants:
        """Returns who knows the keys: those of the settings, and those of the store.

        What has the form of the store's keys is looked for there alone, lest a key that was revoked
        works on: such ones of the settings are told.

        Raises:
            StartupError: the store cannot be used.
        """
        config = self._config
        bad_keys = BadKeys(config.bad_keys_per_minute)
        fixed = TenantRegistry.from_config(config, bad_keys=bad_keys, clock=time.monotonic)
        if not config.store:
            return fixed
        for entry in config.api_keys:
            tenant, _, key = entry.partition(":")
            if key_id := id_of_key(key):
                _log.warning(
                    "key %s of tenant %s in api_keys has the form of the store's keys and is looked"
                    " for in the store alone; remove it from api_keys, and where the store does not"
                    " have it, make a new one: `drafthouse keys add --tenant %s`",
                    *(key_id, tenant, tenant),
                )
        from drafthouse_server.tenancy.key_ring import open_key_ring  # noqa: PLC0415  # see above

        self.key_ring = await open_key_ring(config, fixed, bad_keys)
        return self.key_ring

    async def open_journal(self) -> Journal | None:
        """Opens the usage journal, if there is to be one; streams that a crash cut off end as lost.

        Its records go to the store, or, without one, to a file beside it.

        Raises:
            StartupError: it cannot be written, or the store cannot be used.
        """
        if not self._config.usage_journal:
            return None
        post = asyncio.get_running_loop().call_soon_threadsafe
        return await asyncio.to_thread(self._open_journal, post)

    def _open_journal(self, post: Callable[[Callable[[], None]], object]) -> Journal:
        folder = Path(self._config.usage_journal)
        store: UsageStore = SqliteUsageStore(folder / STORE_NAME)
        if self._config.store:
            from drafthouse_server.tenancy.store import StoreUsage  # noqa: PLC0415  # see above

            store = self.usage = StoreUsage.open(self._config.store)
        return Journal.open(folder, store, post=post)

    async def share_rates(self, admission: Admission) -> None:
        """Has tenants' rates counted together with other servers, if the settings say so.

        While Redis is away, at the start too, this server counts for itself.

        Raises:
            StartupError: the URL of Redis is wrong, or its user or password.
        """
        url = self._config.rate_counters_url
        if url:
            self._redis = await open_redis(url)
            self.rates = SharedRates(self._redis)
            admission.share(self.rates)

    def states(self) -> dict[str, BackendState]:
        """Returns how each does that is open, by name: store, usage, rate_counters."""
        now = time.monotonic()
        found = {"store": self.key_ring, "usage": self.usage, "rate_counters": self._redis}
        return {
            name: BackendState(not backend.is_away, max(0.0, now - backend.answered_at))
            for name, backend in found.items()
            if backend is not None
        }

    async def close(self) -> None:
        """Ends what it has opened, but for the journal. Harmless when done twice."""
        self._redis = None
        rates, self.rates = self.rates, None
        if rates is not None:
            await rates.close()
        key_ring, self.key_ring = self.key_ring, None
        if key_ring is not None:
            await key_ring.close()
