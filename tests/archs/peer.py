"""llama-server of the pinned source, without our patches: what it answers to the same prompts."""

from __future__ import annotations

import dataclasses
import http.client
import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Self

from tests.archs.cells import N_UBATCH_SMALL
from tests.archs.driver import N_CTX, N_CTX_LONG, N_OUTPUT
from tests.support.ports import free_port

__all__ = [
    "FULL_WINDOWS",
    "SMALL_WINDOWS",
    "Peer",
    "PeerFailed",
    "Roundings",
    "Setting",
    "embeddings",
]

N_SLOTS = 8
_START_S = 60.0
_STOP_S = 10.0
_ANSWER_S = 120.0


class PeerFailed(Exception):
    """Says in one sentence what became of llama-server."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a llama-server is run."""

    n_ctx: int = N_CTX
    """Tokens of a slot."""
    flags: tuple[str, ...] = ()
    """Of its command line, besides."""


SMALL_WINDOWS = Setting(N_CTX_LONG, ("-ub", str(N_UBATCH_SMALL)))
"""With small caches for windows, which are llama-server's default; long slots for long prompts."""
FULL_WINDOWS = Setting(N_CTX_LONG, (*SMALL_WINDOWS.flags, "--swa-full"))
"""The same with full ones: where llama-server reuses a part of a small one, its own tokens may be
wrong, so it is no witness there."""


def embeddings(pooling: str, *flags: str) -> Setting:
    """Returns how a llama-server is run that makes embeddings, with other flags besides."""
    return Setting(flags=("--embeddings", "--pooling", pooling, *flags))


class Roundings:
    """The same llama-server in other ways that round otherwise: each is as right as the first.

    Where two tokens, or two experts, are equally likely, they part; a server is asked for when it
    is needed. A way in which the model cannot be served (without flash attention, say) is left out.

    Args:
        program: The server.
        model: The file.
        setting: How it is run in all ways.
    """

    WAYS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "with its prefix cache": (),
        "with -fa off": ("-fa", "off"),
        "with -ub 16": ("-ub", "16"),
    }

    def __init__(self, program: Path, model: Path, setting: Setting = Setting()) -> None:
        self._program, self._model, self._setting = program, model, setting
        self._peers: dict[str, Peer | None] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def answers(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[str, list[list[int]]]]:
        """Yields the answers to a cell's prompts, in every way that there is."""
        for way, flags in self.WAYS.items():
            if way not in self._peers:
                self._peers[way] = self._start(flags)
            peer = self._peers[way]
            if peer is None:
                continue
            try:
                found = [peer.ask(prompt) for prompt in prompts] if flags else peer.replay(prompts)
            except PeerFailed:
                self._peers[way] = None
                continue
            yield way, found

    def _start(self, flags: Sequence[str]) -> Peer | None:
        try:
            setting = dataclasses.replace(self._setting, flags=(*self._setting.flags, *flags))
            return self._stack.enter_context(Peer(self._program, self._model, setting))
        except PeerFailed:
            return None


class Peer:
    """A llama-server on one model, greedy and without drafts; it remembers its answers.

    Args:
        program: The server.
        model: The file.
        setting: How it is run.
    """

    def __init__(self, program: Path, model: Path, setting: Setting = Setting()) -> None:
        self._program, self._model, self._setting = program, model, setting
        self._port = free_port()
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        sizes = {"-np": N_SLOTS, "-c": N_SLOTS * self._setting.n_ctx, "-t": 1, "--port": self._port}
        flags = [str(part) for pair in sizes.items() for part in pair]
        command = [str(self._program), "-m", str(self._model), "--no-kv-unified", "--no-warmup"]
        command += [*flags, *self._setting.flags]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
        try:
            self._wait()
        except BaseException:  # it would go on for ever
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        assert self._process is not None, "not started"
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, prompt: Sequence[int]) -> list[int]:
        """Returns the answer to a prompt, asked alone; nothing is reused.

        Raises:
            PeerFailed: there is none.
        """
        known = self._answers.get(tuple(prompt))
        if known is None:
            known = self._answers[tuple(prompt)] = self._complete(prompt)
        return known

    def n_equal_at_once(self, prompts: Sequence[Sequence[int]]) -> int:
        """Returns how many of these prompts it answers at once as it does alone."""
        with ThreadPoolExecutor(N_SLOTS) as pool:
            found = list(pool.map(self._complete, prompts))
        return sum(
            self.ask(prompt) == tokens for prompt, tokens in zip(prompts, found, strict=True)
        )

    def replay(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the answers to prompts in one slot, each going on from what the last has left.

        Raises:
            PeerFailed: there is none.
        """
        return [self._complete(prompt, cache_prompt=True, id_slot=0) for prompt in prompts]

    def embed(self, prompt: Sequence[int]) -> list[float]:
        """Returns a prompt's embedding, which is not scaled.

        Raises:
            PeerFailed: there is none.
        """
        (row,) = self._post("/embedding", {"content": list(prompt), "embd_normalize": -1})
        pooled: list[float] = row["embedding"][0]
        return pooled

    def embed_at_once(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the embeddings of prompts that are asked for at once.

        Raises:
            PeerFailed: one has none.
        """
        with ThreadPoolExecutor(N_SLOTS) as pool:
            return list(pool.map(self.embed, prompts))

    def _wait(self) -> None:
        assert self._process is not None, "not started"
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise PeerFailed(f"llama-server ends with code {self._process.returncode}")
            try:
                if self._request("GET", "/health")[0] == http.client.OK:
                    return
            except OSError:
                time.sleep(0.05)
        raise PeerFailed(f"llama-server does not serve within {_START_S:.0f} s")

    def _complete(self, prompt: Sequence[int], **more: object) -> list[int]:
        order: dict[str, object] = {
            "prompt": list(prompt),
            "n_predict": N_OUTPUT,
            "temperature": 0,
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
            "ignore_eos": True,
        }
        tokens: list[int] = self._post("/completion", order | more)["tokens"]
        return tokens

    def _post(self, path: str, order: dict[str, object]) -> Any:
        try:
            status, content = self._request("POST", path, json.dumps(order))
        except (OSError, http.client.HTTPException) as error:
            raise PeerFailed(f"llama-server gives no answer: {type(error).__name__}") from error
        if status != http.client.OK:
            raise PeerFailed(f"llama-server answers {status}")
        return json.loads(content)

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()
