"""How many bytes of requests each tenant sends: reading them costs all others time. Pure."""

from __future__ import annotations

from drafthouse_server.errors import QuotaExceeded

__all__ = ["Intake"]

_BURST_S = 1.0
"""Seconds of the rate that may come at once."""

_N_TENANTS_MAX = 1000
"""Tenants after which those that have sent nothing of late are forgotten."""


class Intake:
    """Counts bytes that were read, and refuses more of a tenant that is above its rate, unread.

    Messages that come at once are all read: nobody knows a message's size before.

    Args:
        bytes_per_s: Of one tenant, in the long run; a second's worth may come at once.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._paid_at: dict[str, float] = {}  # when all that was read is paid off at the rate

    def check(self, tenant: str, now: float) -> None:
        """Refuses a tenant that has sent too much of late.

        Args:
            tenant: Its name.
            now: Monotonic time in seconds.

        Raises:
            QuotaExceeded: it has (TENANT_QUOTA_EXCEEDED); says when it may go on.
        """
        wait_s = self._paid_at.get(tenant, now) - now - _BURST_S
        if wait_s > 0:
            quota, setting = "bytes of requests a second", "tenant_read_mib_per_s"
            raise QuotaExceeded(tenant, quota, self._bytes_per_s, wait_s, setting)

    def add(self, tenant: str, n_bytes: int, now: float) -> None:
        """Counts a message that was read.

        Args:
            tenant: Whose it is.
            n_bytes: Its size.
            now: Monotonic time in seconds.
        """
        if len(self._paid_at) > _N_TENANTS_MAX:
            self._paid_at = {name: at for name, at in self._paid_at.items() if at > now}
        began_at = max(now, self._paid_at.get(tenant, now))
        self._paid_at[tenant] = began_at + n_bytes / self._bytes_per_s
