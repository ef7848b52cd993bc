"""How a server tells of what it keeps elsewhere, and of its certificate."""

from __future__ import annotations

import asyncio
import datetime
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from tests.support.certificates import Authority
from tests.support.databases import redis_server

from drafthouse_server.config import Config
from drafthouse_server.rpc.server import Server
from drafthouse_server.rpc.tls import Certificates
from drafthouse_server.serving.exposition import render
from drafthouse_server.tenancy import key_ring, redis_counters

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ring, "POLL_S", 0.05)
    monkeypatch.setattr(redis_counters, "_BEAT_S", 0.05)


def values(server: Server, metric: str) -> dict[str, float]:
    """Returns the values of a metric, by the value of its label."""
    found = {}
    for line in render(server.statistics()).splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] == f"drafthouse_{metric}":
            found[name.partition('"')[2].partition('"')[0]] = float(value)
    return found


async def test_a_server_without_any_tells_of_none(server: Server) -> None:
    assert values(server, "backend_up") == {}
    assert values(server, "certificate_expiry_days") == {}


async def test_each_backend_is_told_up_and_down(
    start_server: ServerFactory, tmp_path: Path, eventually: Eventually
) -> None:
    path = tmp_path / "store.db"
    with redis_server() as (daemon, url):
        server = await start_server(
            store=f"sqlite:///{path}", usage_journal=str(tmp_path / "usage"), rate_counters_url=url
        )
        up = {"store": 1.0, "usage": 1.0, "rate_counters": 1.0}
        await eventually(lambda: values(server, "backend_up") == up)  # Redis may be slow at first
        daemon.hold()
        path.rename(tmp_path / "away.db")
        down = up | {"store": 0.0, "rate_counters": 0.0}
        await eventually(lambda: values(server, "backend_up") == down)
        before = values(server, "backend_silence_seconds")
        await asyncio.sleep(0.01)
        after = values(server, "backend_silence_seconds")
        assert all(after[name] > before[name] for name in ("store", "rate_counters"))
        daemon.release()
        (tmp_path / "away.db").rename(path)
        await eventually(lambda: values(server, "backend_up") == up)
        await server.close()


@pytest.mark.parametrize("year", [2049, 2050])
def test_a_certificates_end_is_read_in_both_forms(tmp_path: Path, year: int) -> None:
    """Before 2050 a certificate tells its times with two digits for the year."""
    end = datetime.datetime(year, 6, 1, 12, 30, 15, tzinfo=datetime.UTC)
    pair = Authority().issue(not_after=end)
    cert, key = pair.write(tmp_path)
    assert Certificates(Config(ssl_cert_file=cert, ssl_key_file=key)).expires_at == end.timestamp()


async def test_the_days_of_a_certificate_are_told(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    pair = Authority().issue()
    cert, key = pair.write(tmp_path)
    server = await start_server(ssl_cert_file=cert, ssl_key_file=key)
    end = x509.load_pem_x509_certificate(pair.certificate).not_valid_after_utc.timestamp()
    before = (end - time.time()) / 86400
    (days,) = values(server, "certificate_expiry_days").values()
    assert before - 1 < days <= before
