"""Who may reach the server: what an address, a tenant's name and a key may be, and together."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from drafthouse_server.errors import ConfigError

__all__ = [
    "UNIX",
    "Access",
    "are_api_keys",
    "bare_host",
    "check_access",
    "has_access",
    "is_api_key",
    "is_loopback",
    "is_tenant_name",
    "mode_problem",
]

UNIX = "unix:"
"""How the address of a socket of this machine begins."""

_N_KEY_CHARACTERS_MIN = 20
_OTHERS = 0o007
_GROUP_WRITES = 0o020
_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[!-~]+")  # what an HTTP header carries, without spaces


class Access(Protocol):
    """The settings of `Config` that decide who may reach the server; they are documented there."""

    @property
    def host(self) -> str:
        """Address to listen at."""

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Keys and their tenants."""

    @property
    def store(self) -> str:
        """URL of the store of tenants and keys."""

    @property
    def insecure_no_auth(self) -> bool:
        """Whether a server beyond loopback may do without keys."""

    @property
    def ssl_cert_file(self) -> str:
        """Path of the server's certificate."""

    @property
    def ssl_key_file(self) -> str:
        """Path of its private key."""

    @property
    def ssl_client_ca_file(self) -> str:
        """Path of the authorities of clients' certificates."""

    @property
    def insecure_no_tls(self) -> bool:
        """Whether a server beyond loopback may do without TLS."""


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches an address; no other name than localhost is."""
    if host.startswith(UNIX) or host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(bare_host(host))
    except ValueError:
        return False
    return address.is_loopback


def bare_host(host: str) -> str:
    """Returns an address without the brackets that an IPv6 address may be written in."""
    return host.removeprefix("[").removesuffix("]")


def is_tenant_name(name: str) -> bool:
    """Returns whether a tenant may have a name: 1 to 64 of A-Z a-z 0-9 . _ -, no mark first."""
    return _TENANT_NAME.fullmatch(name) is not None


def is_api_key(entry: str) -> bool:
    """Returns whether a text is of the form "tenant:key"."""
    name, _, key = entry.partition(":")
    return is_tenant_name(name) and _KEY.fullmatch(key) is not None


def are_api_keys(entries: Sequence[str]) -> bool:
    """Returns whether texts are of the form "tenant:key", with every key once."""
    keys = [entry.partition(":")[2] for entry in entries]
    return all(map(is_api_key, entries)) and len(set(keys)) == len(keys)


def has_access(access: Access) -> bool:
    """Returns whether a client must show who it is, by a key or a certificate."""
    return bool(access.api_keys or access.store or access.ssl_client_ca_file)


def check_access(access: Access) -> None:
    """Checks that settings of address, keys and TLS go together.

    Raises:
        ConfigError: a server beyond loopback lacks keys or TLS, or TLS lacks one of its files.
    """
    _check_files(access)
    if is_loopback(access.host):
        return
    missing, advice = [], []
    if not (has_access(access) or access.insecure_no_auth):
        missing.append("there are neither api_keys nor a store, so everybody could use it")
        advice.append("api_keys_file, store or ssl_client_ca_file (or insecure_no_auth)")
    if not (access.ssl_cert_file or access.insecure_no_tls):
        missing.append("there is no ssl_cert_file, so keys and texts could be read on their way")
        advice.append("ssl_cert_file and ssl_key_file (or insecure_no_tls)")
    if missing:
        problem = (
            f"host {access.host!r} is reached from other machines, and {', and '.join(missing)};"
            f" set {', and '.join(advice)}, or listen on 127.0.0.1"
        )
        raise ConfigError("host", access.host, problem=problem)
    _check_strength(access)


def _check_files(access: Access) -> None:
    cert, key = access.ssl_cert_file, access.ssl_key_file
    if bool(cert) != bool(key):
        given, other = ("ssl_key_file", "ssl_cert_file")[:: -1 if cert else 1]
        problem = f"{given} is set and {other} is not; TLS needs both: the certificate and its key"
        raise ConfigError(given, cert or key, problem=problem)
    if access.ssl_client_ca_file and not cert:
        problem = (
            "ssl_client_ca_file asks clients for certificates, which needs TLS;"
            " set ssl_cert_file and ssl_key_file"
        )
        raise ConfigError("ssl_client_ca_file", access.ssl_client_ca_file, problem=problem)


def _check_strength(access: Access) -> None:
    """Checks that nobody guesses a key.

    Raises:
        ConfigError: a key is short; its tenant is named.
    """
    for entry in access.api_keys:
        name, _, key = entry.partition(":")
        if len(key) < _N_KEY_CHARACTERS_MIN:
            problem = (
                f"host {access.host!r} is reached from other machines, and a key of tenant"
                f" {name!r} in api_keys has fewer than {_N_KEY_CHARACTERS_MIN} characters and"
                " could be guessed; `openssl rand -hex 20` prints one that cannot"
            )
            raise ConfigError("api_keys", "(hidden)", problem=problem)


def mode_problem(setting: str, path: Path) -> str:
    """Returns what is wrong with the mode of a file of keys; nothing where it cannot be told.

    Args:
        setting: Name of the setting that names the file.
        path: The file.
    """
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:
        return ""  # whoever reads it says so
    if not mode & (_OTHERS | _GROUP_WRITES):
        return ""
    return (
        f"{setting} {path} holds keys and has mode {mode:03o}, so that others than its owner and"
        " group may read it, or write it; run `chmod 640` on it (in Kubernetes defaultMode: 0440)"
    )
