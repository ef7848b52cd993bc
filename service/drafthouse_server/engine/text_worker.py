"""The program of a text worker: a process that has nothing to lose reads what clients send.

Tokenising, chat templates, grammars and DRY breakers run code of llama.cpp over bytes that anybody
may send, and a chat template is itself a program that a model's file brings. So they run here, with
the vocabulary of the model and no weights, no keys, no connection but to the server, bounds of
memory and processor time, and less of the processor than the server. When this process ends, one
request fails, and another process takes its place (`text_process` starts it, `serving` asks it).

Run: `python -m drafthouse_server.engine.text_worker FD`; FD is a stream socket. Every message on it
is its length in 4 bytes, and so many bytes. The first one tells which model; all others are jobs
(`text_jobs`), each of which is answered.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import signal
import socket
import sys
import time

import drafthouse_engine
from drafthouse_server.engine.llama_text import LlamaText
from drafthouse_server.engine.text_jobs import TextAnswer, perform, read_job, write_answer
from drafthouse_server.errors import FieldViolation
from drafthouse_server.host.sandbox import bound_memory, drop_rights, limit_time

__all__: list[str] = []

_N_LENGTH = 4
_NICE = 10
"""What is added to the server's own niceness."""
_TEMPLATE_S = 10.0
"""Processor time that opening a chat template may take, seconds: others take milliseconds."""
_ENDLESS = (
    f"the model's chat template has ended it, or ran for {_TEMPLATE_S:.0f} s; use another file\n"
)


class _Channel:
    """Messages with their length before them."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)

    def receive(self) -> bytes:
        """Returns the next message.

        Raises:
            EOFError: there is none, and none will come.
        """
        n = int.from_bytes(self._exactly(_N_LENGTH), sys.byteorder)
        return bytes(self._exactly(n))

    def _exactly(self, n: int) -> bytearray:
        content = bytearray(n)
        left = memoryview(content)
        while left:
            n_got = self._socket.recv_into(left)
            if not n_got:
                raise EOFError
            left = left[n_got:]
        return content

    def send(self, content: bytes) -> None:
        """Sends a message."""
        self._socket.sendall(len(content).to_bytes(_N_LENGTH, sys.byteorder) + content)


def _answer(content: bytes, model: LlamaText, memory_bytes: int) -> TextAnswer:
    """Returns the answer to a job."""
    # Of the only thread: the process's own clock goes by ticks while its time is limited.
    started = time.thread_time()
    job, cpu_s = read_job(content)
    limit_time(cpu_s)
    try:
        answer = perform(job, model)
    except (MemoryError, drafthouse_engine.OutOfMemory):
        answer = TextAnswer(is_last=True)
    if answer.is_last:
        problem = f"could not be read within {memory_bytes >> 20} MiB of memory"
        answer = TextAnswer(problems=(FieldViolation(job.path, problem),), is_last=True)
    return dataclasses.replace(answer, cpu_s=time.thread_time() - started)


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end of the channel ends this process
    logging.disable()  # what matters is in the answers
    channel = _Channel(int(sys.argv[1]))
    try:
        setup = json.loads(channel.receive())
        os.nice(_NICE)
        told: dict[str, str | int] = {}

        def bound() -> None:
            gc.freeze()
            bound_memory(setup["memory_bytes"])
            sys.stderr.write(_ENDLESS)  # the last words, where it comes to no end
            sys.stderr.flush()
            told["not_dropped"] = drop_rights()
            limit_time(_TEMPLATE_S)

        try:
            model = LlamaText.open(setup["model"], bound, setup["chat_template_kwargs"])
            told["chat_problem"] = model.chat_problem()
        except drafthouse_engine.EngineError as error:
            channel.send(json.dumps({"failed": error.message}).encode())
            return
        limit_time(0)
        told["n_vocab"] = model.n_vocab
        channel.send(json.dumps(told).encode())
        while True:
            answer = _answer(channel.receive(), model, setup["memory_bytes"])
            channel.send(write_answer(answer))
            limit_time(0)
            if answer.is_last:
                return
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    _main()
