"""TLS: who may connect, what is renewed while streams run, and whom a certificate names."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from tests.support.certificates import Authority, Pair, replace, tenant_uri
from tests.support.logged import logged

import drafthouse
from drafthouse_server.config import Config
from drafthouse_server.errors import ConfigError, Unauthenticated
from drafthouse_server.rpc import tls
from drafthouse_server.rpc.server import Server
from drafthouse_server.rpc.tls import Certificates, tenant_of
from drafthouse_server.tenancy import records
from drafthouse_server.tenancy.store import Store

if TYPE_CHECKING:
    from tests.conftest import Eventually, GatedEngine, ServerFactory


@pytest.fixture
def authority() -> Authority:
    return Authority()


def files(authority: Authority, folder: Path, clients: Authority | None = None) -> dict[str, Any]:
    """Returns the settings of a server with a new certificate."""
    certificate, key = authority.issue().write(folder)
    settings = {"ssl_cert_file": certificate, "ssl_key_file": key}
    if clients is not None:
        settings["ssl_client_ca_file"] = clients.write(folder, "clients")
    return settings


def client_of(
    server: Server, authority: Authority, pair: Pair | None = None, key: str | None = None
) -> drafthouse.AsyncClient:
    shown = (pair.key, pair.certificate) if pair else (None, None)
    credentials = grpc.ssl_channel_credentials(authority.pem, *shown)
    return drafthouse.AsyncClient(server.target, credentials=credentials, api_key=key, retry=None)


def shake_hands(
    port: int, authority: Authority, **versions: ssl.TLSVersion
) -> tuple[int, str | None]:
    """Connects as a plain TLS client; returns the certificate's number and the version of TLS."""
    context = ssl.create_default_context(cadata=authority.pem.decode())
    context.set_ciphers("DEFAULT@SECLEVEL=0")  # so that it is the server who refuses
    context.set_alpn_protocols(["h2"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for name, version in versions.items():
            setattr(context, name, version)
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        shown = secure.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown).serial_number, secure.version()


async def test_generations_run_over_tls_and_plain_text_is_refused(
    start_server: ServerFactory, authority: Authority, tmp_path: Path
) -> None:
    server = await start_server(**files(authority, tmp_path))
    async with client_of(server, authority) as client:
        assert (await client.generate("x", max_output_tokens=9)).usage.output_tokens == 9
    async with drafthouse.AsyncClient(server.target, retry=None) as plain:
        with pytest.raises(drafthouse.Unavailable):
            await plain.tokenize("x")
    async with client_of(server, Authority()) as stranger:
        with pytest.raises(drafthouse.Unavailable):
            await stranger.tokenize("x")


STRANGERS = textwrap.dedent(
    """
    import asyncio, socket, sys
    from drafthouse_server.config import Config
    from drafthouse_server.engine.fake import FakeEngine
    from drafthouse_server.rpc.server import Server

    def call(port):
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
                while connection.recv(1000):
                    pass

    async def serve():
        config = Config(
            host="127.0.0.1", port=0, ssl_cert_file=sys.argv[1], ssl_key_file=sys.argv[2]
        )
        server = Server(config, FakeEngine)
        await server.startup()
        await asyncio.to_thread(call, server.port)
        await server.close()

    asyncio.run(serve())
    """
)


@pytest.mark.parametrize("verbosity", [None, "INFO"])
def test_clients_without_tls_write_no_lines_past_the_log(
    verbosity: str | None, authority: Authority, tmp_path: Path
) -> None:
    """The core of gRPC wrote thousands a second to stderr, and stood still while nobody read."""
    paths = files(authority, tmp_path)
    environment = {name: text for name, text in os.environ.items() if name != "GRPC_VERBOSITY"}
    if verbosity is not None:  # an operator asks for gRPC's own lines
        environment["GRPC_VERBOSITY"] = verbosity
    found = subprocess.run(
        [sys.executable, "-c", STRANGERS, paths["ssl_cert_file"], paths["ssl_key_file"]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ("Handshake failed" in found.stderr) == (verbosity is not None), found.stderr


def test_the_sdk_leaves_grpcs_lines_as_they_are() -> None:
    environment = {name: text for name, text in os.environ.items() if name != "GRPC_VERBOSITY"}
    code = "import os, drafthouse; print(os.environ.get('GRPC_VERBOSITY'))"
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "None"


async def test_tls_is_1_2_or_newer(
    start_server: ServerFactory, authority: Authority, tmp_path: Path
) -> None:
    server = await start_server(**files(authority, tmp_path))

    async def version(most: ssl.TLSVersion) -> str | None:
        versions = {"minimum_version": ssl.TLSVersion.TLSv1, "maximum_version": most}
        return (await asyncio.to_thread(shake_hands, server.port, authority, **versions))[1]

    assert await version(ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
    assert await version(ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
    # The server says no, or hangs up; an older OpenSSL of the client's would fail otherwise.
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version|EOF"):
        await version(ssl.TLSVersion.TLSv1_1)


async def test_certificates_are_replaced_while_streams_run(
    start_server: ServerFactory,
    gated_engine: GatedEngine,
    eventually: Eventually,
    authority: Authority,
    tmp_path: Path,
) -> None:
    """Streams go on over their connections; whoever connects later sees the new certificate."""
    server = await start_server(gated_engine, parallel=8, **files(authority, tmp_path))
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(server, authority)) for _ in range(8)]
        gated_engine.hold()
        streams = [client.generate("x", max_output_tokens=60) for client in clients]
        running = [asyncio.ensure_future(stream.result()) for stream in streams]
        await eventually(lambda: gated_engine.is_stuck)
        for _ in range(5):
            new = authority.issue()
            new.write(tmp_path)
            seen, _ = await asyncio.to_thread(shake_hands, server.port, authority)
            assert seen == new.serial
            async with client_of(server, authority) as newcomer:
                assert await newcomer.tokenize("x") == [120]
        gated_engine.release()
        for result in await asyncio.gather(*running):
            assert result.usage.output_tokens == 60
        for client in clients:
            assert await client.tokenize("x") == [120]  # the same connection, later


@pytest.mark.parametrize("broken", ["other key", "no pem", "missing", "encrypted", "half"])
async def test_a_broken_pair_is_logged_once_and_the_one_before_stays(
    start_server: ServerFactory,
    authority: Authority,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    broken: str,
) -> None:
    settings = files(authority, tmp_path)
    server = await start_server(**settings)
    old, _ = await asyncio.to_thread(shake_hands, server.port, authority)
    key = Path(settings["ssl_key_file"])
    other = authority.issue().key
    contents = {
        "other key": other,
        "no pem": b"hush",
        "encrypted": encrypted(authority.issue()),
        "half": other[: len(other) // 2],
        "missing": None,
    }
    caplog.set_level(logging.INFO)
    replace(key, contents[broken])
    for _ in range(3):
        seen, _ = await asyncio.to_thread(shake_hands, server.port, authority)
        assert seen == old
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(lines) == 1, lines
    assert "those before stay in use" in lines[0]
    assert str(key) in lines[0]
    assert "hush" not in lines[0]
    new = authority.issue()
    new.write(tmp_path)
    seen, _ = await asyncio.to_thread(shake_hands, server.port, authority)
    assert seen == new.serial
    assert len([r for r in caplog.records if "was read again" in r.getMessage()]) == 1


def encrypted(pair: Pair) -> bytes:
    key = serialization.load_pem_private_key(pair.key, None)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"hush"),
    )


def test_a_look_finds_new_files_before_anybody_connects(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = Certificates(Config(**files(authority, tmp_path)))
    before = certificates.fingerprint
    caplog.set_level(logging.INFO)
    certificates.look()
    assert certificates.fingerprint == before
    assert certificates._renewed() is None
    authority.issue().write(tmp_path)
    certificates.look()
    assert certificates.fingerprint != before
    assert certificates.fingerprint in caplog.text
    assert certificates._renewed() is not None  # what a look has found is for gRPC, too
    assert certificates._renewed() is None


def test_a_private_key_that_others_may_read_is_told_when_it_is_read_again(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond loopback the next start refuses it, and nothing had said so."""
    settings = files(authority, tmp_path)
    certificates = Certificates(Config(**settings))
    administrators = Certificates(Config(**settings), "administrators.crt")
    n_told = []
    for mode in (0o600, 0o644, 0o640):
        authority.issue().write(tmp_path)
        Path(settings["ssl_key_file"]).chmod(mode)
        certificates.look()
        administrators.look()
        n_told.append(sum("chmod 640" in line for line in logged(caplog)))
    assert n_told == [0, 1, 1]


def test_a_certificate_that_has_expired_or_is_not_valid_yet_is_told_once(
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Clients alone knew why they could not connect: the server's log said nothing."""
    certificates = Certificates(Config(**files(authority, tmp_path)))
    certificates.look()
    assert not caplog.records
    monkeypatch.setattr("drafthouse_server.rpc.tls.time.time", lambda: certificates.expires_at)
    for _ in range(2):
        certificates.look()
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "server.crt expired on 20" in record.getMessage()
    authority.issue().write(tmp_path)  # which has expired by that clock, too
    certificates.look()
    assert len(caplog.records) == 2
    monkeypatch.setattr("drafthouse_server.rpc.tls.time.time", lambda: 0.0)
    for _ in range(2):
        certificates.look()
    assert len(caplog.records) == 3
    assert "server.crt is not valid before 20" in caplog.records[-1].getMessage()


def test_a_certificate_that_is_written_while_it_is_read_is_used_when_it_is_whole(
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Half of it was read, and the TLS library then found the whole: that ended the watch."""
    settings = files(authority, tmp_path)
    certificates = Certificates(Config(**settings))
    path, read, rest = Path(settings["ssl_cert_file"]), tls._content, b""

    def read_and_write_on(setting: str, place: str) -> bytes:
        content = read(setting, place)
        if place == str(path):
            with path.open("ab") as file:
                file.write(rest)
        return content

    monkeypatch.setattr(tls, "_content", read_and_write_on)
    n_refused = 0
    for n in range(0, len(authority.issue().certificate), 7):
        new = authority.issue()
        new.write(tmp_path)
        path.write_bytes(new.certificate[:n])
        rest, before = new.certificate[n:], certificates.fingerprint
        caplog.clear()
        certificates.look()
        if certificates.fingerprint == before:
            n_refused += 1
            assert "was changed while it was read" in caplog.text
        rest = b""
        certificates.look()
        assert certificates.fingerprint == new.fingerprint, n
    assert n_refused > 50


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ("ssl_cert_file", (None, "ssl_cert_file {} cannot be read: No such file")),
        ("ssl_key_file", (None, "ssl_key_file {} cannot be read: No such file")),
        ("ssl_client_ca_file", (None, "ssl_client_ca_file {} cannot be read: No such file")),
        ("ssl_cert_file", (b"hush", "are not a certificate and its key")),
        ("ssl_key_file", (b"hush", "are not a certificate and its key")),
        ("ssl_client_ca_file", (b"hush", "ssl_client_ca_file {} has no certificates")),
        ("ssl_client_ca_file", (b"", "ssl_client_ca_file {} has no certificates")),
    ],
)
async def test_files_that_cannot_be_used_keep_the_server_from_starting(
    start_server: ServerFactory,
    authority: Authority,
    tmp_path: Path,
    setting: str,
    wrong: tuple[bytes | None, str],
) -> None:
    content, words = wrong
    settings = files(authority, tmp_path, authority)
    path = Path(settings[setting])
    replace(path, content)
    with pytest.raises(ConfigError) as caught:
        await start_server(**settings)
    assert words.format(path) in str(caught.value)
    assert "hush" not in str(caught.value)


# Mutual TLS.


async def test_a_certificate_of_a_client_names_its_tenant(
    start_server: ServerFactory, authority: Authority, tmp_path: Path
) -> None:
    clients = Authority("of clients")
    settings = files(authority, tmp_path, clients)
    server = await start_server(api_keys=("acme:one", "globex:two"), **settings)
    acme = clients.issue(tenant_uri("acme"))
    initech = clients.issue(tenant_uri("initech", "other.example"))
    gateway = clients.issue(x509.DNSName("gateway.example"))

    async def tenant(pair: Pair, key: str | None = None) -> str:
        names: list[str] = []
        admit = server.loop.admission.admit

        def watch(tenant: Any, *args: Any, **more: Any) -> Any:
            names.append(tenant.name)
            return admit(tenant, *args, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.loop.admission, "admit", watch)
            async with client_of(server, authority, pair, key) as client:
                await client.generate("x", max_output_tokens=1)
        return names[0]

    assert await tenant(acme) == "acme"
    assert await tenant(acme, "one") == "acme"
    assert await tenant(initech) == "initech"
    assert await tenant(gateway, "two") == "globex"
    refused = [(acme, "two"), (acme, "wrong"), (gateway, None), (initech, "one")]
    for pair, key in refused:
        with pytest.raises(drafthouse.InvalidApiKey):
            await tenant(pair, key)


async def test_where_there_is_a_store_a_certificate_must_name_a_tenant_of_it(
    start_server: ServerFactory, authority: Authority, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    with contextlib.closing(Store.open(url)) as store, store.writing() as connection:
        records.add_tenant(connection, "acme", {}, records.Change("a test", 1))
    clients = Authority("of clients")
    settings = files(authority, tmp_path, clients)
    server = await start_server(store=url, api_keys=("globex:two",), **settings)
    for known in ("acme", "globex"):
        async with client_of(server, authority, clients.issue(tenant_uri(known))) as client:
            assert await client.tokenize("x") == [120]
    async with client_of(server, authority, clients.issue(tenant_uri("initech"))) as client:
        with pytest.raises(drafthouse.InvalidApiKey, match="names tenant 'initech'") as caught:
            await client.generate("x", max_output_tokens=1)
    assert "drafthouse tenants add initech" in caught.value.message
    assert caught.value.metadata == {"tenant": "initech"}
    assert server.loop.admission.n_active == 0


async def test_nobody_connects_without_a_certificate_of_the_authority(
    start_server: ServerFactory, authority: Authority, tmp_path: Path
) -> None:
    server = await start_server(**files(authority, tmp_path, Authority("of clients")))
    for pair in (None, authority.issue(tenant_uri("acme")), Authority().issue(tenant_uri("acme"))):
        async with client_of(server, authority, pair) as client:
            with pytest.raises(drafthouse.Unavailable):
                await client.health()


async def test_the_authority_of_clients_is_replaced_too(
    start_server: ServerFactory, authority: Authority, tmp_path: Path
) -> None:
    old, new = Authority("old"), Authority("new")
    server = await start_server(**files(authority, tmp_path, old))
    async with client_of(server, authority, old.issue(tenant_uri("acme"))) as client:
        assert await client.tokenize("x") == [120]
    new.write(tmp_path, "clients")
    async with client_of(server, authority, old.issue(tenant_uri("acme"))) as client:
        with pytest.raises(drafthouse.Unavailable):
            await client.tokenize("x")
    async with client_of(server, authority, new.issue(tenant_uri("acme"))) as client:
        assert await client.tokenize("x") == [120]


def uris(*texts: str) -> dict[str, list[bytes]]:
    return {"peer_uri": [text.encode() for text in texts]}


def test_only_a_uri_of_the_documented_form_names_a_tenant() -> None:
    assert tenant_of(uris("spiffe://d/drafthouse/tenant/acme")) == "acme"
    assert tenant_of(uris("https://d/x", "spiffe://d/drafthouse/tenant/acme")) == "acme"
    for other in (
        {"x509_common_name": [b"spiffe://d/drafthouse/tenant/acme"]},
        {"x509_subject_alternative_name": [b"spiffe://d/drafthouse/tenant/acme"]},
        {"peer_dns": [b"spiffe://d/drafthouse/tenant/acme"]},
        uris("spiffe://d/tenant/acme"),
        uris("spiffe:///drafthouse/tenant/acme"),
        uris("spiffe://d/drafthouse/tenant/acme/more"),
        uris("spiffe://d/drafthouse/tenant/"),
        uris(),
        {},
    ):
        assert tenant_of(other) is None
    for wrong in (
        uris("spiffe://d/drafthouse/tenant/a", "spiffe://d/drafthouse/tenant/b"),
        uris("spiffe://d/drafthouse/tenant/a%20b"),
        uris("spiffe://d/drafthouse/tenant/-"),
        uris(f"spiffe://d/drafthouse/tenant/{'a' * 65}"),
    ):
        with pytest.raises(Unauthenticated):
            tenant_of(wrong)
