"""The process in which a chat template runs; `chat_process.py` starts it.

It reads a template and then chats, each a JSON object in one message of the channel whose file
descriptor is its first argument, and answers each chat with a text or an error. The second argument
is the processor time, in seconds, that a chat may take.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from drafthouse_engine import errors
from drafthouse_engine._spec import ChatTemplate
from drafthouse_engine.chat_process import MEMORY_BYTES

__all__: list[str] = []


def _bound_memory() -> None:
    """Allows `MEMORY_BYTES` more than now, where the system says how much that is."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            n_pages = int(file.read().split()[0])
    except OSError:
        return  # another system: the bound of time stays
    most = n_pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _bound_time(seconds: int) -> None:
    """Allows so much processor time from now on; the system ends the process after that."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _failure(error: Exception) -> dict[str, str]:
    message = str(error)
    if isinstance(error, (MemoryError, errors.OutOfMemory)) or "std::bad_alloc" in message:
        return {
            "error": "BadTemplate",
            "message": f"the chat template used more than {MEMORY_BYTES >> 20} MiB",
        }
    return {"error": type(error).__name__, "message": message}


def _open(template: dict[str, Any]) -> ChatTemplate | dict[str, str]:
    try:
        return ChatTemplate(**template)
    except (errors.EngineError, MemoryError) as error:
        return _failure(error)


def _reply(template: ChatTemplate | dict[str, str], request: dict[str, Any]) -> dict[str, str]:
    if isinstance(template, dict):
        return template
    try:
        return {"text": template.format(**request)}
    except (errors.EngineError, MemoryError, TypeError) as error:
        return _failure(error)


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end of the channel ends this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable()  # what matters is in the errors
    cpu_seconds = int(sys.argv[2])
    channel: Connection[Any, Any] = Connection(int(sys.argv[1]))
    try:
        source = json.loads(channel.recv_bytes())
        _bound_memory()
        _bound_time(cpu_seconds)
        template = _open(source)
        while True:
            request = json.loads(channel.recv_bytes())
            _bound_time(cpu_seconds)
            channel.send_bytes(json.dumps(_reply(template, request)).encode())
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    _main()
