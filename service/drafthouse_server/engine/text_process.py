"""A text worker as the server sees it: a process that answers jobs, one at a time.

The program is `text_worker`; what it may cost and when it has ended is watched from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from drafthouse_server.engine.protocol import TextWorkerLost
from drafthouse_server.engine.text_jobs import TextAnswer, TextJob, read_answer, write_job
from drafthouse_server.errors import StartupError

__all__ = ["MEMORY_BYTES", "ModelFile", "TextProcess", "environment"]

MEMORY_BYTES = 512 << 20
"""Most memory that a job may take beyond what the process has after its start."""

_N_LENGTH = 4
_N_ANSWER_BYTES_MAX = 256 << 20
"""Longest answer: ids of the longest message, and to spare."""

_N_SOCKET_BYTES = 1 << 20
_START_S = 120.0
"""Longest start of a process: far more than a vocabulary takes, for machines with too much to do.
"""
_REAP_S = 0.002
_DESCRIPTORS = "/proc/self/fd"

_KEPT = ("LANG", "LC_ALL", "LC_CTYPE", "PATH", "LD_LIBRARY_PATH", "TMPDIR", "OMP_WAIT_POLICY")
"""Variables that a worker is given; no other one, since settings and keys are among them."""

_OVERRUN = (signal.SIGPROF, signal.SIGXCPU)
_CRASHES = (
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGTRAP,
    signal.SIGSYS,
)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a worker, out of the server's.

    Args:
        variables: The server's.
    """
    kept = {name: variables[name] for name in _KEPT if name in variables}
    return kept | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        # A vocabulary has no use for an accelerator, and a context on one takes memory there.
        "CUDA_VISIBLE_DEVICES": "",
    }


class ModelFile:
    """A model's file as it was before it was loaded, whatever its path names later.

    A worker that starts when another model lies there would read texts in that one's tokens.

    Args:
        path: The file; of a model in several, the first.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp = _stamp(path)
        # A pipe is opened without waiting for whoever writes into it.
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    @property
    def is_as_it_was(self) -> bool:
        """Whether its path names this file, which nobody has written to since."""
        try:
            return _stamp(self._path) == self._stamp
        except OSError:
            return False

    def names(self, *, is_split: bool) -> tuple[str, list[int]]:
        """Returns the name by which a child opens it, and the descriptors that are needed for that.

        Args:
            is_split: Whether the model has several files, which are found by the name of the first.

        Raises:
            StartupError: the others would be found beside another first one.
        """
        if not is_split and os.path.isdir(_DESCRIPTORS):  # /proc may not be mounted
            return f"{_DESCRIPTORS}/{self._fd}", [self._fd]
        if self.is_as_it_was:
            return self._path, []
        raise StartupError(
            f"{self._path} is not the file any more that is served; bring that back, or start the"
            " server again"
        )

    def close(self) -> None:
        """Closes it. Harmless when done twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _stamp(path: str) -> tuple[int, ...]:
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class TextProcess(asyncio.Protocol):
    """Implements `TextWorker` with a process of its own.

    Args:
        model: Path of the model.
        memory_bytes: Most memory that a job may take beyond what the process has after its start.
        descriptors: Those that its process inherits, since the path names one.
        chat_template_kwargs: Arguments of the chat template where a chat does not set them, a JSON
            object; empty is none.

    Thread:
        Event loop only.
    """

    def __init__(
        self,
        model: str,
        *,
        memory_bytes: int = MEMORY_BYTES,
        descriptors: Sequence[int] = (),
        chat_template_kwargs: str = "",
    ) -> None:
        self._setup = {
            "model": model,
            "memory_bytes": memory_bytes,
            "chat_template_kwargs": chat_template_kwargs,
        }
        self._descriptors = descriptors
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._awaited: asyncio.Future[bytes] | None = None
        self._answer: asyncio.Future[TextAnswer] | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[str] | None = None
        self._is_late = False
        self._n_vocab = 0
        self.not_dropped = ""
        """Rights that it could not be deprived of, in a few words; empty when there are none."""
        self.chat_problem = ""
        """Why a chat of one user's message is refused; empty where no template does so."""

    @property
    def pid(self) -> int:
        """Id of the worker's process."""
        assert self._process is not None, "it has not started"
        return self._process.pid

    async def start(self) -> None:
        """Starts the process and waits until it can work.

        Raises:
            StartupError: it cannot be started, or has ended; says why.
        """
        async with contextlib.AsyncExitStack() as undo:
            output: IO[bytes] | None = None
            try:
                output = undo.enter_context(_output())
                await self._open(undo, output)
            except (OSError, ValueError) as error:  # a TimeoutError is an OSError
                words = (_last_words(output) if output is not None else "") or error
                raise StartupError(f"a text worker cannot be started: {words}") from error
            undo.pop_all()
        if output is not None:
            output.close()

    async def _open(self, undo: contextlib.AsyncExitStack, output: IO[bytes]) -> None:
        """Starts the process; what is to be undone when that fails is noted."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            undo.callback(ours.close)
            undo.push_async_callback(self.end)
            ours.setblocking(False)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _N_SOCKET_BYTES)
            self._process = _spawn(theirs, output, self._descriptors)
        # From here on the process alone has its end: when it ends, the channel does.
        self._ended = loop.create_future()
        self._awaited = loop.create_future()
        await loop.create_connection(lambda: self, sock=ours)
        self._send(json.dumps(self._setup).encode())
        async with asyncio.timeout(_START_S):
            told = json.loads(await self._awaited)
        if "failed" in told:
            raise StartupError(f"a text worker cannot read the vocabulary: {told['failed']}")
        self.not_dropped = told["not_dropped"]
        self.chat_problem = told["chat_problem"]
        self._n_vocab = int(told["n_vocab"])

    def ask(self, job: TextJob, cpu_s: float) -> asyncio.Future[TextAnswer]:
        """Gives it a job. See `TextWorker.ask`."""
        assert self._answer is None, "it does one job at a time"
        content = write_job(job, cpu_s)
        self._answer = answer = asyncio.get_running_loop().create_future()
        self._send(content)
        if self._ended is not None and self._ended.done():
            self._lose(self._ended.result())
        return answer

    def kill(self, *, is_late: bool = False) -> None:
        """Ends it now; a job that it does is lost. See `TextWorker.kill`."""
        self._is_late |= is_late
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def end(self) -> None:
        """Ends it and gives back all that it had. Harmless when done twice."""
        self.kill()
        if self._transport is not None:
            self._transport.abort()
        if self._process is not None:
            self._reap_once()
            await self.wait()

    async def wait(self) -> None:
        """Returns when it has ended, by itself or killed."""
        assert self._ended is not None, "it has not started"
        await asyncio.shield(self._ended)

    def _reap_once(self) -> None:
        if self._reaping is None:
            self._reaping = asyncio.get_running_loop().create_task(self._reap())

    async def _reap(self) -> None:
        """Waits for the process, which has been killed or has closed its channel."""
        assert self._process is not None
        assert self._ended is not None
        while (code := self._process.poll()) is None:  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(_REAP_S)
        cause = TextWorkerLost.ENDED
        if self._is_late or -code in _OVERRUN:
            cause = TextWorkerLost.LATE
        elif -code in _CRASHES:
            cause = TextWorkerLost.CRASHED
        self._ended.set_result(cause)
        if self._answer is not None:
            self._lose(cause)

    def _lose(self, cause: str) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(TextWorkerLost(cause))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with a piece of what the process has sent."""
        received = self._received
        received += data
        if len(received) < _N_LENGTH:
            return
        n = int.from_bytes(received[:_N_LENGTH], sys.byteorder)
        if n > _N_ANSWER_BYTES_MAX:
            self.kill()
        elif len(received) >= _N_LENGTH + n:
            content = bytes(memoryview(received)[_N_LENGTH : _N_LENGTH + n])
            self._received = bytearray()
            self._take(content)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the process has closed the channel: it has ended, or has to."""
        self.kill()  # of no effect on one that dies of a signal, nor on how it ended
        self._reap_once()
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(ConnectionError("it has ended"))

    def _send(self, content: bytes) -> None:
        assert self._transport is not None
        self._transport.write(len(content).to_bytes(_N_LENGTH, sys.byteorder) + content)

    def _take(self, content: bytes) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(content)
            return
        answer, self._answer = self._answer, None
        if answer is None:
            self.kill()  # it speaks without being asked
            return
        try:
            answer.set_result(read_answer(content, self._n_vocab))
        except ValueError:
            self._answer = answer
            self.kill()


def _output() -> IO[bytes]:
    """Returns a file, in memory, for what a worker prints before it has no rights any more."""
    return os.fdopen(os.memfd_create("text-worker", os.MFD_CLOEXEC), "w+b", buffering=0)


def _last_words(output: IO[bytes]) -> str:
    """Returns the last line of what a worker has printed."""
    output.seek(0)
    lines = output.read()[-2000:].decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""


def _spawn(
    channel: socket.socket, output: IO[bytes], descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603  # our own interpreter and module
        [
            *(sys.executable or "python3", "-P", "-m", "drafthouse_server.engine.text_worker"),
            str(channel.fileno()),
        ],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment(os.environ),
        pass_fds=[channel.fileno(), *descriptors],
        start_new_session=True,  # a Ctrl-C in the server's terminal is the server's alone
    )
