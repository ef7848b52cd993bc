"""The shipped demo models fit together, and the prompts were never trained on."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, cast

import gguf
import pytest
from models import bench_models
from models.bench_models import QUANTS, SHAPES, WEIGHT_STD, BenchShape, write_bench_model
from models.corpus import SourceFile, is_held_out, read_corpus, split_corpus
from models.prompts import PromptFile, cut_prompts
from models.structure import Structure, read_structure, structure_differences

from drafthouse_engine import DecoderConfig, DecoderPool, Model, generate_autoregressive

MODELS = Path(__file__).resolve().parents[2] / "models"
TARGETS = {"tiny-mimo2-f16": "mimo2", "tiny-qwen35-f16": "qwen35"}
DRAFTS = {
    "tiny-mimo2-eagle3-f16": "eagle3",
    "tiny-qwen35-eagle3-f16": "eagle3",
    "tiny-draft-f16": "qwen3",
}
EVERY = TARGETS | DRAFTS
VOCABULARY_KEYS = ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id")


def metadata(name: str) -> dict[str, Any]:
    fields = gguf.GGUFReader(MODELS / f"{name}.gguf").fields
    return {key: field.contents() for key, field in fields.items()}


def structure(name: str) -> Structure:
    return read_structure(MODELS / f"{name}.gguf")


def test_hashes_cover_every_shipped_file_and_match() -> None:
    lines = (MODELS / "SHA256SUMS").read_text().splitlines()
    expected = {name: digest for digest, name in (line.split() for line in lines)}
    shipped = [*MODELS.glob("*.gguf"), *MODELS.glob("*.json")]
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in shipped}
    assert found == expected


@pytest.mark.parametrize("name", EVERY)
def test_a_file_has_architecture_tokenizer_and_chat_template(name: str) -> None:
    keys = metadata(name)
    assert keys["general.architecture"] == EVERY[name]
    assert keys["general.name"] == name.removesuffix("-f16")
    assert keys["tokenizer.ggml.model"] == "gpt2"
    assert "messages" in keys["tokenizer.chat_template"]


@pytest.mark.parametrize("name", EVERY)
def test_a_file_has_the_vocabulary_of_the_tokenizer_file(name: str) -> None:
    keys = metadata(name)
    content = json.loads((MODELS / "tokenizer.json").read_text(encoding="utf-8"))
    ids = content["model"]["vocab"]
    assert {token: i for i, token in enumerate(keys["tokenizer.ggml.tokens"])} == ids
    merges = [" ".join(merge) for merge in content["model"]["merges"]]
    assert keys["tokenizer.ggml.merges"] == merges


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("target", TARGETS)
def test_targets_and_drafts_agree_on_every_token(target: str, draft: str) -> None:
    left, right = metadata(target), metadata(draft)
    for key in VOCABULARY_KEYS:
        assert left[f"tokenizer.ggml.{key}"] == right[f"tokenizer.ggml.{key}"]


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_carries_one_mtp_block_after_its_last_layer(name: str) -> None:
    target, arch = structure(name), TARGETS[name]
    assert target.metadata[f"{arch}.nextn_predict_layers"] == 1
    block = f"blk.{target.metadata[f'{arch}.block_count'] - 1}."
    nextn = {tensor for tensor in target.tensors if ".nextn." in tensor}
    names = ("eh_proj", "enorm", "hnorm", "shared_head_norm")
    assert nextn == {f"{block}nextn.{part}.weight" for part in names}
    n_embd = target.metadata[f"{arch}.embedding_length"]
    assert target.tensors[f"{block}nextn.eh_proj.weight"][0] == (2 * n_embd, n_embd)


def test_only_the_hybrid_target_has_recurrent_layers() -> None:
    hybrid = structure("tiny-qwen35-f16")
    flags = hybrid.metadata["qwen35.attention.recurrent_layers"]
    with_state = {int(name.split(".")[1]) for name in hybrid.tensors if name.endswith("ssm_a")}
    assert with_state == {i for i, is_recurrent in enumerate(flags) if is_recurrent} == {0, 1, 3, 4}
    assert not any("ssm" in name for name in structure("tiny-mimo2-f16").tensors)


@pytest.mark.parametrize("name", TARGETS)
def test_an_eagle3_draft_reads_three_layers_of_its_target(name: str) -> None:
    arch, target = TARGETS[name], structure(name)
    draft = structure(f"tiny-{arch}-eagle3-f16")
    n_embd = target.metadata[f"{arch}.embedding_length"]
    n_layer = target.metadata[f"{arch}.block_count"] - 1
    layers = draft.metadata["eagle3.target_layers"]
    assert len(layers) == 3
    assert sorted(set(layers)) == layers
    assert all(0 <= layer <= n_layer for layer in layers)
    assert draft.metadata["eagle3.target_hidden_size"] == n_embd
    assert draft.tensors["fc.weight"][0] == (3 * n_embd, n_embd)


def test_structure_differences_name_what_differs() -> None:
    dense = MODELS / "tiny-mimo2-f16.gguf"
    assert structure_differences(dense, dense) == []
    differences = structure_differences(dense, MODELS / "tiny-qwen35-f16.gguf")
    assert "general.architecture: mimo2 / qwen35" in differences
    assert "blk.0.ssm_a: missing / ((4,), 'F32')" in differences


def test_a_bench_model_has_the_tensors_of_its_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = BenchShape(
        "qwen35", 64, 4, 2, 1, 32, 96, 1e6, 128, n_delta_heads=2, n_delta_state=32, n_nextn=1
    )
    monkeypatch.setitem(SHAPES, "small", shape)
    paths = [tmp_path / "first.gguf", tmp_path / "second.gguf"]
    for path in paths:
        write_bench_model(path, "small", "Q4_0", MODELS / "tokenizer.json", n_vocab=2100)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    made = read_structure(paths[0])
    assert made.metadata["tokenizer.ggml.tokens"] == "array of 2100"
    assert made.tensors["token_embd.weight"] == ((64, 2100), "Q8_0")
    assert made.tensors["blk.0.attn_qkv.weight"] == ((64, 192), "Q4_0")
    assert made.tensors["blk.3.attn_q.weight"] == ((64, 128), "Q4_0")
    shipped = structure("tiny-qwen35-f16").tensors

    def suffixes(tensors: dict[str, Any], block: int) -> set[str]:
        prefix = f"blk.{block}."
        return {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}

    # Blocks of the three kinds (delta net, attention, MTP) hold what the trained model's do.
    for ours, theirs in ((0, 0), (3, 2), (4, 6)):
        assert suffixes(made.tensors, ours) == suffixes(shipped, theirs)


@pytest.mark.model
@pytest.mark.parametrize(
    "shape",
    [
        BenchShape(
            *("qwen3moe", 64, 2, 4, 1, 32, 96, 1e6, 128),
            n_expert=4,
            n_expert_used=2,
            n_ff_expert=32,
        ),
        BenchShape(
            *("deepseek2", 64, 27, 4, 1, 64, 96, 1e4, 128),
            n_rot=32,
            n_expert=4,
            n_expert_used=2,
            n_ff_expert=32,
            n_dense_lead=1,
            n_latent=64,
        ),
        BenchShape(
            *("gpt-oss", 64, 2, 4, 1, 32, 96, 1e4, 128),
            n_expert=4,
            n_expert_used=2,
            n_ff_expert=32,
            n_window=16,
        ),
    ],
    ids=lambda shape: shape.arch,
)
@pytest.mark.parametrize("quant", ["Q4_0", "MXFP4"])
def test_a_bench_model_with_experts_generates(
    shape: BenchShape, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "small", shape)
    path = tmp_path / "small.gguf"
    write_bench_model(path, "small", quant, MODELS / "tokenizer.json", n_vocab=2100)
    assert read_structure(path).tensors["blk.1.ffn_up_exps.weight"][1] == quant
    config = DecoderConfig(n_ctx_seq=64, n_threads=1)
    with Model(path) as target, DecoderPool(target, config) as pool, pool.decoder() as decoder:
        assert len(generate_autoregressive(decoder, [5, 6, 7], 3).tokens) == 3


@pytest.mark.model
def test_a_bench_model_with_windows_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = BenchShape("gemma3", 64, 6, 4, 1, 32, 96, 1e6, 128, n_window=16)
    monkeypatch.setitem(SHAPES, "small", shape)
    path = tmp_path / "small.gguf"
    write_bench_model(path, "small", "Q4_0", MODELS / "tokenizer.json", n_vocab=2100)
    assert read_structure(path).metadata["gemma3.attention.sliding_window"] == 16
    config = DecoderConfig(n_ctx_seq=64, n_threads=1)
    with Model(path) as target, DecoderPool(target, config) as pool, pool.decoder() as decoder:
        assert len(generate_autoregressive(decoder, [5, 6, 7], 20).tokens) == 20


def test_a_bench_model_that_is_there_is_of_the_vocabulary_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with another was kept, and measured for it."""
    monkeypatch.setitem(SHAPES, "small", BenchShape("qwen3", 64, 1, 2, 1, 32, 96, 1e6, 128))

    def make(*more: str) -> int:
        wanted = ["bench_models", "small", "--quants", "Q4_0", "--out", str(tmp_path), *more]
        monkeypatch.setattr("sys.argv", wanted)
        return bench_models.main()

    assert make("--vocab", "2100") == 0
    assert make("--vocab", "2100") == 0
    assert make() == 0
    with pytest.raises(SystemExit, match="there with a vocabulary of 2100; --force"):
        make("--vocab", "2200")
    assert make("--vocab", "2200", "--force") == 0
    with pytest.raises(SystemExit) as error:
        make("--vocab", "100", "--force")
    assert error.value.code == 2


@pytest.mark.parametrize("quant", QUANTS)
def test_weights_of_a_bench_model_are_alike_in_every_type(
    quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = BenchShape("qwen3moe", 256, 1, 4, 2, 64, 256, 1e4, 128)
    shape = dataclasses.replace(shape, n_expert=2, n_expert_used=1, n_ff_expert=256)
    monkeypatch.setitem(SHAPES, "small", shape)
    path = tmp_path / "small.gguf"
    write_bench_model(path, "small", quant, MODELS / "tokenizer.json", n_vocab=2100)
    tensors = {each.name: each for each in gguf.GGUFReader(path).tensors}
    weights = tensors["blk.0.ffn_up_exps.weight"]
    assert weights.tensor_type.name == quant
    values = gguf.quants.dequantize(weights.data, weights.tensor_type)
    assert values.shape == (2, 256, 256)
    assert abs(values.mean()) < 0.1 * WEIGHT_STD
    assert values.std() == pytest.approx(WEIGHT_STD, rel=0.1)


def prompt_file() -> PromptFile:
    text = (MODELS / "prompts.json").read_text(encoding="utf-8")
    return cast("PromptFile", json.loads(text))


def test_prompts_are_many_long_and_distinct() -> None:
    prompts = prompt_file()["prompts"]
    assert len(prompts) >= 64
    assert len({prompt["id"] for prompt in prompts}) == len(prompts)
    assert len({prompt["text"] for prompt in prompts}) == len(prompts)
    assert min(len(prompt["text"]) for prompt in prompts) >= 3_500
    assert (MODELS / "prompts.json").stat().st_size < 300_000


def test_no_prompt_was_trained_on() -> None:
    paths = {prompt["id"].rpartition(":")[0] for prompt in prompt_file()["prompts"]}
    assert len(paths) >= 20
    assert all(is_held_out(path) for path in paths)


def test_prompts_are_cut_from_each_file_in_turn_at_whole_lines() -> None:
    line = "value = compute(argument)\n"
    files = [SourceFile("long.py", line * 400), SourceFile("short.py", "# short\n" + line * 200)]
    prompts = cut_prompts(files, n_prompts=3)
    assert [prompt["id"] for prompt in prompts] == ["long.py:1", "short.py:1", "long.py:136"]
    assert all(prompt["text"].endswith("\n") for prompt in prompts)
    assert prompts[2]["text"] == "".join(files[0].text.splitlines(keepends=True)[135:270])


def test_codec_tables_give_no_prompts() -> None:
    assert cut_prompts([SourceFile("encodings/cp1026.py", "'\\x00'  # NULL\n" * 1000)]) == []


def test_the_corpus_is_code_in_a_fixed_order_and_split_by_path(tmp_path: Path) -> None:
    code = "x = 1\n" * 50
    for path in ("z.py", "a.py", "pkg/m.py", "site-packages/third.py", "notes.txt", "base64.py"):
        file = tmp_path / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(code)
    (tmp_path / "tiny.py").write_text("x = 1\n")
    (tmp_path / "greek.py").write_text("α = 'βγδ'\n" * 50, encoding="utf-8")
    (tmp_path / "latin1.py").write_bytes(b"# \xe9\n" + code.encode())
    files = read_corpus(tmp_path)
    assert [file.path for file in files] == ["a.py", "base64.py", "z.py", "pkg/m.py"]
    train, held_out = split_corpus(files)
    assert [file.path for file in held_out] == ["base64.py"]
    assert [file.path for file in train] == ["a.py", "z.py", "pkg/m.py"]


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no Python files"):
        read_corpus(tmp_path)
