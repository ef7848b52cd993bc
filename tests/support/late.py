"""A pytest plugin: the server goes on late where others may be quicker.

`make test-late` runs tests with `-p tests.support.late`. A refusal is with its client long before
the call's line is in the log, its ticket given back, its place free; threads begin late, and what
they did is heard of late. A test whose verdict depends on who was first fails here each time, not
once in a hundred runs of a busy machine.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Never

from drafthouse_server.errors import DrafthouseError
from drafthouse_server.rpc import interceptors

_REFUSAL_S, _THREAD_S = 0.15, 0.03


async def _abort(error: DrafthouseError, context: interceptors.Context) -> Never:
    try:
        await _abort_at_once(error, context)
    finally:
        await asyncio.sleep(_REFUSAL_S)


async def _to_thread(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    await asyncio.sleep(_THREAD_S)
    try:
        return await _to_thread_at_once(call, *args, **kwargs)
    finally:
        await asyncio.sleep(_THREAD_S)


_abort_at_once, interceptors._abort = interceptors._abort, _abort
_to_thread_at_once, asyncio.to_thread = asyncio.to_thread, _to_thread
