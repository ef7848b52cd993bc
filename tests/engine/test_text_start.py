"""A text worker that cannot start for want of descriptors is tried again, as for any reason."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO

import pytest
from tests.support.built import needs_extension
from tests.support.gguf_copy import copied

from drafthouse_server.engine import text_process
from drafthouse_server.engine.text_jobs import TextJob
from drafthouse_server.engine.text_process import TextProcess
from drafthouse_server.errors import StartupError

DENSE = Path(__file__).resolve().parents[2] / "models" / "tiny-mimo2-f16.gguf"


async def test_a_worker_without_a_descriptor_for_its_words_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool, which waits for a StartupError, started no other: its tenant waited for ever."""

    def refuse() -> IO[bytes]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(text_process, "_output", refuse)
    with pytest.raises(StartupError, match=r"cannot be started: .*Too many open files"):
        await TextProcess("model.gguf").start()


ENDLESS = "{% for i in range(1000000000) %}x{% endfor %}"
DOUBLING = (
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template", [pytest.param(it, marks=needs_extension()) for it in (ENDLESS, DOUBLING)]
)
async def test_a_template_has_bounds_when_it_is_opened_too(template: str, tmp_path: Path) -> None:
    """It took all memory of the machine, and all rights of the server's user."""
    values = {"tokenizer.chat_template": template}
    process = TextProcess(
        str(copied(DENSE, tmp_path / "model.gguf", values)), memory_bytes=64 << 20
    )
    refusal = ""
    try:
        await process.start()
    except StartupError as error:
        refusal = str(error)
    if refusal:  # where it ends the worker; else the server goes on without chats
        assert "chat template" in refusal
    else:
        job = TextJob(messages=[("user", "hi")])
        (problem,) = (await process.ask(job, 5.0)).problems
        assert problem.field == "messages"
    await process.end()
