"""Checks of what a server needs around it: addresses, certificates, store, disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from drafthouse_server.config import Config
from drafthouse_server.doctor.report import Problem
from drafthouse_server.errors import StartupError
from drafthouse_server.host.address import try_address
from drafthouse_server.host.amounts import format_bytes

__all__ = ["CHECKS"]

_DISK_BYTES_LEAST = 16 << 20
_DISK_BYTES_AMPLE = 1 << 30


def _address(config: Config) -> Iterator[Problem]:
    try:
        try_address(config.host, config.port)
    except StartupError as error:
        yield Problem("address", str(error))


def _metrics(config: Config) -> Iterator[Problem]:
    if not config.metrics_port:
        return
    try:
        try_address(config.metrics_host, config.metrics_port)
    except StartupError as error:
        told = str(error).replace("--port or --host", "metrics_port or metrics_host")
        yield Problem("metrics", told)


def _tls(config: Config) -> Iterator[Problem]:
    if not config.ssl_cert_file:
        return
    from drafthouse_server.rpc.tls import Certificates  # noqa: PLC0415  # grpc takes its time

    try:
        Certificates(config)
    except StartupError as error:
        yield Problem("tls", str(error))


def _store(config: Config) -> Iterator[Problem]:
    if not config.store:
        return
    from drafthouse_server.doctor.store import store_problem  # noqa: PLC0415  # SQLAlchemy likewise

    if problem := store_problem(config):
        yield Problem("store", problem)


def _journal(config: Config) -> Iterator[Problem]:
    if not config.usage_journal:
        return
    folder = Path(config.usage_journal)
    place = next(it for it in (folder, *folder.absolute().parents) if it.exists())
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        yield Problem(
            "journal",
            f"usage_journal {folder} cannot be written: {place} is no folder that this user may"
            " write; choose another usage_journal, or change its owner",
        )
        return
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
    "tls": _tls,
    "store": _store,
    "journal": _journal,
}
"""By the name that its problems have; what is not set has no problem."""
