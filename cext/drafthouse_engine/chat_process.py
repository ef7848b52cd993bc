"""Chats in a model's format, formatted by a process of its own.

A chat template is a program that a model's file brings. llama.cpp's interpreter runs it without a
bound of time, depth or memory, and divides by what it is told to: a hostile template would end the
process that runs it, or keep a core for ever. So the process that runs it (`chat_worker.py`) has
nothing to lose, and bounds: when it ends, this chat fails, and the next one starts another.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any, Final

from drafthouse_engine import errors

__all__ = ["ChatProcess"]

MEMORY_BYTES: Final = 512 << 20
"""Most memory that formatting may take beyond what the process has at its start."""

TEXT_BYTES_MAX: Final = 64 << 20
"""Longest reply, in JSON."""

_WAIT_SECONDS: Final = 60
"""Longest wait for one chat: far more than its processor time, for machines with too much to do."""

_KEPT: Final = (
    *("LANG", "LC_ALL", "LC_CTYPE", "PATH", "LD_LIBRARY_PATH", "TMPDIR"),
    *("LD_PRELOAD", "ASAN_OPTIONS", "UBSAN_OPTIONS"),  # of sanitizers
)
"""Variables that the process is given; no other, since keys may be among them."""

_FAILURES: Final = {
    "BadTemplate": errors.BadTemplate,
    "InvalidArgument": errors.InvalidArgument,
    "TypeError": TypeError,
}
"""What the worker may raise here."""


class _Child:
    """A running worker."""

    def __init__(self, template: dict[str, Any], cpu_seconds: int) -> None:
        ours, theirs = Pipe()
        self.channel: Connection = ours
        self.output = _output()
        try:
            self.process = _spawn(theirs, self.output, cpu_seconds)
        except OSError as error:
            ours.close()
            self.output.close()
            raise errors.InternalError(
                f"the process that formats chats cannot be started: {error}; "
                f"sys.executable is {sys.executable!r}, which must be a Python interpreter"
            ) from error
        finally:
            theirs.close()
        with contextlib.suppress(OSError):  # the first chat will find it ended
            self.send(template)

    def send(self, message: dict[str, Any]) -> None:
        self.channel.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, str]:
        """Returns the reply.

        Raises:
            EOFError: the process ended.
            TimeoutError: there was none in time.
            OSError: it is longer than `TEXT_BYTES_MAX`.
        """
        if not self.channel.poll(_WAIT_SECONDS):
            raise TimeoutError
        reply: dict[str, str] = json.loads(self.channel.recv_bytes(TEXT_BYTES_MAX))
        return reply

    def wait(self) -> int:
        """Returns the exit code of a process that ends, negative for a signal."""
        try:
            return self.process.wait(_WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            return 0  # it closed the channel and lives

    def end(self) -> None:
        """Ends the process, if it still runs."""
        self.process.kill()
        self.process.wait()
        self.channel.close()
        self.output.close()

    def last_words(self) -> str:
        """Returns the end of what the process printed."""
        self.output.seek(0)
        return self.output.read()[-2000:].decode("utf-8", "replace").strip()


def _output() -> IO[bytes]:
    """Returns a file for what a child prints; nothing is kept where no file may be written."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return open(os.devnull, "r+b")


def _spawn(channel: Connection, output: IO[bytes], cpu_seconds: int) -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment["OPENBLAS_NUM_THREADS"] = environment["OMP_NUM_THREADS"] = "1"
    return subprocess.Popen(  # noqa: S603  # our own interpreter and module
        [
            *(sys.executable or "python3", "-P", "-m", "drafthouse_engine.chat_worker"),
            *(str(channel.fileno()), str(cpu_seconds)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        pass_fds=[channel.fileno()],
    )


def _too_long(what: str) -> errors.BadTemplate:
    return errors.BadTemplate(f"the chat template {what}")


class ChatProcess:
    """Formats chats by one template, in a process of its own.

    It starts with the first chat, or with `start`, and ends with `close`, with the last reference,
    or with this process. One chat may take 512 MiB.

    Args:
        source: the template (Jinja).
        bos: spelling of the token at the beginning; empty when there is none.
        eos: spelling of the token at the end.
        add_bos: the tokenizer adds the token, so it is taken away from a chat's beginning.
        add_eos: likewise at the end.
        cpu_seconds: most processor time of one chat, [1, 3600]; templates take milliseconds.

    Raises:
        InvalidArgument: `cpu_seconds` is out of range.

    Thread:
        Any; chats wait for each other.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str = "",
        eos: str = "",
        add_bos: bool = False,
        add_eos: bool = False,
        cpu_seconds: int = 5,
    ) -> None:
        if not 1 <= cpu_seconds <= 3600:
            raise errors.InvalidArgument(f"cpu_seconds is {cpu_seconds}, not in [1, 3600]")
        self._template = {
            "source": source,
            "bos": bos,
            "eos": eos,
            "add_bos": bool(add_bos),
            "add_eos": bool(add_eos),
        }
        self._cpu_seconds = int(cpu_seconds)
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._finalizer: weakref.finalize[[], ChatProcess] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process; None while there is none."""
        child = self._child
        return None if child is None else child.process.pid

    def start(self) -> None:
        """Starts the process and returns at once, so that the first chat need not wait.

        Raises:
            Closed: `close` was called.
            InternalError: it cannot be started.
        """
        with self._lock:
            self._running()

    def format(
        self, messages: Iterable[tuple[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns messages in the template's format.

        Args:
            messages: pairs of role and content.
            add_generation_prompt: end with what makes the model answer.

        Raises:
            InvalidArgument: there are no messages, or a text has a NUL or a lone surrogate.
            BadTemplate: the template failed on these messages, used up its time or memory, or ended
                its process.
            Closed: `close` was called.
            InternalError: the process cannot be started, or something else ended it.
        """
        pairs = list(messages)
        request = {
            "roles": [role for role, _ in pairs],
            "contents": [content for _, content in pairs],
            "add_generation_prompt": bool(add_generation_prompt),
        }
        with self._lock:
            reply = self._ask(request)
        if "text" in reply:
            return reply["text"]
        raise _FAILURES.get(reply["error"], errors.InternalError)(reply["message"])

    def close(self) -> None:
        """Ends the process; a chat that waits for it raises `Closed`. Harmless when done twice."""
        self._is_closed = True
        child = self._child
        if child is not None:
            child.process.kill()  # so that the lock is given back
        with self._lock:
            self._forget()

    def _running(self) -> _Child:
        if self._is_closed:
            raise errors.Closed("the chat process is closed")
        child = self._child
        if child is not None and child.process.poll() is None:
            return child
        self._forget()
        self._child = child = _Child(self._template, self._cpu_seconds)
        self._finalizer = weakref.finalize(self, child.end)
        return child

    def _forget(self) -> None:
        if self._finalizer is not None:
            self._finalizer()  # ends the child, once
        self._child = self._finalizer = None

    def _ask(self, request: dict[str, Any]) -> dict[str, str]:
        child = self._running()
        failure: errors.EngineError
        try:
            child.send(request)
            return child.receive()
        except TimeoutError:
            failure = _too_long(f"took more than {_WAIT_SECONDS} s")
        except (EOFError, ConnectionError):
            failure = self._why(child)
        except OSError:
            failure = _too_long(f"gives more than {TEXT_BYTES_MAX >> 20} MiB")
        except BaseException:  # such as Ctrl-C: what it still answers is no reply to the next chat
            self._forget()
            raise
        self._forget()
        raise failure

    def _why(self, child: _Child) -> errors.EngineError:
        """Returns why a child ended by itself."""
        if self._is_closed:
            return errors.Closed("the chat process was closed")
        code = child.wait()
        if code >= 0 or code == -signal.SIGKILL:
            return errors.InternalError(
                f"the process that formats chats ended with code {code}, not by its template; "
                f"it printed: {child.last_words() or 'nothing'}"
            )
        if code == -signal.SIGXCPU:
            return _too_long(f"took more than {self._cpu_seconds} s")
        name = signal.Signals(-code).name
        return errors.BadTemplate(
            f"the chat template ended the process that ran it ({name}): it recurses without end, "
            "or breaks its interpreter"
        )
