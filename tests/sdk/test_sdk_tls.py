"""How the SDK connects: by TLS, or in plain text, but then with no key to another machine."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tests.support.certificates import Authority, tenant_uri

import drafthouse
from drafthouse._tls import is_local, secured

if TYPE_CHECKING:
    from tests.conftest import ServerFactory

LOCAL = (
    "127.0.0.1:50051",
    "127.8.9.1",
    "localhost:50051",
    "LOCALHOST",
    "[::1]:50051",
    "::1",
    "unix:/run/d.sock",
    "unix:///run/d.sock",
    "unix-abstract:d",
    "dns:localhost:50051",
    "dns:///localhost:50051",
    "dns://10.0.0.1/localhost:50051",
    "ipv4:127.0.0.1:50051,127.0.0.2:50051",
    "ipv6:[::1]:50051",
)
BEYOND = (
    "10.0.0.1:50051",
    "server.example:50051",
    "localhost.example:50051",
    "127.0.0.1.example:50051",
    "127.0.0.1@server.example:50051",
    "[::]:50051",
    "::1:50051",
    "dns:///server.example:50051",
    "dns://127.0.0.1/server.example:50051",
    "ipv4:127.0.0.1:50051,10.0.0.1:50051",
    "xds:///localhost",
    "0.0.0.0:50051",
)


@pytest.mark.parametrize("target", LOCAL)
def test_this_machine(target: str) -> None:
    assert is_local(target)
    credentials, options = secured(target, "hush", False, None, False)
    assert credentials is None
    assert ("grpc.enable_http_proxy", 0) in options


@pytest.mark.parametrize("target", BEYOND)
def test_no_key_leaves_this_machine_in_plain_text(target: str) -> None:
    assert not is_local(target)
    with pytest.raises(ValueError, match="plain text") as caught:
        drafthouse.Client(target, api_key="hush")
    assert "hush" not in str(caught.value)
    assert repr(target) in str(caught.value)
    for word in ("tls=True", "insecure_no_tls=True"):
        assert word in str(caught.value)


async def test_the_asyncio_client_refuses_too_and_both_do_what_they_are_told() -> None:
    beyond = "server.example:50051"
    with pytest.raises(ValueError, match="plain text"):
        drafthouse.AsyncClient(beyond, api_key="hush")
    for told in ({"insecure_no_tls": True}, {"tls": True}, {"api_key": None}):
        given: dict[str, Any] = {"api_key": "hush"} | told
        drafthouse.Client(beyond, **given).close()
        async with drafthouse.AsyncClient(beyond, **given):
            pass
    drafthouse.Client(beyond, api_key="k", credentials=grpc.ssl_channel_credentials()).close()


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give one of them"):
        drafthouse.Client(tls=True, credentials=grpc.ssl_channel_credentials())
    with pytest.raises(ValueError, match="belong together"):
        drafthouse.Tls(cert_file="client.crt")
    with pytest.raises(ValueError, match="belong together"):
        drafthouse.Tls(key_file="client.key")
    with pytest.raises(FileNotFoundError):
        drafthouse.Client(tls=drafthouse.Tls(ca_file=tmp_path / "missing.crt"))


def test_a_certificate_with_the_key_of_another_is_refused(tmp_path: Path) -> None:
    """Else no handshake succeeds, and nothing says why."""
    one, other = (Authority().issue().write(tmp_path, name) for name in ("one", "other"))
    drafthouse.Client(tls=drafthouse.Tls(None, *one)).close()
    with pytest.raises(ValueError, match="is not the private key of cert_file") as caught:
        drafthouse.Client(tls=drafthouse.Tls(None, one[0], other[1]))
    assert repr(one[0]) in str(caught.value)
    assert repr(other[1]) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n", b"junk", b"\x30\x82\x01\x0a"])
@pytest.mark.parametrize("name", ["ca_file", "cert_file", "key_file"])
def test_a_file_that_is_not_pem_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    """With an empty `ca_file` gRPC trusted the public authorities; else no handshake succeeded."""
    certificate, key = Authority().issue().write(tmp_path)
    broken = tmp_path / "broken"
    broken.write_bytes(content)
    files = {"ca_file": certificate, "cert_file": certificate, "key_file": key, name: str(broken)}
    kind = "private key" if name == "key_file" else "certificate"
    for make in (drafthouse.Client, drafthouse.AdminClient):
        with pytest.raises(ValueError, match=re.escape(f"{name} {str(broken)!r} has no {kind}")):
            make("127.0.0.1:1", tls=drafthouse.Tls(**files))


def test_a_certificate_in_the_place_of_a_key_is_refused(tmp_path: Path) -> None:
    certificate, key = Authority().issue().write(tmp_path)
    with pytest.raises(ValueError, match="has no private key"):
        drafthouse.Client(tls=drafthouse.Tls(None, key, certificate))


def test_files_that_can_be_read_once_alone_are_read_once(tmp_path: Path) -> None:
    """As of `--key-file <(vault read …)`."""
    one = Authority().issue().write(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(Path(one[1]).read_bytes()))
    writer.start()
    drafthouse.Client(tls=drafthouse.Tls(None, one[0], pipe)).close()
    writer.join(10)
    assert not writer.is_alive()


async def test_a_client_by_tls_with_a_certificate_of_its_own(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    servers, clients = Authority("of servers"), Authority("of clients")
    certificate, key = servers.issue().write(tmp_path)
    server = await start_server(
        ssl_cert_file=certificate,
        ssl_key_file=key,
        ssl_client_ca_file=clients.write(tmp_path, "clients"),
    )
    shown = clients.issue(tenant_uri("acme")).write(tmp_path, "acme")
    authority = servers.write(tmp_path)
    tls = drafthouse.Tls(ca_file=authority, cert_file=shown[0], key_file=shown[1])
    async with drafthouse.AsyncClient(server.target, tls=tls, retry=None) as client:
        assert await client.tokenize("x") == [120]
    nameless = drafthouse.Tls(authority, *shown, server_name="other.example")
    async with drafthouse.AsyncClient(server.target, tls=nameless, retry=None) as client:
        with pytest.raises(drafthouse.Unavailable):
            await client.tokenize("x")
    public = drafthouse.Tls(cert_file=shown[0], key_file=shown[1])
    async with drafthouse.AsyncClient(server.target, tls=public, retry=None) as client:
        with pytest.raises(drafthouse.Unavailable):
            await client.tokenize("x")
