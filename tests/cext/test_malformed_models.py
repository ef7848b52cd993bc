"""Damaged numbers in a model's header are refused before llama.cpp ends the process over them."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from tests.proofs.malformed import values
from tests.support.demo import EAGLE3, MODELS, SIMPLE, TARGETS
from tests.support.gguf_copy import Tensor, copied, header_only, quantised
from tests.support.hand import GREEDY, emitted, fused, plan

import drafthouse_engine
from drafthouse_engine import (
    DecoderPool,
    Engine,
    EngineParams,
    Model,
    Sampler,
    SamplingParams,
    Status,
    Survey,
)
from drafthouse_engine.errors import BadModel, NoMtpHeads, Unsupported
from drafthouse_server.engine.llama_text import LlamaText
from drafthouse_server.engine.text_jobs import TextJob, perform
from drafthouse_server.step import SamplingOptions

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


FILES = {
    "mimo2": TARGETS["dense"],
    "qwen35": TARGETS["hybrid"],
    "qwen3": SIMPLE,
    "eagle3": EAGLE3["dense"],
}


def bits(number: float) -> int:
    """Returns the bits of a float32."""
    return int.from_bytes(struct.pack("<f", number), "little")


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("mimo2.nextn_predict_layers", 8),
        ("mimo2.attention.layer_norm_rms_epsilon", bits(-1.0)),
        ("mimo2.attention.layer_norm_rms_epsilon", bits(float("nan"))),
        ("mimo2.rope.freq_base", bits(0.0)),
        ("mimo2.rope.freq_base", bits(float("inf"))),
        ("mimo2.rope.freq_base_swa", bits(-2.0)),
        ("qwen3.rope.dimension_count", 32),
        ("qwen3.attention.value_length", 32),
        ("qwen35.ssm.inner_size", 100),
        ("qwen35.ssm.inner_size", 0),
        ("qwen35.ssm.state_size", 0),
        ("qwen35.ssm.time_step_rank", 3),
        ("qwen35.ssm.group_count", 0),
        ("qwen35.ssm.group_count", 3),
        ("qwen35.ssm.conv_kernel", 0),
        ("qwen35.ssm.conv_kernel", 65535),
        ("qwen35.attention.value_length", 32),
        ("eagle3.block_count", 2),
        ("eagle3.attention.value_length", 32),
        ("mimo2.block_count", 0),
        ("mimo2.block_count", 513),
        ("mimo2.block_count", 2**31),
        ("mimo2.nextn_predict_layers", 32768),
        ("mimo2.context_length", 2**31),
        ("mimo2.rope.dimension_count", 7),
        ("mimo2.rope.dimension_count", 1000),
    ],
)
def test_a_number_that_would_abort_the_loader_is_refused(
    key: str, number: int, tmp_path: Path
) -> None:
    data = bytearray((MODELS / FILES[key.split(".", maxsplit=1)[0]]).read_bytes())
    value = next(v for v in values(bytes(data)) if v.key == key)
    data[value.at : value.at + value.width] = number.to_bytes(value.width, "little")
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with pytest.raises(BadModel, match=key.split(".", 1)[1]):
        Model(path)


DENSE = MODELS / TARGETS["dense"]
SMALL = EngineParams(n_seq_max=2, n_ctx_seq=64, n_batch=64, n_ubatch=64, n_threads=1)


def a_token(engine: Engine) -> int:
    """Returns the token that follows a short prompt."""
    engine.seq_begin(0, Sampler(engine.target, GREEDY))
    result = engine.step(plan((0, 0, 0, 3, 0, 1)), [300, 301, 302])
    assert not result.entries["status"].any()
    engine.seq_end(0)
    return emitted(result, 0)[0]


def assert_says_what_the_demo_model_does(path: Path) -> None:
    with (
        Model(path) as model,
        Model(DENSE) as plain,
        Engine(model, None, SMALL) as engine,
        Engine(plain, None, SMALL) as other,
    ):
        assert a_token(engine) == a_token(other)


def test_numbers_of_other_architectures_are_not_judged(tmp_path: Path) -> None:
    """llama.cpp's own saver writes the numbers of all; "no bound" is minus infinity."""
    path = copied(
        DENSE,
        tmp_path / "saved.gguf",
        {
            "mimo2.kda.gate_lower_bound": -math.inf,
            "qwen3.rope.freq_base": math.nan,
            "qwen35.ssm.inner_size": 3,
            "mimo2.ssm.conv_kernel": 0,
        },
    )
    assert_says_what_the_demo_model_does(path)


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_negative_factor_of_rope_is_refused_and_0_is_none(tmp_path: Path, key: str) -> None:
    """llama.cpp turned positions the other way, without a word; its own saver writes 0 for none."""
    wrong = copied(DENSE, tmp_path / "wrong.gguf", {f"mimo2.{key}": -4.0})
    with pytest.raises(BadModel, match=rf"mimo2\.{re.escape(key)} is negative"):
        Model(wrong)
    path = copied(DENSE, tmp_path / "none.gguf", {f"mimo2.{key}": 0.0})
    assert_says_what_the_demo_model_does(path)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_bound_that_is_no_number_is_refused(tmp_path: Path, number: float) -> None:
    path = copied(DENSE, tmp_path / "wrong.gguf", {"mimo2.kda.gate_lower_bound": number})
    with pytest.raises(BadModel, match=r"kda\.gate_lower_bound is not a finite number"):
        Model(path)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"attention.head_count": 4, "attention.head_count_kv": 3},
            "head_count_kv does not divide",
        ),
        ({"expert_count": 4, "expert_used_count": 8}, "expert_used_count is above"),
        ({"rope.scaling.type": "odd"}, "rope.scaling.type is not one of"),
    ],
)
def test_values_that_do_not_go_together_are_refused(
    values: dict[str, int | str], reason: str, tmp_path: Path
) -> None:
    path = header_only(tmp_path / "odd.gguf", "llama", {"block_count": 2, **values})
    with pytest.raises(BadModel, match=f"is damaged: .*{re.escape(reason)}"):
        Model(path)


TYPES = [
    ("blk.0.ffn_up.weight", np.int8),
    ("blk.0.attn_qkv.weight", np.float64),
    ("output.weight", np.int16),
    ("token_embd.weight", np.int32),
    ("output_norm.weight", np.float64),
    ("blk.0.attn_norm.weight", np.float16),
]


@pytest.mark.parametrize(("name", "kind"), TYPES)
def test_a_tensor_that_nothing_computes_with_is_refused(
    tmp_path: Path, name: str, kind: type[np.generic]
) -> None:
    """They ended the process, with SIGSEGV or an assertion, when the first token was computed."""

    def change(found: str, tensor: Tensor) -> Tensor:
        numbers = np.asarray(tensor[0]).astype(kind)
        types = GGMLQuantizationType
        of = {"i1": types.I8, "i2": types.I16, "i4": types.I32, "f2": types.F16, "f8": types.F64}
        return (numbers, of[numbers.dtype.str[1:]]) if found == name else tensor

    path = copied(DENSE, tmp_path / "typed.gguf", change=change)
    for load in (Model, Survey):
        with pytest.raises(Unsupported, match=rf'its tensor "{name}" has the type [if]\d+,'):
            load(path)


@pytest.mark.parametrize("arch", ["minimax-m2", "minimax-01", "nanbeige", "nemotron"])
def test_half_rotated_heads_are_what_some_models_have(tmp_path: Path, arch: str) -> None:
    sizes = {"block_count": 2, "embedding_length": 256, "attention.head_count": 2}
    path = header_only(
        tmp_path / "half.gguf",
        arch,
        sizes | {"attention.key_length": 128, "rope.dimension_count": 64},
    )
    with pytest.raises(BadModel) as caught:
        Model(path)
    assert "damaged" not in str(caught.value), "it lacks all tensors, but the header is right"


def llama_source() -> Path:
    """Returns the source of llama.cpp that this engine is built from."""
    if checkout := os.environ.get("DRAFTHOUSE_LLAMA_CPP"):
        return Path(checkout)
    file = Path(__file__).resolve().parents[2] / "cext" / "fetch_llama_cpp.py"
    spec = importlib.util.spec_from_file_location("fetch_llama_cpp", file)
    assert spec is not None
    assert spec.loader is not None
    fetch = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = fetch  # its dataclasses ask for it
    spec.loader.exec_module(fetch)
    source: Path = fetch.cache_path(fetch.read_lock(), fetch.patches())
    assert (source / "src" / "models").is_dir(), "`make build` brings the source of llama.cpp"
    return source


def test_the_lists_of_rotated_heads_are_those_that_llama_asserts() -> None:
    source = llama_source()
    names = dict(
        re.findall(
            r'\{\s*LLM_ARCH_(\w+),\s*"([^"]+)"\s*\}', (source / "src/llama-arch.cpp").read_text()
        )
    )
    asserted = set()
    for file in (source / "src/models").glob("*.cpp"):
        lines = [line.strip() for line in file.read_text().splitlines()]
        if "GGML_ASSERT(n_embd_head == n_rot);" in lines:
            asserted.add(file.stem.replace("-", "_").upper())
    root = Path(__file__).resolve().parents[2]
    text = (root / "cext" / "spec" / "gguf_header.cpp").read_text()
    listed = re.search(r"ROTATED_WHOLE = \{(.+?)\};", text, re.DOTALL)
    assert listed is not None
    known = set(re.findall(r'"([^"]+)"', listed[1]))
    missing = {names[arch] for arch in asserted if arch in names} - known
    assert not missing, "llama.cpp ends the process where these are rotated in part"


def test_the_list_of_several_mtp_blocks_is_that_of_llama() -> None:
    source = llama_source()
    several = set()
    for file in (source / "src/models").glob("*.cpp"):
        text = file.read_text()
        is_one = re.search(r"GGML_ASSERT\(hparams\.n_layer_nextn == 1\b", text)
        if "params.gtype == LLM_GRAPH_TYPE_DECODER_MTP" in text and not is_one:
            several.add(file.stem.replace("-", "_"))
    root = Path(__file__).resolve().parents[2]
    listed = re.search(r"SEVERAL_MTP\[\] = \{(.+?)\};", (root / "cext/spec/fits.cpp").read_text())
    assert listed is not None
    assert set(re.findall(r'"([^"]+)"', listed[1])) == several


@pytest.mark.parametrize("name", ["mimo2", "qwen35"])
def test_a_file_that_rotates_nothing_computes_all_the_same(name: str, tmp_path: Path) -> None:
    values = {f"{name}.rope.dimension_count": 0}
    path = copied(MODELS / FILES[name], tmp_path / "flat.gguf", values)
    with Model(path) as model, Engine(model, None, SMALL) as engine:
        (tokens,) = fused(engine, [[300, 301, 302]], 12)
        assert len(tokens) == 12


def test_layers_of_mtp_alone_are_told_from_damage(tmp_path: Path) -> None:
    """Assistants of Gemma 4 and the like: as an ordinary draft they would end the process."""
    path = copied(DENSE, tmp_path / "assistant.gguf", {"mimo2.nextn_predict_layers": 7})
    with pytest.raises(Unsupported, match="MTP layers alone") as caught:
        Model(path)
    assert "damaged" not in str(caught.value)


def test_mtp_weights_may_stay_where_they_are(caplog: pytest.LogCaptureFixture) -> None:
    with Model(DENSE, load_mtp=False) as lean, Model(DENSE) as whole:
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert lean.n_layer_nextn == whole.n_layer_nextn == 1
        with Engine(lean, None, SMALL) as engine, Engine(whole, None, SMALL) as other:
            prompts = [[300, 301, 302], [400, 401]]
            assert fused(engine, prompts, 12) == fused(other, prompts, 12)
        with pytest.raises(NoMtpHeads, match="not loaded"):
            Engine(lean, None, EngineParams(draft_type="mtp", n_ctx_seq=64, n_threads=1))


def test_a_tokenizer_that_adds_what_it_does_not_name_is_refused(tmp_path: Path) -> None:
    """The first text ended the process."""
    path = copied(
        DENSE,
        tmp_path / "bos.gguf",
        {
            "tokenizer.ggml.model": "t5",  # has no such token unless the file names one
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.bos_token_id": None,
        },
    )
    with pytest.raises(BadModel, match="adds a token to every text, bos"):
        Model(path)


def test_a_model_without_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    path = copied(
        DENSE,
        tmp_path / "silent.gguf",
        {
            "tokenizer.ggml.model": "no_vocab",
            "mimo2.vocab_size": 2048,
            "tokenizer.ggml.bos_token_id": None,
            "tokenizer.ggml.add_bos_token": None,
            "tokenizer.chat_template": None,
        },
    )
    with Model(path) as model, Model(DENSE) as plain:
        for text in ("", "def"):
            with pytest.raises(Unsupported, match="no tokenizer"):
                model.tokenize(text)
        for spell in (model.token_bytes, lambda token: model.detokenize([token])):
            with pytest.raises(Unsupported, match="no tokenizer"):  # it ended the process
                spell(300)
        with pytest.raises(Unsupported, match="no tokenizer"):  # so did its first mask
            Sampler(model, SamplingParams(grammar='root ::= "a"'))
        with Engine(model, None, SMALL) as engine, Engine(plain, None, SMALL) as other:
            assert a_token(engine) == a_token(other)


def test_a_diffusion_model_is_called_one(tmp_path: Path) -> None:
    path = copied(
        MODELS / SIMPLE,
        tmp_path / "dream.gguf",
        arch="dream",
        change=lambda name, tensor: None if "_q_norm" in name or "_k_norm" in name else tensor,
    )
    with Model(path) as model, Model(MODELS / SIMPLE) as target:
        with pytest.raises(Unsupported, match="diffusion model"):
            Engine(model, None, SMALL)
        with pytest.raises(Unsupported, match="diffusion model"):
            Engine(target, model, EngineParams(draft_type="simple", n_ctx_seq=64, n_threads=1))
        with pytest.raises(Unsupported, match="diffusion model"):
            DecoderPool(model)


def without_numbers(name: str, tensor: Tensor) -> Tensor:
    """Makes what projects to some tokens no numbers."""
    data, kind = tensor
    if name == "output.weight":
        data = data.copy()
        data[100:140] = np.float16(math.nan)
    return data, kind


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(seed=1, temperature=0.8, logprobs=True, n_top_logprobs=32),
        SamplingParams(seed=1, temperature=0.8, top_k=0, top_p=0.9),
        SamplingParams(seed=1, temperature=0.8, mirostat=2),
    ],
)
def test_logits_that_are_no_numbers_are_never_chosen(
    tmp_path: Path, sampling: SamplingParams
) -> None:
    path = copied(DENSE, tmp_path / "broken.gguf", change=without_numbers)
    with Model(path) as model, Engine(model, None, SMALL) as engine:
        for seed in range(20):
            engine.seq_begin(0, Sampler(model, sampling))
            result = engine.step(plan((0, 0, 0, 3, 0, 1)), [300 + seed, 301, 302])
            if result.entries["status"][0]:
                assert result.entries["status"].tolist() == [Status.SAMPLING_FAILED]
            else:
                assert emitted(result, 0)[0] not in range(100, 140)
                engine.seq_end(0)


@pytest.mark.skipif(
    "AVX2 = 1" not in drafthouse_engine.build_version(), reason="Q4_0 is repacked with AVX2"
)
def test_exact_is_refused_where_weights_are_repacked(tmp_path: Path) -> None:
    path = copied(DENSE, tmp_path / "q4_0.gguf", change=quantised)
    exact = EngineParams(
        n_seq_max=2, n_ctx_seq=64, n_batch=64, n_ubatch=64, n_threads=1, exact=True
    )
    with Model(path) as model, pytest.raises(Unsupported, match="as they are in the file"):
        Engine(model, None, exact)
    with Model(DENSE) as model, Engine(model, None, exact) as engine:
        assert a_token(engine) == a_token(engine)


def test_a_target_that_reads_both_ways_is_refused(tmp_path: Path) -> None:
    """A prompt of more tokens than a ubatch ended the process."""
    path = copied(DENSE, tmp_path / "both_ways.gguf", {"mimo2.attention.causal": False})
    with Model(path) as model, pytest.raises(Unsupported, match=r"attention\.causal is false"):
        Engine(model, None, EngineParams(draft_type="none", n_ctx_seq=64, n_threads=1))


@pytest.mark.parametrize("kind", ["llama", "rwkv"])
def test_a_text_without_tokens_is_refused(tmp_path: Path, kind: str) -> None:
    """They had a token -1, or an error of the library: a text worker ended at each."""
    values = {"tokenizer.ggml.model": kind, "tokenizer.ggml.scores": None}
    path = copied(DENSE, tmp_path / "bytes.gguf", values)
    with Model(path, vocab_only=True) as model:
        for tokenize in (model.tokenize, lambda text: model.tokenize_plain(text, [])):
            with pytest.raises(Unsupported, match="no token for a part of the text"):
                tokenize("\N{SNOWMAN}")


def test_a_dry_breaker_without_tokens_is_refused(tmp_path: Path) -> None:
    """It was an error of the library: a text worker ended at each."""
    values = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": None}
    path = copied(DENSE, tmp_path / "bytes.gguf", values)
    with Model(path, vocab_only=True) as model:
        Sampler(model, SamplingParams(dry_multiplier=0.5))
        breakers = SamplingParams(dry_multiplier=0.5, dry_breakers=("a\N{SNOWMAN}",))
        with pytest.raises(Unsupported, match="no token for a part of a DRY breaker"):
            Sampler(model, breakers)
    worker = LlamaText.open(str(path))
    options = SamplingOptions(dry_multiplier=0.5, dry_breakers=("a\N{SNOWMAN}",))
    assert [found.field for found in perform(TextJob(sampling=options), worker).problems] == [
        "dry_breakers"
    ]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    for path, kind in ((pipe, "pipe"), (tmp_path, "directory")):
        with pytest.raises(BadModel, match=f"is a {kind}, and not a GGUF file"):
            Model(path)
