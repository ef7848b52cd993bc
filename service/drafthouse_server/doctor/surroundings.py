"""Checks of what a server needs around it: addresses, certificates, store, disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from drafthouse_server.config import Config
from drafthouse_server.doctor.report import Problem
from drafthouse_server.errors import ConfigError, StartupError
from drafthouse_server.host.address import try_address
from drafthouse_server.host.amounts import format_bytes
from drafthouse_server.tenancy.tenants import TenantRegistry
from drafthouse_server.usage.folder import JournalFolder

__all__ = ["CHECKS", "is_set_up", "is_there"]

_DISK_BYTES_LEAST = 16 << 20
_DISK_BYTES_AMPLE = 1 << 30
_DAY_S = 86400.0
_IS_FIXED = "lies on a disk that is mounted read-only"
_OR_OWNER = ", or change its owner or mode"
_N_DAYS_AMPLE = 30
"""Days until a certificate expires from which on nothing is told."""


def _address(config: Config) -> Iterator[Problem]:
    try:
        try_address(config.host, config.port)
    except StartupError as error:
        yield Problem("address", str(error))


def _metrics(config: Config) -> Iterator[Problem]:
    try:
        try_address(config.metrics_host, config.metrics_port)
    except StartupError as error:
        told = str(error).replace("--port or --host", "metrics_port or metrics_host")
        yield Problem("metrics", told)


def _admin(config: Config) -> Iterator[Problem]:
    try:
        try_address(config.admin_host, config.admin_port, "admin-")
    except StartupError as error:
        yield Problem("admin", str(error))
    from drafthouse_server.rpc.tls import admin_certificates  # noqa: PLC0415  # as in `_tls`

    try:
        admin_certificates(config)
    except ConfigError as error:
        if error.key == "admin_client_ca_file":  # of the others `_tls` tells
            yield Problem("admin", str(error))


def _tenants(config: Config) -> Iterator[Problem]:
    try:
        TenantRegistry.from_config(config)
    except StartupError as error:
        yield Problem("tenants", str(error))


def _tls(config: Config) -> Iterator[Problem]:
    from drafthouse_server.rpc.tls import Certificates  # noqa: PLC0415  # grpc takes its time

    try:
        certificates = Certificates(config)
    except StartupError as error:
        yield Problem("tls", str(error))
        return
    path, expires_at, now = config.ssl_cert_file, certificates.expires_at, time.time()
    left_s, date = expires_at - now, time.strftime("%Y-%m-%d", time.gmtime(expires_at))
    if refusal := certificates.refusal(now):
        advice = "replace certificate and key"
        if left_s > 0:
            here = time.strftime("%Y-%m-%d %H:%M", time.gmtime(now))
            advice += f", or set the clock: here it is {here}"
        yield Problem(
            "tls",
            f"the certificate in ssl_cert_file {path} {refusal}, and clients refuse it; {advice}",
        )
    elif left_s < _N_DAYS_AMPLE * _DAY_S:
        yield Problem(
            "tls",
            f"the certificate in ssl_cert_file {path} expires on {date}, in"
            f" {int(left_s / _DAY_S)} days; replace certificate and key before (a running server"
            " reads them again)",
            "warning",
        )


def _store(config: Config) -> Iterator[Problem]:
    from drafthouse_server.doctor.store import store_problems  # noqa: PLC0415  # SQLAlchemy too

    yield from store_problems(config)


def _rates(config: Config) -> Iterator[Problem]:
    try:
        reason = asyncio.run(_ask_redis(config.rate_counters_url))
    except StartupError as error:
        yield Problem("rate_counters", str(error))
        return
    if reason:
        yield Problem(
            "rate_counters",
            "the Redis of rate_counters_url does not answer within a quarter of a second"
            f" ({reason}); a server would start, and count rates for itself until it does: start"
            " it, or check host, port and, with rediss://, certificates",
            "warning",
        )


async def _ask_redis(url: str) -> str:
    """Returns why Redis does not answer; empty where it does."""
    from drafthouse_server.tenancy.redis_counters import redis_counters  # noqa: PLC0415

    counters = redis_counters(url)
    try:
        return "" if await counters.ping() else counters.reason
    finally:
        await counters.close()


def is_there(path: Path) -> bool:
    """Returns whether there is such a file or folder.

    Raises:
        OSError: nobody can tell; `Path.exists` says no then, from Python 3.14 on.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _audit(config: Config) -> Iterator[Problem]:
    path = Path(config.audit_file)
    folder = path.absolute().parent
    advice = ""
    is_made = is_there(path)
    if path.is_dir():
        advice = "it is a folder; give the path of a file"
    elif not folder.is_dir():
        advice = f"make the folder {folder}, or give another path"
    else:
        place, mode = (path, os.W_OK) if is_made else (folder, os.W_OK | os.X_OK)
        if not os.access(place, mode):
            is_fixed = os.statvfs(place).f_flag & os.ST_RDONLY
            why = _IS_FIXED if is_fixed else "is somebody else's"
            advice = f"{place} {why}; give another path" + ("" if is_fixed else _OR_OWNER)
    if advice:
        yield Problem(
            "audit",
            f"audit_file {path} cannot be written, and the server would not start without its audit"
            f" trail: {advice}",
        )


def _journal(config: Config) -> Iterator[Problem]:
    folder = Path(config.usage_journal)
    place = next(it for it in (folder, *folder.absolute().parents) if is_there(it))
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        is_fixed = os.statvfs(place).f_flag & os.ST_RDONLY
        why = _IS_FIXED if is_fixed else "is no folder that this user may write"
        advice = "" if is_fixed else ", or change its owner"
        yield Problem(
            "journal",
            f"usage_journal {folder} cannot be written: {place} {why}; choose another"
            f" usage_journal{advice}",
        )
        return
    try:
        JournalFolder(folder).check_free()
    except StartupError as error:
        yield Problem("journal", str(error))
    n_free = shutil.disk_usage(place).free
    if n_free < _DISK_BYTES_AMPLE:
        yield Problem(
            "journal",
            f"the disk of usage_journal {folder} has {format_bytes(n_free)} left; when it is full,"
            f" new streams are treated as usage_on_full says ({config.usage_on_full}); free some,"
            " or choose another usage_journal",
            "error" if n_free < _DISK_BYTES_LEAST else "warning",
        )


CHECKS: Mapping[str, Callable[[Config], Iterator[Problem]]] = {
    "address": _address,
    "metrics": _metrics,
    "admin": _admin,
    "tenants": _tenants,
    "tls": _tls,
    "store": _store,
    "rate_counters": _rates,
    "journal": _journal,
    "audit": _audit,
}
"""By the name that its problems have. Each is for settings with which it `is_set_up`."""

_SETTINGS = {
    "metrics": "metrics_port",
    "admin": "has_admin",
    "tls": "ssl_cert_file",
    "store": "store",
    "rate_counters": "rate_counters_url",
    "journal": "usage_journal",
    "audit": "audit_file",
}
"""The setting without which there is nothing to check."""


def is_set_up(name: str, config: Config) -> bool:
    """Tells whether a server with these settings has what a check of `CHECKS` looks at."""
    return name not in _SETTINGS or bool(getattr(config, _SETTINGS[name]))
