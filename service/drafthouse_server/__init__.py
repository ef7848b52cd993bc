"""The Drafthouse server: scheduler, admission, gRPC service and command line."""

from __future__ import annotations

import os

# gRPC's C-core writes to stderr by itself, past our log: a client without a key, by failed
# handshakes, thousands of lines a second, and where nobody reads them the server stands still. It
# reads this once, when it is first used, so it is set before any module of ours imports it.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

__all__: list[str] = []
