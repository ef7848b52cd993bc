"""Asking the AdminService of a server in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status

from drafthouse.v1 import admin_pb2_grpc

__all__ = ["admin", "reason_of"]


@contextlib.asynccontextmanager
async def admin(
    port: int, credentials: grpc.ChannelCredentials | None = None
) -> AsyncIterator[Any]:
    """Yields a stub of AdminService."""
    target = f"localhost:{port}"
    channel = (
        grpc.aio.insecure_channel(target)
        if credentials is None
        else grpc.aio.secure_channel(target, credentials)
    )
    async with channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)
        await asyncio.sleep(0)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """Returns the reason of a failed call; empty where it has none."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # has all that is asked of it
    info = ErrorInfo()
    if status is None or not any(detail.Unpack(info) for detail in status.details):
        return ""
    return info.reason
