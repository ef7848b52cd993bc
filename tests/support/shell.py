"""The command line on a store, as a test uses it beside a server."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from drafthouse_server.cli.main import main
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.tenancy.keys import id_of_key

__all__ = ["Shell"]


class Shell:
    """The command line on a store.

    Args:
        url: The store.
        pepper: The file of its pepper, which is made with it.
    """

    def __init__(self, url: str, pepper: Path) -> None:
        self.url = url
        self.pepper = pepper
        self.settings: dict[str, Any] = {"store": url, "key_pepper_file": str(pepper)}
        """What a server of this store is started with."""

    def run(self, *words: str) -> str:
        """Runs a command and returns what it prints; it may not fail."""
        out, err = io.StringIO(), io.StringIO()
        flags = ["--store", self.url, "--key-pepper-file", str(self.pepper)]
        code = main([*words, *flags], Terminal(out, err))
        assert code == 0, err.getvalue()
        return out.getvalue().strip()

    def add_key(self, tenant: str = "acme") -> str:
        """Makes a key, and the tenant where it is new."""
        return self.run("keys", "add", "--tenant", tenant)

    def revoke(self, key: str) -> None:
        """Ends a key's life."""
        self.run("keys", "revoke", id_of_key(key) or "")
