"""Commands on a store that is not there: told, and not made, lest a server finds it empty."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import drafthouse
from drafthouse_server.cli.main import main
from drafthouse_server.cli.terminal import Terminal

if TYPE_CHECKING:
    from tests.conftest import ServerFactory


def run(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    return main(words, Terminal(out, err)), out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    "words",
    [
        ("keys", "list"),
        ("keys", "revoke", "x"),
        ("keys", "rotate", "x"),
        ("tenants", "list"),
        ("tenants", "set", "acme", "weight=2"),
        ("tenants", "delete", "acme"),
        ("usage",),
    ],
)
def test_only_what_adds_makes_a_store(words: tuple[str, ...], tmp_path: Path) -> None:
    """A mistyped path was an empty store, in which nothing was found."""
    store = tmp_path / "missing.db"
    code, _, err = run(*words, "--store", f"sqlite:///{store}")
    assert code == 1
    assert f"cannot open the store {store}: No such file or directory" in err
    assert not list(tmp_path.iterdir())
    assert run("tenants", "add", "acme", "--store", f"sqlite:///{store}")[0] == 0


async def test_limits_of_a_server_whose_store_is_away_make_no_other(
    start_server: ServerFactory, tmp_path: Path, free_port: int
) -> None:
    """An empty store came in its place: the server forgot every tenant, and dropped their data."""
    path = tmp_path / "store.db"
    url = f"sqlite:///{path}"
    key = run("keys", "add", "--tenant", "acme", "--store", url)[1].strip()
    server = await start_server(store=url, admin_port=free_port)
    async with drafthouse.AsyncClient(server.target, api_key=key, retry=None) as client:
        await client.tokenize("x")
        path.rename(tmp_path / "away.db")

        def ask() -> None:
            with drafthouse.AdminClient(f"127.0.0.1:{free_port}") as admin:
                admin.limits("acme")

        with pytest.raises(drafthouse.StoreUnavailable):
            await asyncio.to_thread(ask)
        assert not path.exists()
        await client.tokenize("x")
