"""What is done to a model's files while they are served, or read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from models.archs import write_model
from tests.cext.test_split_models import split
from tests.support.built import needs_extension
from tests.support.demo import MODELS, TARGETS

from drafthouse_server.config import Config
from drafthouse_server.engine import text_process
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.engine.text_jobs import TextJob
from drafthouse_server.errors import ModelLoadError, StartupError

pytestmark = needs_extension()

TEXT = "def parse(text):\n"


@contextmanager
def served(path: Path) -> Iterator[LlamaEngine]:
    config = Config(model=str(path), draft_type="none", parallel=1, max_model_len=64, threads=1)
    with closing(LlamaEngine.load(config)) as engine:
        yield engine


async def read(engine: LlamaEngine) -> list[int]:
    """Returns the tokens of the text, as a worker reads it that starts now."""
    worker = engine.make_text_worker()
    await worker.start()
    try:
        tokens = (await worker.ask(TextJob(text=TEXT), 5.0)).tokens
        assert tokens
        return list(tokens)
    finally:
        await worker.end()


def change(path: Path, other: Path | None) -> None:
    """Puts another file in a file's place, or none."""
    if other is None:
        path.unlink()
    else:
        other.replace(path)


@pytest.mark.parametrize("is_replaced", [True, False])
async def test_a_text_worker_reads_the_model_that_is_served(
    tmp_path: Path, *, is_replaced: bool
) -> None:
    """It read the one that lay there when it started: prompts came in other tokens, or never."""
    path = Path(shutil.copy(MODELS / TARGETS["dense"], tmp_path / "model.gguf"))
    other = write_model(tmp_path / "other.gguf", "llama")
    with served(path) as engine:
        tokens = await read(engine)
        assert tokens == engine.tokenize(TEXT, add_special=True, parse_special=False)
        change(path, other if is_replaced else None)
        assert await read(engine) == tokens


async def test_without_proc_a_text_worker_finds_the_model_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server without /proc, as in some sandboxes, did not start."""
    path = Path(shutil.copy(MODELS / TARGETS["dense"], tmp_path / "model.gguf"))
    monkeypatch.setattr(text_process, "_DESCRIPTORS", str(tmp_path / "proc"))
    with served(path) as engine:
        assert await read(engine)
        change(path, None)
        with pytest.raises(StartupError, match="is not the file any more that is served"):
            await read(engine)


async def test_a_text_worker_reads_no_other_first_part(tmp_path: Path) -> None:
    """The other parts are found by the name of the first, so all must be there as they were."""
    path = split(tmp_path / "one", 1.0)
    kept = tmp_path / "kept"
    with served(path) as engine:
        tokens = await read(engine)
        path.rename(kept)
        with pytest.raises(StartupError, match="is not the file any more that is served"):
            await read(engine)
        shutil.copy(kept, path)
        with pytest.raises(StartupError, match="is not the file any more that is served"):
            await read(engine)
        kept.replace(path)
        assert await read(engine) == tokens


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_file_that_changes_while_it_is_read_is_not_served(
    tmp_path: Path, *, is_replaced: bool
) -> None:
    path = Path(shutil.copy(MODELS / TARGETS["dense"], tmp_path / "model.gguf"))
    other = Path(shutil.copy(path, tmp_path / "other.gguf"))

    def progress(_path: str, _share: float) -> None:
        if not is_replaced:
            os.utime(path)
        elif other.exists():
            other.replace(path)

    config = Config(model=str(path), draft_type="none", parallel=1, max_model_len=64, threads=1)
    with pytest.raises(ModelLoadError, match="replaced, or written to, while it was read"):
        LlamaEngine.load(config, progress)
