"""A client in another language, with another HTTP/2: requests of every kind, drawn at random."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.javascript import javascript

from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.rpc.server import Server

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory

SCRIPT = Path(__file__).with_name("javascript_client.js")
PROTOS = Path(__file__).resolve().parents[2] / "protos"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
SECONDS = 3.0
ENDS_WITHIN_S = 60
ENDS = {
    "whole": {"OK"},
    "fresh": {"OK"},
    "paused": {"OK"},
    "tokenized": {"OK"},
    "cancelled": {"OK", "CANCELLED"},
    "cancelled in time": {"OK", "CANCELLED"},
    "closed": {"OK", "CANCELLED"},
    "deadline": {"OK", "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED DEADLINE_TOO_SHORT"},
    "wrong": {"INVALID_ARGUMENT INVALID_FIELD"},
    "huge": {
        "INVALID_ARGUMENT INVALID_FIELD",
        "INVALID_ARGUMENT CONTEXT_TOO_LONG",
        "OK",
        "RESOURCE_EXHAUSTED",
    },
    "long header": {"OK", "RESOURCE_EXHAUSTED"},
}
"""What each kind of request may end with: status, and reason where there is one."""

WHILE_IT_STOPS = {
    "UNAVAILABLE",
    "UNAVAILABLE SERVER_DRAINING",
    "CANCELLED",  # by a stopping server's transport, before anybody looked at it: docs/errors.md
}


@asynccontextmanager
async def load(server: Server, seed: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yields a client that has begun, and waits for its end."""
    command, environment = await asyncio.to_thread(javascript)
    process = await asyncio.create_subprocess_exec(
        *command,
        *(str(SCRIPT), server.target, str(PROTOS), str(SECONDS), str(seed)),
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def told(process: asyncio.subprocess.Process) -> Any:
    output, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(output)


def assert_ends(counts: dict[str, int], others: set[str]) -> None:
    """Asserts that each kind has ended as it may."""
    for name in counts:
        kind = max((kind for kind in ENDS if name.startswith(f"{kind} ")), key=len)
        assert name.removeprefix(f"{kind} ") in ENDS[kind] | others, name


@pytest.fixture
async def server(start_server: ServerFactory) -> Server:
    return await start_server(FakeEngine(step_s=0.001), drain_timeout_s=0.5)


async def test_every_stream_is_whole_or_ends_as_it_should_and_nothing_stays(
    server: Server, eventually: Eventually
) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    async with load(server, seed) as client:
        found = await told(client)
    assert found["faults"] == []
    assert_ends(found["counts"], set())
    assert found["counts"]["whole OK"] > 0
    await eventually(lambda: server.loop.metrics.statistics().n_running == 0)
    statistics = server.loop.metrics.statistics()
    assert (statistics.n_waiting, statistics.front.n_held_bytes) == (0, 0)


async def test_a_server_that_stops_meanwhile_leaves_no_stream_without_an_end(
    server: Server,
) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    async with load(server, seed) as client:
        await asyncio.sleep(SECONDS / 2)
        await server.shutdown()
        found = await told(client)
    assert found["faults"] == []
    assert_ends(found["counts"], WHILE_IT_STOPS)
    assert any("UNAVAILABLE" in name for name in found["counts"])


async def printed(server: Server, path: Path, changes: dict[str, str]) -> str:
    """Runs the page's program with changes, and returns what it has printed."""
    (program,) = re.findall(r"```js\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    changes |= {'["protos"]': json.dumps([str(PROTOS)]), "127.0.0.1:50051": server.target}
    for words, others in changes.items():
        assert words in program
        program = program.replace(words, others)
    await asyncio.to_thread(path.write_text, program, "utf-8")
    command, environment = await asyncio.to_thread(javascript)
    process = await asyncio.create_subprocess_exec(
        *command, str(path), stdout=asyncio.subprocess.PIPE, env=environment
    )
    try:
        async with asyncio.timeout(ENDS_WITHIN_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    return output.decode()


async def test_the_program_of_the_page_runs(server: Server, tmp_path: Path) -> None:
    assert "FINISH_REASON_LENGTH" in await printed(server, tmp_path / "program.js", {})
    assert server.loop.metrics.statistics().n_requests == {"length": 1}


@pytest.mark.parametrize("leave", ["break;", "throw new Error();"])
async def test_who_leaves_the_loop_of_the_page_ends_the_call(
    start_server: ServerFactory, eventually: Eventually, tmp_path: Path, leave: str
) -> None:
    """Without what the page does in `finally` it ran, and was billed, to its end."""
    server = await start_server(FakeEngine(step_s=0.02))
    changes = {
        "max_output_tokens: 40": "max_output_tokens: 900",
        "    for await (const message of stream) {": f"    for await (const _ of stream) {leave}\n"
        "    for (const message of []) {",
        "main().finally": "main().catch(() => {}).finally",
    }
    await printed(server, tmp_path / "program.js", changes)
    statistics = server.loop.metrics.statistics
    await eventually(lambda: statistics().n_requests == {"cancelled": 1})
