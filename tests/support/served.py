"""A server that serves to its end: until it is told to stop, or has reason to."""

from __future__ import annotations

import asyncio

from drafthouse_server.rpc.server import Server

__all__ = ["served"]


async def served(server: Server) -> asyncio.Task[None]:
    """Returns the task that serves, as soon as the server listens."""
    ready = asyncio.Event()
    serving = asyncio.create_task(server.serve(lambda _: ready.set()))
    await ready.wait()
    return serving
