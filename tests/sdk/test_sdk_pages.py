"""Programs of the documentation's pages run as they are printed."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import ServerFactory

DOCS = Path(__file__).resolve().parents[2] / "docs"


def programs(page: str) -> list[str]:
    """Returns the Python programs of a page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


async def run(program: str) -> str:
    """Runs a program in a process of its own, and returns what it has printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_the_first_program_of_the_sdk_runs(start_server: ServerFactory) -> None:
    """Its key was no ASCII, which no header can carry."""
    server = await start_server()
    program = programs("python_sdk.md")[0]
    assert "length Usage(prompt_tokens=" in await run(
        program.replace("127.0.0.1:50051", server.target)
    )


async def test_the_program_for_asyncio_runs(start_server: ServerFactory) -> None:
    server = await start_server()
    body = programs("python_sdk.md")[1].replace("127.0.0.1:50051", server.target)
    lines = ["import asyncio, drafthouse", "async def main():"]
    lines += [f"    {line}" for line in [*body.splitlines(), "print(result.finish_reason)"]]
    assert (await run("\n".join([*lines, "asyncio.run(main())"]))).endswith("length\n")


async def test_the_program_for_routers_finds_what_a_server_has_computed(
    start_server: ServerFactory, free_port: int
) -> None:
    """Its loop had no end, so that nothing after it ran."""
    server = await start_server(admin_port=free_port)
    (program,) = programs("prefix_cache.md")
    prompt = "def parse(" * 5
    changes = {
        "127.0.0.1:50052": f"127.0.0.1:{free_port}",
        "127.0.0.1:50051": server.target,
        '"def parse("': repr(prompt),
        "    token_ids = ": f"    client.generate({prompt!r}, max_output_tokens=1).result()\n"
        "    token_ids = ",
        "    print(n_computed": '    while not n_computed(token_ids, "default"):\n'
        "        time.sleep(0.01)  # until the thread has been told\n    print(n_computed",
    }
    for printed, tried in changes.items():
        assert printed in program
        program = program.replace(printed, tried)
    assert await run(program) == "48\n"
