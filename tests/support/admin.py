"""Asking the AdminService of a server in this process, and what a store tells of its changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status
from sqlalchemy import Connection, select

from drafthouse.v1 import admin_pb2_grpc
from drafthouse_server.tenancy import records

__all__ = ["admin", "audit_trail", "reason_of"]


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


def audit_trail(connection: Connection, n_max: int) -> list[Mapping[str, object]]:
    """Returns the last changes, the newest first: `at`, `actor`, `action`, `subject`, `detail`."""
    wanted = select(records.audit).order_by(records.audit.c.id.desc()).limit(n_max)
    return [dict(row._mapping) for row in connection.execute(wanted)]
