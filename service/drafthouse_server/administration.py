"""Settings of administration: where the server takes it, from whom, and where it is noted down.

Part of `config.Config`; docs/operations.md tells of them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

from drafthouse_server.access import UNIX, is_loopback
from drafthouse_server.errors import ConfigError
from drafthouse_server.setting import ANY, Rule, between, declare

__all__ = ["ADMIN_PORT", "AdminSettings", "check_admin"]

ADMIN_PORT = 50052
"""Where `drafthouse status` and the like look for a server unless they are told otherwise."""

_HOST = Rule("an address, a name, or unix:PATH", lambda host: host not in ("", UNIX))

_admin = functools.partial(declare, "Administration")


@dataclass(frozen=True, kw_only=True)  # no slots: `Config` has several bases
class AdminSettings:
    """The settings of administration."""

    admin_host: str = _admin(
        "127.0.0.1",
        _HOST,
        "Address of AdminService, a listener of its own: status, limits, drain, and what routers"
        " watch. On loopback every user of this machine may use it; unix:PATH leaves it to those"
        " who may write to that socket: by the umask, mostly the server's own user. Beyond loopback"
        " it wants admin_client_ca_file.",
    )
    """Address of AdminService."""
    admin_port: int = _admin(
        0,
        between(0, 65535),
        f"Port of AdminService, such as {ADMIN_PORT}. 0: there is none, unless admin_host is"
        " unix:PATH.",
    )
    """Port of AdminService; 0 is none."""
    admin_client_ca_file: str = _admin(
        "",
        ANY,
        "Path of the authorities (PEM) that sign administrators' certificates: AdminService then"
        " takes TLS alone, with ssl_cert_file, and refuses whoever shows no such certificate. Not"
        " that of tenants' certificates: each tenant would be an administrator.",
    )
    """Path of the authorities of administrators; empty: they need no certificate."""
    audit_file: str = _admin(
        "",
        ANY,
        "Path of the audit trail: one JSON object a line for every change, and every attempt that"
        " failed, by AdminService, `drafthouse keys` and `drafthouse tenants`. Empty: the log.",
    )
    """Path of the audit trail; empty: the log."""

    @property
    def has_admin(self) -> bool:
        """Whether there is an AdminService."""
        return bool(self.admin_port) or self.admin_host.startswith(UNIX)


class _Administered(Protocol):
    """The settings that `check_admin` looks at; they are documented above and in `config`."""

    @property
    def admin_host(self) -> str:
        """Address of AdminService."""

    @property
    def has_admin(self) -> bool:
        """Whether there is an AdminService."""

    @property
    def admin_client_ca_file(self) -> str:
        """Path of the authorities of administrators."""

    @property
    def ssl_client_ca_file(self) -> str:
        """Path of the authorities of tenants."""

    @property
    def ssl_cert_file(self) -> str:
        """Path of the server's certificate."""


def check_admin(settings: _Administered) -> None:
    """Checks that nobody administers the server who may not.

    Raises:
        ConfigError: AdminService would be reached from other machines without certificates, or with
            those of tenants; or its TLS lacks the server's certificate.
    """
    host, authorities = settings.admin_host, settings.admin_client_ca_file
    if authorities and not settings.ssl_cert_file:
        problem = (
            "admin_client_ca_file asks administrators for certificates, which needs TLS; set"
            " ssl_cert_file and ssl_key_file"
        )
        raise ConfigError("admin_client_ca_file", authorities, problem=problem)
    if authorities and authorities == settings.ssl_client_ca_file:
        problem = (
            "admin_client_ca_file is ssl_client_ca_file, so that every tenant with a certificate"
            " could administer the server; name a file with an authority of administrators alone"
        )
        raise ConfigError("admin_client_ca_file", authorities, problem=problem)
    if settings.has_admin and not (authorities or is_loopback(host)):
        problem = (
            f"admin_host {host!r} is reached from other machines, and nothing says who may"
            " administer the server; set admin_client_ca_file (mutual TLS), or listen on 127.0.0.1"
        )
        raise ConfigError("admin_host", host, problem=problem)
