"""Models in several files: what is bound to a model is bound to all of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from models import archs
from tests.support.built import needs_extension
from tests.support.hand import plan

from drafthouse_engine import (
    BadModel,
    Engine,
    EngineParams,
    Model,
    ModelNotFound,
    Sampler,
    SnapshotError,
    SnapshotKind,
    Survey,
    Unsupported,
)

pytestmark = needs_extension()
SMALL = EngineParams(n_ctx_seq=64, n_batch=64, n_ubatch=64, n_threads=1)


def split(folder: Path, factor: float, *, is_header_alone: bool = False) -> Path:
    """Writes a model in two parts and more, of which the first has no tensor that differs."""
    folder.mkdir()
    write = partial(GGUFWriter, split_max_tensors=5, small_first_shard=is_header_alone)
    with pytest.MonkeyPatch.context() as patch:
        draw = archs._draw
        patch.setattr(archs, "GGUFWriter", write)
        patch.setattr(
            archs,
            "_draw",
            lambda name, shape: draw(name, shape) * np.float32(factor if "blk.1." in name else 1),
        )
        archs.write_model(folder / "model.gguf", "llama")
    first, *others = sorted(folder.glob("*.gguf"))
    assert others
    return first


def test_a_snapshot_of_another_model_with_the_same_first_part_is_refused(tmp_path: Path) -> None:
    """Only the first part was looked at, which in many models has no weights at all."""
    paths = [split(tmp_path / "one", 1.0), split(tmp_path / "other", 1.5)]
    again = split(tmp_path / "again", 1.0)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    snapshots: list[bytes] = []
    for path in (*paths, again):
        with Model(path) as model, Engine(model, None, SMALL) as engine:
            if snapshots and path != again:
                with pytest.raises(SnapshotError) as caught:
                    engine.load(0, snapshots[0])
                assert caught.value.kind is SnapshotKind.OTHER_MODEL
            elif snapshots:
                engine.load(0, snapshots[0])
                assert engine.seq_n_past(0) == 3
            else:
                engine.seq_begin(0, Sampler(model))
                engine.step(plan((0, 0, 0, 3, 0, 1)), [40, 41, 42])
                snapshots.append(engine.save(0))


def test_a_part_that_is_not_the_first_names_the_first(tmp_path: Path) -> None:
    first = split(tmp_path / "one", 1.0)
    second = sorted(first.parent.glob("*.gguf"))[1]
    with pytest.raises(Unsupported) as caught:
        Model(second)
    assert caught.value.message == (
        f"{second} is part 2 of a model in {len(list(first.parent.iterdir()))} files, which is"
        f" given by its first part: {first}"
    )


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    first = split(tmp_path / "one", 1.0)
    last = sorted(first.parent.glob("*.gguf"))[-1]
    last.unlink()
    for vocab_only in (False, True):
        with pytest.raises(ModelNotFound, match=r"in \d+ files; cannot read") as caught:
            Model(first, vocab_only=vocab_only)
        assert caught.value.message.endswith(str(last))


def test_a_part_that_is_cut_short_is_named(tmp_path: Path) -> None:
    """A tensor of it was, and the first file: which of the parts to bring again was not told."""
    first = split(tmp_path / "one", 1.0)
    for part in sorted(first.parent.glob("*.gguf")):
        whole = part.read_bytes()
        part.write_bytes(whole[:-40])
        for load in (Model, Survey):
            with pytest.raises(BadModel) as caught:
                load(first)
            told = f"{part} is cut short: it has {len(whole) - 40} bytes of "
            assert caught.value.message.startswith(told)
        part.write_bytes(whole)
    Model(first).close()


def test_a_first_part_without_tensors_is_whole_at_any_length(tmp_path: Path) -> None:
    first = split(tmp_path / "one", 1.0, is_header_alone=True)
    fields = GGUFReader(first).fields.values()
    end = max(it.offset + sum(int(part.nbytes) for part in it.parts) for it in fields)
    first.write_bytes(first.read_bytes()[:end])  # as of writers that pad nothing there
    Model(first).close()


def test_parts_that_are_named_otherwise_are_told_from_damage(tmp_path: Path) -> None:
    first = split(tmp_path / "one", 1.0)
    renamed = first.rename(tmp_path / "one" / "blob")
    with pytest.raises(ModelNotFound, match=r"part 1 of a model in \d+ files, and is not named so"):
        Model(renamed)
