"""The Drafthouse server: scheduler, admission, gRPC service and command line."""

from __future__ import annotations

__all__: list[str] = []
