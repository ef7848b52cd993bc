"""The contenders of a benchmark, each a process of its own: the server and the bare step loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from drafthouse_bench.load import Load
from drafthouse_server.cli.serve import LISTENS_AT
from drafthouse_server.cli.settings import flags_of
from drafthouse_server.config import Config

__all__ = [
    "BareResult",
    "BenchError",
    "ServerProcess",
    "bare_flags",
    "busy_processes",
    "cpu_s",
    "end_process",
    "last_line",
    "parse_bare",
    "run_bare",
    "server_flags",
]

_STARTUP_S = 120.0
_END_S = 20.0
_BARE_S = 600.0


class BenchError(Exception):
    """Keeps a benchmark from going on. Its text is one sentence."""


@dataclass(frozen=True, slots=True)
class BareResult:
    """What the bare step loop did: `spec_engine_step` in C, in a process of its own."""

    n_output: int
    """Tokens generated."""
    n_drafted: int
    """Draft tokens verified."""
    n_accepted: int
    """Draft tokens accepted."""
    elapsed_s: float
    """From its first step to its last; loading is not in it."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all streams."""
        return self.n_output / self.elapsed_s if self.elapsed_s else 0.0


class ServerProcess:
    """`drafthouse serve` with given settings, on a free port of loopback.

    Args:
        config: Its settings; the port is ignored.
        flags: More flags of `drafthouse serve`; they win.
        timeline: A file for what the server notes of each request (`drafthouse-bench timeline`);
            None: it notes nothing.
    """

    def __init__(
        self, config: Config, flags: Sequence[str] = (), timeline: Path | None = None
    ) -> None:
        self._config = config
        self._flags = flags
        self._timeline = timeline
        self._process: asyncio.subprocess.Process | None = None
        self.target = ""
        """Address, "host:port"."""
        self.start_lines: list[str] = []
        """What it said of itself before that."""

    @property
    def pid(self) -> int:
        """Id of the process."""
        assert self._process is not None, "not started"
        return self._process.pid

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[ServerProcess]:
        """Runs the server for the time of a block.

        Raises:
            BenchError: it does not start.
        """
        with tempfile.TemporaryFile() as log:
            self._process = await _start(self._config, self._flags, log, self._timeline)
            try:
                self.target = await self._address(log)
                yield self
            finally:
                await end_process(self._process)

    async def _address(self, log: IO[bytes]) -> str:
        """Waits until the server tells where it listens."""
        assert self._process is not None, "not started"
        assert self._process.stdout is not None, "it is a pipe"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STARTUP_S):
                async for line in self._process.stdout:
                    if line.startswith(LISTENS_AT.encode()):
                        return line.decode().removeprefix(LISTENS_AT).strip()
                    self.start_lines.append(line.decode(errors="replace").rstrip())
        raise BenchError(f"the server does not start: {last_line(log)}")


async def _start(
    config: Config, flags: Sequence[str], log: IO[bytes], timeline: Path | None
) -> asyncio.subprocess.Process:
    # Settings of the environment would reach one contender only.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTHOUSE_")}
    program = ["drafthouse_server"]
    if timeline is not None:
        program = ["drafthouse_bench", "timeline", str(timeline)]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *program,
        "serve",
        *server_flags(config),
        *flags,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        env=environment,
    )


def server_flags(config: Config) -> list[str]:
    """Returns the flags of `drafthouse serve` for settings that are not the default."""
    return flags_of(dataclasses.replace(config, port=0))


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Ends a server, by force where it takes 20 s and more."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def last_line(log: IO[bytes]) -> str:
    """Returns the last line that a server has written to its log."""
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it says nothing"


def cpu_s(pid: int) -> float | None:
    """Returns the CPU time that a process has used, in seconds; None where /proc is missing."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except OSError:
        return None
    # The name, in parentheses, may contain anything; user and system time are fields 14 and 15.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def busy_processes(n: int) -> Iterator[list[int]]:
    """Has processes compute meanwhile, a core's worth each, as on a machine that is shared.

    Args:
        n: How many.

    Yields:
        Their ids.
    """
    # They end with this process, however it ends.
    loop = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(10**5))"
    processes = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(n)]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def run_bare(program: Path, config: Config, load: Load) -> BareResult:
    """Puts a load on the bare step loop, with the settings of the server.

    Args:
        program: `step_bench`, as `make build` makes it.
        config: Settings; it runs `parallel` streams.
        load: What to send.

    Raises:
        BenchError: it fails.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".tokens") as file:
        file.writelines(" ".join(map(str, prompt)) + "\n" for prompt in load.prompts)
        file.flush()
        process = await asyncio.create_subprocess_exec(
            str(program),
            *bare_flags(config, load, file.name),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), _BARE_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines() or ["it says nothing"]
        raise BenchError(f"the bare step loop failed: {lines[-1]}")
    return parse_bare(out)


def bare_flags(config: Config, load: Load, prompts: str) -> list[str]:
    """Returns the flags of `step_bench` for a load.

    Args:
        config: Settings of the server.
        load: What to send.
        prompts: Path of a file with the load's prompts.
    """
    flags = {
        "model": config.model,
        "draft-type": config.draft_type,
        "draft-model": config.model_draft,
        "prompts": prompts,
        "n-seq": config.parallel,
        "n-draft": config.draft_default,
        "n-gen": load.n_output,
        "n-requests": len(load.prompts),
        "n-ctx-seq": config.max_model_len,
        "n-batch": config.batch_size,
        "n-ubatch": config.ubatch_size,
        "threads": config.threads,
        "ignore-eos": 1,
        "kv-unified": int(config.kv_unified),
    }
    given = {name: value for name, value in flags.items() if value != ""}
    return [text for name, value in given.items() for text in (f"--{name}", str(value))]


def parse_bare(out: bytes) -> BareResult:
    """Returns the result of the bare step loop, the last line of its output.

    Raises:
        BenchError: it cannot be read.
    """
    try:
        counts = json.loads(out.splitlines()[-1])
        return BareResult(
            n_output=int(counts["tokens"]),
            n_drafted=int(counts["n_drafted"]),
            n_accepted=int(counts["n_accepted"]),
            elapsed_s=float(counts["seconds"]),
        )
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise BenchError(f"the bare step loop's result cannot be read: {out[:200]!r}") from error
