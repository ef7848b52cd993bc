"""What the engine makes of the settings of a context."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from models import archs
from models.archs import RECIPES, write_model
from tests.support.demo import MODELS, TARGETS
from tests.support.gguf_copy import copied, header_only

from drafthouse_engine import Model, ModelNotFound, Sampler, SamplingParams, set_log
from drafthouse_server.config import Config
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.engine.loading import load_engine
from drafthouse_server.engine.parameters import request_tokens
from drafthouse_server.engine.surveyor import Surveyor
from drafthouse_server.errors import ConfigError, ModelLoadError
from drafthouse_server.host.fit import Size


@pytest.mark.parametrize(
    ("settings", "n_tokens"),
    [
        ({}, 4096),
        ({"max_model_len": 5000}, 5000),
        ({"ctx_size": 32768, "parallel": 4}, 8192),
        ({"ctx_size": 32768, "parallel": 4, "kv_unified": True}, 16384),  # as it was trained
        ({"ctx_size": 32768, "parallel": 4, "max_model_len": 100}, 100),
        ({"ctx_size": 100, "parallel": 8, "max_model_len": 900}, 12),
        ({"ctx_size": 100, "parallel": 8, "max_model_len": 900, "kv_unified": True}, 100),
        ({"ctx_size": 5, "parallel": 8}, 0),
    ],
)
def test_a_request_may_have_what_its_slot_has(settings: dict[str, Any], n_tokens: int) -> None:
    assert request_tokens(Config(**settings), n_ctx_train=16384) == n_tokens


@pytest.mark.model
@pytest.mark.parametrize("flash_attn", ["auto", "on", "off"])
def test_flash_attention_is_asked_for_as_llama_cpp_calls_it(flash_attn: str) -> None:
    words = {"auto": "auto", "on": "enabled", "off": "disabled"}
    config = Config(
        model=str(MODELS / TARGETS["dense"]),
        draft_type="none",
        parallel=1,
        ctx_size=256,
        threads=1,
        flash_attn=flash_attn,
    )
    lines: list[str] = []
    set_log(logging.INFO, lambda _, line: lines.append(line))
    try:
        LlamaEngine.load(config).close()
    finally:
        set_log(logging.WARNING)
    found = [line for line in lines if "flash_attn " in line]
    assert [line.rpartition("= ")[2].strip() for line in found] == [words[flash_attn]]


@pytest.mark.model
@pytest.mark.parametrize(("kv_unified", "n_tokens"), [(False, 256), (True, 1024)])
def test_the_cells_of_all_slots_are_shared_as_llama_server_does(
    kv_unified: bool, n_tokens: int
) -> None:
    config = Config(
        model=str(MODELS / TARGETS["dense"]),
        draft_type="none",
        parallel=4,
        ctx_size=1024,
        kv_unified=kv_unified,
        threads=1,
        log_level="error",
    )
    engine = LlamaEngine.load(config)
    try:
        assert (engine.limits.n_ctx, engine.limits.n_ctx_seq) == (1024, n_tokens)
    finally:
        engine.close()


@pytest.mark.model
@pytest.mark.parametrize(
    ("settings", "n_batch"),
    [({}, 512), ({"parallel": 128}, 640), ({"batch_size": 100}, 100)],
    ids=["as it is", "for the drafts of all slots", "with a smaller physical batch"],
)
def test_sizes_of_batches_follow_what_is_set(settings: dict[str, Any], n_batch: int) -> None:
    model = str(MODELS / TARGETS["dense"])
    config = Config(model=model, draft_type="mtp", max_model_len=64, threads=1, **settings)
    engine = LlamaEngine.load(config)
    try:
        assert (engine.limits.n_seq_max, engine.limits.n_batch) == (config.parallel, n_batch)
    finally:
        engine.close()


@pytest.mark.model
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 16, "ubatch_size": 16}, ("batch_size is 16", "parallel * (1 + draft_max)")),
        ({"ubatch_size": 4}, ("ubatch_size is 4", "2 + draft_max")),
        ({"ctx_size": 8}, ("(max_model_len, ctx_size)", "2 + draft_max")),
    ],
)
def test_what_the_engine_refuses_is_told_in_the_names_of_settings(
    settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    model = str(MODELS / TARGETS["dense"])
    with pytest.raises(ModelLoadError) as caught:
        LlamaEngine.load(Config(model=model, draft_type="mtp", threads=1, **settings))
    assert all(word in str(caught.value) for word in words), caught.value
    assert " n_" not in str(caught.value)


@pytest.mark.model
def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    """It was served, and ended the process with the first token of a client's token ids."""
    path = copied(
        MODELS / TARGETS["dense"],
        tmp_path / "silent.gguf",
        {
            "tokenizer.ggml.model": "no_vocab",
            "mimo2.vocab_size": 2048,
            "tokenizer.ggml.bos_token_id": None,
            "tokenizer.ggml.add_bos_token": None,
        },
    )
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        LlamaEngine.load(Config(model=str(path), max_model_len=64, parallel=1, threads=1))


@pytest.mark.model
@pytest.mark.parametrize(
    "kind", ["new", "clip", "adapter", "version 1", "version 99", "big endian"]
)
def test_a_whole_file_is_not_to_be_downloaded_again(kind: str, tmp_path: Path) -> None:
    """A whole file that is no model for this server was said to be incomplete."""
    path = tmp_path / "model.gguf"
    dense = MODELS / TARGETS["dense"]
    if kind == "adapter":
        header_only(path, "llama", {"block_count": 1})
    elif kind in ("new", "clip"):
        copied(dense, path, arch="newer9" if kind == "new" else kind)
    else:
        number = {"version 1": b"\1\0\0\0", "version 99": b"\x63\0\0\0"}
        written = dense.read_bytes()
        path.write_bytes(written[:4] + number.get(kind, b"\0\0\0\3") + written[8:])
    with pytest.raises(ModelLoadError, match="use another file: this one is whole"):
        LlamaEngine.load(Config(model=str(path), threads=1))


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with MTP heads that llama.cpp cannot draft with: two, on this architecture."""
    one = RECIPES["deepseek2-mtp"]
    values = {**one.values, "nextn_predict_layers": 2}
    two = dataclasses.replace(one, blocks=[*one.blocks, one.blocks[-1]], values=values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archs, "RECIPES", {"two": two})
        return write_model(tmp_path_factory.mktemp("mtp") / "two.gguf", "two")


def heads_of(model: Model, n_blocks: int) -> list[int]:
    """Returns the blocks whose projection of an MTP head is in memory."""
    found = []
    for i in range(n_blocks):
        try:
            model.setting(f"buffer:blk.{i}.nextn.eh_proj.weight")
        except ModelNotFound:
            continue
        found.append(i)
    return found


@pytest.mark.model
@pytest.mark.parametrize("fit", [True, False])
def test_mtp_weights_that_auto_does_not_draft_with_are_not_loaded(
    two_heads: Path, *, fit: bool
) -> None:
    n_blocks = len(RECIPES["deepseek2-mtp"].blocks) + 1
    with Model(two_heads) as whole:
        assert len(heads_of(whole, n_blocks)) == 2
    sizes: dict[str, Any] = {"parallel": 1, "max_model_len": 64, "threads": 1, "probe": False}
    config = Config(model=str(two_heads), fit=fit, **sizes)
    engine = load_engine(config).engine
    with engine:
        assert engine.limits.draft_type == "none"
        assert heads_of(engine.target, n_blocks) == []
    without = dataclasses.replace(config, draft_type="none")
    with Surveyor(config) as found, Surveyor(without) as told:
        assert found.needs(Size(1, 64)) == told.needs(Size(1, 64))


@pytest.mark.model
@pytest.mark.parametrize("fit", [True, False])
def test_mtp_weights_that_auto_drafts_with_are_loaded(*, fit: bool) -> None:
    model = str(MODELS / TARGETS["dense"])
    sizes: dict[str, Any] = {"parallel": 1, "max_model_len": 64, "threads": 1}
    engine = load_engine(Config(model=model, fit=fit, **sizes)).engine
    with engine:
        assert engine.limits.draft_type == "mtp"
        assert len(heads_of(engine.target, 16)) == 1


@pytest.mark.model
@pytest.mark.parametrize("fit", [True, False])
def test_what_needs_a_drafter_is_refused_where_auto_finds_none(
    two_heads: Path, *, fit: bool
) -> None:
    config = Config(model=str(two_heads), fit=fit, probe=False, prompt_lookup=True)
    with pytest.raises(ConfigError, match="prompt_lookup needs a drafter"):
        load_engine(config)


SMALLEST = {"parallel": 1, "draft_max": 1, "batch_size": 3, "ubatch_size": 3, "max_model_len": 3}


def damaged(path: Path, value: float) -> Path:
    """Returns a model whose last norm has a weight that is no number, as a bad download may."""
    reader = GGUFReader(write_model(path, "llama"), "r+")
    next(it for it in reader.tensors if it.name == "output_norm.weight").data[0] = value
    reader.data.flush()
    return path


@pytest.mark.model
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_can_generate_nothing_is_not_served(tmp_path: Path, value: float) -> None:
    path = damaged(tmp_path / "damaged.gguf", value)
    with pytest.raises(ModelLoadError, match="what it computes is not finite: its weights") as told:
        load_engine(Config(model=str(path), max_model_len=64, parallel=2, threads=1))
    assert str(path) in str(told.value)


@pytest.mark.model
def test_a_drafter_that_can_draft_nothing_harms_nobody(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target.gguf", "llama")
    draft = damaged(tmp_path / "draft.gguf", math.nan)
    sizes: dict[str, Any] = {"max_model_len": 64, "parallel": 2, "threads": 1}
    engine = load_engine(
        Config(model=str(target), model_draft=str(draft), draft_type="simple", **sizes)
    ).engine
    engine.close()


@pytest.mark.model
@pytest.mark.parametrize("family", ["dense", "hybrid"])
@pytest.mark.parametrize("sizes", [{}, SMALLEST])
def test_what_is_generated_first_leaves_nothing(family: str, sizes: dict[str, int]) -> None:
    settings: dict[str, Any] = {"max_model_len": 64, "parallel": 2, "threads": 1}
    engine = load_engine(Config(model=str(MODELS / TARGETS[family]), **settings | sizes)).engine
    with engine:
        assert engine.n_cells_used == 0
        engine.seq_begin(0, Sampler(engine.target, SamplingParams(temperature=0.0)))  # if not busy


@pytest.mark.model
def test_a_model_that_names_no_end_token_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"tokenizer.ggml.eos_token_id": None}
    path = copied(MODELS / TARGETS["dense"], tmp_path / "model.gguf", values)
    config = Config(model=str(path), draft_type="none", parallel=1, max_model_len=64, threads=1)
    LlamaEngine.load(config).close()
    (record,) = [it for it in caplog.records if "eos_token_id" in it.message]
    assert "answers end at token 11" in record.message
