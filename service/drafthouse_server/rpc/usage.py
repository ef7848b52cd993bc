"""The service that lists usage records. See usage.proto."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import json
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from drafthouse.v1 import usage_pb2
from drafthouse.v1.usage_pb2_grpc import UsageServiceServicer
from drafthouse_server.errors import UsageUnavailable
from drafthouse_server.rpc.responses import usage_message
from drafthouse_server.rpc.services import ServiceContext
from drafthouse_server.scheduling.sequence import Usage
from drafthouse_server.serving.requests import Range, Violations
from drafthouse_server.usage.record import (
    UsageCursor,
    UsageQuery,
    UsageRecord,
    UsageStoreFailed,
)
from drafthouse_server.usage.shipping import Shipper

__all__ = ["UsageService", "record_message"]

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # at run time it is not generic

_N_PAGE_MAX, _N_PAGE_DEFAULT = 1000, 100
_RECORD_ID = re.compile(r"[0-9A-Z]{26}")
_N_LISTS = 2
"""Lists that are read at once, of different tenants."""

_LIST_S = 20.0
"""Seconds after which a list that was not read by then is refused."""


class UsageService(UsageServiceServicer):
    """Lists usage records.

    Reading may take seconds. So it has threads of its own, for which the tenants wait in turn: one
    that asks for many lists at once holds up neither the others nor what else needs a thread. A
    list that is being read keeps its thread and its tenant's turn to its end, whether its caller
    waits for it or not: behind a disk that hangs nothing piles up.

    Args:
        shared: What is offered, and to whom.
        shipper: Has the records.
        retry_after_s: Advice where the store cannot tell, seconds.
    """

    def __init__(self, shared: ServiceContext, shipper: Shipper, *, retry_after_s: float) -> None:
        self._shared = shared
        self._shipper = shipper
        self._retry_after_s = retry_after_s
        self._readers = ThreadPoolExecutor(_N_LISTS, thread_name_prefix="usage-list")
        self._free = asyncio.Semaphore(_N_LISTS)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def close(self) -> None:
        """Reads no more lists; those that are being read are read to their end."""
        self._readers.shutdown(wait=False)

    async def ListUsage(
        self, request: usage_pb2.ListUsageRequest, context: _Context
    ) -> usage_pb2.ListUsageResponse:
        """Lists the records of the caller's tenant."""
        tenant = self._shared.current_call().tenant.name
        async with self._shared.let_in(request.ByteSize()):
            n_page = request.page_size or _N_PAGE_DEFAULT
            query = _to_query(request, tenant, n_page + 1)  # one more tells whether there is a page
            try:
                async with asyncio.timeout(_LIST_S):
                    found = await self._find(tenant, query)
            except (UsageStoreFailed, TimeoutError) as error:
                raise UsageUnavailable(self._retry_after_s, "listed") from error
        page = found[:n_page]
        token = _to_token(page[-1], _digest(request, tenant)) if len(found) > n_page else ""
        return usage_pb2.ListUsageResponse(
            records=[record_message(record) for record in page], next_page_token=token
        )

    async def _find(self, tenant: str, query: UsageQuery) -> Sequence[UsageRecord]:
        """Returns records, in their tenant's turn.

        Raises:
            UsageStoreFailed: the store cannot tell.

        Cancellation:
            What is being read is read to its end.
        """
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        with contextlib.ExitStack() as held:
            for each in (turn, self._free):
                await each.acquire()
                held.callback(each.release)
            loop = asyncio.get_running_loop()
            reading = loop.run_in_executor(self._readers, self._shipper.find, query)
            release = held.pop_all().close
        reading.add_done_callback(lambda _: release())
        return await asyncio.shield(reading)


def _to_query(request: usage_pb2.ListUsageRequest, tenant: str, n_max: int) -> UsageQuery:
    """Returns the query of a request.

    Raises:
        InvalidRequest: one or more fields break their rule (INVALID_FIELD).
    """
    violations = Violations()
    violations.check("page_size", request.page_size, Range(0, _N_PAGE_MAX))
    after = _to_cursor(request.page_token, _digest(request, tenant))
    if request.page_token and after is None:
        expected = "must be the next_page_token of a page with the same conditions"
        violations.refuse("page_token", expected)
    since = _to_seconds(request.start_time) if request.HasField("start_time") else None
    until = _to_seconds(request.end_time) if request.HasField("end_time") else None
    if since is not None and until is not None and until < since:
        violations.refuse("end_time", "must not be before start_time")
    violations.close()
    return UsageQuery(
        tenant=tenant,
        key_id=request.key_id or None,
        model=request.model or None,
        since=since,
        until=until,
        after=after,
        n_max=n_max,
    )


def _digest(request: usage_pb2.ListUsageRequest, tenant: str) -> str:
    """Returns what differs where the conditions do."""
    conditions = usage_pb2.ListUsageRequest(key_id=request.key_id, model=request.model)
    for name in ("start_time", "end_time"):
        if request.HasField(name):
            getattr(conditions, name).CopyFrom(getattr(request, name))
    content = tenant.encode() + b"\0" + conditions.SerializeToString(deterministic=True)
    return hashlib.sha256(content).hexdigest()[:16]


def _to_token(last: UsageRecord, digest: str) -> str:
    values = [digest, last.ended_at, last.record_id]
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode()


def _to_cursor(token: str, digest: str) -> UsageCursor | None:
    """Returns where the page before has ended; None where it was no page of these conditions.

    A client may have written the token itself: a text that no database takes must not reach one.
    """
    if not token:
        return None
    try:
        of, ended_at, record_id = json.loads(base64.urlsafe_b64decode(token.encode()))
    except (binascii.Error, UnicodeError, ValueError, TypeError, RecursionError):
        return None
    is_place = isinstance(ended_at, float) and math.isfinite(ended_at)
    is_whole = is_place and isinstance(record_id, str) and _RECORD_ID.fullmatch(record_id)
    return UsageCursor(ended_at, record_id) if is_whole and of == digest else None


def _to_seconds(time: Timestamp) -> float:
    return round(time.seconds + time.nanos / 1e9, 6)


def _to_timestamp(seconds: float) -> Timestamp:
    whole, microseconds = divmod(round(seconds * 1e6), 10**6)
    return Timestamp(seconds=whole, nanos=microseconds * 1000)


def record_message(record: UsageRecord) -> usage_pb2.UsageRecord:
    """Returns a record as clients read it."""
    return usage_pb2.UsageRecord(
        record_id=record.record_id,
        tenant=record.tenant,
        key_id=record.key_id,
        end_user=record.end_user,
        model=record.model,
        request_id=record.request_id,
        outcome=record.outcome,
        usage=usage_message(Usage(record.n_prompt, record.n_output, record.n_reused)),
        drafted_tokens=record.n_drafted,
        accepted_tokens=record.n_accepted,
        rejected_tokens=record.n_rejected,
        queue_seconds=record.queue_s,
        prefill_seconds=record.prefill_s,
        decode_seconds=record.decode_s,
        preempted_seconds=record.preempted_s,
        start_time=_to_timestamp(record.started_at),
        end_time=_to_timestamp(record.ended_at),
    )
