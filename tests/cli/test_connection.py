"""How the commands that talk to a server reach it: by TLS, with a key that nobody else sees."""

from __future__ import annotations

import argparse
import asyncio
import io
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.certificates import Authority, tenant_uri

import drafthouse
from drafthouse_server.cli.connection import explain
from drafthouse_server.cli.main import main
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.tenancy.tenants import Tenant, TenantRegistry

if TYPE_CHECKING:
    from tests.conftest import ServerFactory

KEY = "hush-0123456789"


def run(*arguments: str) -> tuple[int, str, str]:
    """Runs a command in this process; returns its exit code and what it wrote."""
    out, err = io.StringIO(), io.StringIO()
    code = main(arguments, Terminal(out, err, io.StringIO()))
    return code, out.getvalue(), err.getvalue()


def assert_told(outcome: tuple[int, str, str], code: int, words: str) -> None:
    assert outcome[0] == code, outcome
    assert outcome[1] == ""
    assert len(outcome[2].splitlines()) == 1
    assert words in outcome[2]
    assert KEY not in outcome[2]


async def test_models_over_mutual_tls(start_server: ServerFactory, tmp_path: Path) -> None:
    servers, clients = Authority("of servers"), Authority("of clients")
    certificate, key = servers.issue().write(tmp_path)
    server = await start_server(
        ssl_cert_file=certificate,
        ssl_key_file=key,
        ssl_client_ca_file=clients.write(tmp_path, "clients"),
    )
    shown = clients.issue(tenant_uri("acme")).write(tmp_path, "acme")
    command = ("models", "--server", server.target)
    files = ("--ca-file", servers.write(tmp_path), "--cert-file", shown[0], "--key-file", shown[1])
    code, out, _ = await asyncio.to_thread(run, *command, *files)
    assert code == 0
    assert "fake" in out
    strange = await asyncio.to_thread(run, *command, "--tls", *files[2:])
    assert_told(strange, 1, "--ca-file FILE names an authority of your own")
    assert "takes the certificate of --cert-file" in strange[2]
    nobody = await asyncio.to_thread(run, *command, *files[:2])
    assert_told(nobody, 1, "asks clients for a certificate, --cert-file and --key-file show one")
    plain = await asyncio.to_thread(run, *command)
    assert_told(plain, 1, "if one there speaks TLS, give --tls")


def test_a_certificate_with_the_key_of_another_is_told_before_connecting(tmp_path: Path) -> None:
    one, other = (Authority().issue().write(tmp_path, name) for name in ("one", "other"))
    words = f"--key-file {other[1]} is not the private key of --cert-file {one[0]}"
    files = ("--cert-file", one[0], "--key-file", other[1])
    for command in (("models", "--server", "h:1"), ("status", "--server", "h:1")):
        assert_told(run(*command, *files), 2, words)


@pytest.mark.parametrize(
    ("retry_after", "words"),
    [
        (0.0, "in 1 s"), (0.2, "in 1 s"), (90.0, "in 90 s"), (301.0, "in 6 min"),
        (7201.0, "in 3 h"), (1_000_000.0, "in 12 days"),
    ],
)  # fmt: skip
def test_when_to_come_back_is_told_where_the_server_knows(retry_after: float, words: str) -> None:
    error = drafthouse.TenantQuotaExceeded("one too many", retry_after=retry_after)
    assert explain(error, argparse.Namespace()) == f"one too many; try again {words}"
    for_ever = drafthouse.TenantQuotaExceeded("one too many")
    assert explain(for_ever, argparse.Namespace()) == "one too many"


async def test_who_is_over_a_quota_is_told_when_to_come_back(start_server: ServerFactory) -> None:
    acme = Tenant("acme", requests_per_s=0.001)
    server = await start_server(tenants=TenantRegistry({KEY: acme}))
    place = ("--server", server.target, "--api-key", KEY)
    assert (await asyncio.to_thread(run, "generate", "x", "--max-tokens", "1", *place))[0] == 0
    assert_told(await asyncio.to_thread(run, "generate", "x", *place), 1, "; try again in 17 min")


async def test_a_key_from_a_file(start_server: ServerFactory, tmp_path: Path) -> None:
    server = await start_server(api_keys=(f"acme:{KEY}",))
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    command = ("models", "--server", server.target, "--api-key-file", str(path))
    assert (await asyncio.to_thread(run, *command))[0] == 0
    path.write_text("another")
    assert_told(await asyncio.to_thread(run, *command), 1, "--api-key-file")


@pytest.mark.parametrize("content", [b"", b"\n", b"two keys", b"a\nb", b"\xff", None])
def test_a_file_that_holds_no_key(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    words = "does not hold one key" if content is not None else "No such file"
    assert_told(run("models", "--api-key-file", str(path)), 2, words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--api-key", KEY), "would travel in plain text to 'h:1'"),
        (("--api-key", KEY, "--api-key-file", "f"), "both given"),
        (("--cert-file", "c"), "belong together"),
        (("--ca-file", "missing.crt"), "cannot read missing.crt"),
    ],
)
def test_what_cannot_be_is_one_sentence(flags: tuple[str, ...], words: str) -> None:
    assert_told(run("models", "--server", "h:1", *flags), 2, words)


@pytest.mark.parametrize("command", ["models", "status"])
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("http://127.0.0.1:50051", "must be an address, such as 'host:port'"),
        ("127.0.0.1:99999", "must have a port of at most 65535"),
        ("", "must be an address, such as 'host:port'"),
    ],
)
def test_an_address_that_is_none_is_told(
    command: str, target: str, words: str, tmp_path: Path
) -> None:
    """It was said of a key, which nobody had given, that it would travel in plain text."""
    certificate = Authority().issue().write(tmp_path)
    for files in ((), ("--cert-file", certificate[0], "--key-file", certificate[1])):
        outcome = run(command, "--server", target, *files)
        assert_told(outcome, 2, words)
        assert "plain text" not in outcome[2]


async def test_a_value_that_cannot_be_sent_is_a_wrong_flag(start_server: ServerFactory) -> None:
    """It was told as a call that the server refuses, with 1."""
    server = await start_server()
    command = ("generate", "x", "--server", server.target)
    for flags, code, words in (
        (("--seed", "99999999999"), 2, "seed cannot be sent"),
        (("--temperature", "99"), 1, "temperature: must be in [0, 10]"),
    ):
        assert_told(await asyncio.to_thread(run, *command, *flags), code, words)
    place = ("--server", "127.0.0.1:1")
    outcome = await asyncio.to_thread(run, "limits", "acme", f"max_priority={2**40}", *place)
    assert_told(outcome, 2, "max_priority cannot be sent")


def test_the_key_is_sent_where_one_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHOUSE_API_KEY", KEY)
    command = ("models", "--server", "server.invalid:1")
    assert_told(run(*command), 2, "plain text")
    assert_told(run(*command, "--insecure-no-tls"), 1, "no server at server.invalid:1")
