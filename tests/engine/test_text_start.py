"""A text worker that cannot start for want of descriptors is tried again, as for any reason."""

from __future__ import annotations

import errno
import os
from typing import IO

import pytest

from drafthouse_server.engine import text_process
from drafthouse_server.engine.text_process import TextProcess
from drafthouse_server.errors import StartupError


async def test_a_worker_without_a_descriptor_for_its_words_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool, which waits for a StartupError, started no other: its tenant waited for ever."""

    def refuse() -> IO[bytes]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(text_process, "_output", refuse)
    with pytest.raises(StartupError, match=r"cannot be started: .*Too many open files"):
        await TextProcess("model.gguf").start()
