"""What becomes of a llama-server that does not start: it is left out, and it does not go on.

The server is a fake.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pytest
from tests.archs import peer as peer_module
from tests.archs.driver import N_CTX
from tests.archs.peer import Peer, PeerFailed, Roundings, Setting
from tests.support.built import needs_extension

pytestmark = needs_extension()


def test_a_way_in_which_llama_server_does_not_start_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[str, ...]] = []

    class FakePeer:
        def __init__(self, _program: Path, _model: Path, setting: Setting) -> None:
            assert setting.n_ctx == N_CTX
            self._flags = setting.flags

        def __enter__(self) -> Self:
            started.append(self._flags)
            if "-fa" in self._flags:
                raise PeerFailed("llama-server ends with code 1")
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def ask(self, prompt: Sequence[int]) -> list[int]:
            return list(prompt)

        def replay(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
            return [list(prompt) for prompt in prompts]

    monkeypatch.setattr(peer_module, "Peer", FakePeer)
    with Roundings(Path("llama-server"), Path("model.gguf")) as ways:
        for _ in range(2):
            found = dict(ways.answers([[1, 2]]))
            assert found == {"with its prefix cache": [[1, 2]], "with -ub 16": [[1, 2]]}
    assert len(started) == len(Roundings.WAYS)  # once each


def test_a_llama_server_that_never_serves_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\nexec sleep 1000\n", "utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(peer_module, "_START_S", 0.2)
    peer = Peer(program, tmp_path / "model.gguf")
    with pytest.raises(PeerFailed, match="does not serve"):
        peer.__enter__()
    assert peer._process is not None
    assert peer._process.poll() is not None
