"""The training code computes what llama.cpp computes, and exports what was shipped.

Needs the `models` extra (torch, tokenizers); skipped without it.
"""

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the `models` extra")
pytest.importorskip("tokenizers", reason="needs the `models` extra")

from models.acceptance import held_out_acceptance  # noqa: E402 - after the skip
from models.architecture import DENSE, DRAFT, FAMILIES, HYBRID, Architecture  # noqa: E402
from models.attention import unrolled_attention  # noqa: E402
from models.corpus import SourceFile  # noqa: E402
from models.delta_net import gated_delta_rule  # noqa: E402
from models.eagle3 import Eagle3Head  # noqa: E402
from models.export import export_eagle3, export_trunk  # noqa: E402
from models.losses import DraftLoss, NextTokenLoss  # noqa: E402
from models.measure import load_eagle3, load_mtp, load_trunk  # noqa: E402
from models.mtp import MTPHead  # noqa: E402
from models.prompts import PATH  # noqa: E402
from models.structure import structure_differences  # noqa: E402
from models.tokenizer import TokenStream, encode_corpus, train_tokenizer  # noqa: E402
from models.training import Schedule, train  # noqa: E402
from models.trunk import Trunk  # noqa: E402

MODELS = Path(__file__).resolve().parents[2] / "models"
TOKENIZER = MODELS / "tokenizer.json"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def held_out_text() -> TokenStream:
    prompts = json.loads(PATH.read_text(encoding="utf-8"))["prompts"][:3]
    files = [SourceFile(prompt["id"], prompt["text"]) for prompt in prompts]
    return encode_corpus(files, TOKENIZER)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_target_has_the_structure_of_the_shipped_one(
    family: str, tmp_path: Path
) -> None:
    arch = FAMILIES[family]
    path = tmp_path / f"tiny-{arch.name}-f16.gguf"
    export_trunk(path, Trunk(arch), MTPHead(arch), TOKENIZER)
    assert structure_differences(path, MODELS / path.name) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_eagle3_draft_has_the_structure_of_the_shipped_one(
    family: str, tmp_path: Path
) -> None:
    arch = FAMILIES[family]
    path = tmp_path / f"tiny-{arch.name}-eagle3-f16.gguf"
    export_eagle3(path, Eagle3Head(arch), TOKENIZER)
    assert structure_differences(path, MODELS / path.name) == []


def test_an_exported_draft_has_the_structure_of_the_shipped_one(tmp_path: Path) -> None:
    path = tmp_path / "tiny-draft-f16.gguf"
    export_trunk(path, Trunk(DRAFT), None, TOKENIZER)
    assert structure_differences(path, MODELS / path.name) == []


@pytest.mark.parametrize("arch", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_export_and_import_keep_every_logit(arch: Architecture, tmp_path: Path) -> None:
    trunk, head, draft = Trunk(arch), MTPHead(arch), Eagle3Head(arch)
    export_trunk(tmp_path / "target-f32.gguf", trunk, head, TOKENIZER, is_half=False)
    export_eagle3(tmp_path / "eagle3-f32.gguf", draft, TOKENIZER, is_half=False)
    again = load_trunk(tmp_path / "target-f32.gguf", arch)
    heads = (
        (head, load_mtp(tmp_path / "target-f32.gguf", arch)),
        (draft, load_eagle3(tmp_path / "eagle3-f32.gguf", arch)),
    )
    ids = torch.randint(0, arch.n_vocab, (1, 40))
    with torch.no_grad():
        output, output_again = trunk(ids), again(ids)
        torch.testing.assert_close(output.logits, output_again.logits)
        for ours, theirs in heads:
            steps = zip(
                ours.unroll(trunk, ids, output, 2),
                theirs.unroll(again, ids, output_again, 2),
                strict=True,
            )
            for left, right in steps:
                torch.testing.assert_close(left, right)


@pytest.mark.parametrize("family", FAMILIES)
def test_shipped_models_predict_held_out_code(family: str) -> None:
    arch = FAMILIES[family]
    stream = held_out_text()
    target = MODELS / f"tiny-{arch.name}-f16.gguf"
    trunk = load_trunk(target, arch)
    with torch.no_grad():
        loss = NextTokenLoss(trunk)(stream.windows(512, 4)).item()
    assert loss < 3.2  # a fresh or garbled model has 7.6 nats and more
    eagle3 = load_eagle3(MODELS / f"tiny-{arch.name}-eagle3-f16.gguf", arch)
    for head in (load_mtp(target, arch), eagle3):
        assert min(held_out_acceptance(trunk, head, stream)) > 0.5


def test_the_chunked_delta_rule_equals_the_recurrence() -> None:
    n_tokens, n_head, n_state = 150, 2, 8
    query, key, value = torch.randn(3, 1, n_tokens, n_head, n_state)
    key = key / key.norm(dim=-1, keepdim=True)
    log_keep, beta = -torch.rand(1, n_tokens, n_head), torch.rand(1, n_tokens, n_head)
    chunked = gated_delta_rule(query, key, value, log_keep, beta)
    for head in range(n_head):
        state = torch.zeros(n_state, n_state)
        for i in range(n_tokens):
            k, v = key[0, i, head], value[0, i, head]
            state = state * log_keep[0, i, head].exp()
            state = state + torch.outer(k, beta[0, i, head] * (v - k @ state))
            torch.testing.assert_close(
                chunked[0, i, head], query[0, i, head] @ state, atol=1e-4, rtol=1e-3
            )


def test_unrolled_attention_sees_what_a_drafting_head_sees() -> None:
    n_tokens, width, step = 9, 4, 2
    query = torch.randn(1, 2, n_tokens, width)
    keys = [torch.randn(1, 1, n_tokens, width) for _ in range(step + 1)]
    values = [torch.randn(1, 1, n_tokens, width) for _ in range(step + 1)]
    mixed = unrolled_attention(query, keys, values)
    for p in range(step, n_tokens):
        seen = [(0, i) for i in range(p - step + 1)] + [(1, p - 1), (2, p)]
        key = torch.stack([keys[made_at][0, 0, i] for made_at, i in seen])
        value = torch.stack([values[made_at][0, 0, i] for made_at, i in seen])
        for head in range(2):
            weights = (key @ query[0, head, p] * width**-0.5).softmax(0)
            torch.testing.assert_close(mixed[0, head, p], weights @ value)


def test_a_draft_loss_gives_exact_gradients_of_soft_cross_entropy() -> None:
    arch = Architecture("qwen35", n_vocab=64, n_embd=32, n_layer=1, n_head=2, n_head_kv=1, n_ff=32)
    trunk = Trunk(arch).requires_grad_(False)
    head = MTPHead(arch)
    ids = torch.randint(0, arch.n_vocab, (2, 33))
    (ours,) = torch.autograd.grad(DraftLoss(trunk, head)(ids, progress=0.0), head.merge.weight)
    output = trunk(ids[:, :-1])
    (logits,) = head.unroll(trunk, ids[:, :-1], output, 1)
    expected = output.logits.softmax(-1)
    loss = -(expected * logits.log_softmax(-1)).sum(-1)[:, 1:].mean()
    (exact,) = torch.autograd.grad(loss, head.merge.weight)
    similarity = torch.cosine_similarity(ours.flatten(), exact.flatten(), dim=0)
    assert similarity > 0.999  # bfloat16 against float32


def test_training_lowers_the_loss() -> None:
    arch = Architecture("qwen3", n_vocab=32, n_embd=32, n_layer=1, n_head=2, n_head_kv=1, n_ff=32)
    stream = TokenStream(np.arange(5_000, dtype=np.uint16) % 32)
    trunk = Trunk(arch)
    loss = NextTokenLoss(trunk)
    ids = stream.windows(32, 4)
    before = loss(ids).item()
    lines: list[str] = []
    schedule = Schedule(2.0, 1e-2, n_batch=4, n_tokens=32, n_warmup=5)
    train(trunk.parameters(), loss, stream, schedule, lines.append)
    assert loss(ids).item() < 0.5 * before
    assert lines[-1].endswith("done")


def test_a_schedule_warms_up_falls_and_lengthens_its_sequences() -> None:
    schedule = Schedule(100, 1.0, n_batch=16, n_tokens=256, n_tokens_late=1024, n_warmup=10)
    assert schedule.rate(0.0, 0) == pytest.approx(0.1)
    assert schedule.rate(0.0, 9) == pytest.approx(1.0)
    assert schedule.rate(1.0, 99) == pytest.approx(0.05)
    assert schedule.batch_shape(0.75) == (16, 256)
    assert schedule.batch_shape(0.76) == (4, 1024)


def test_the_same_files_give_the_same_tokenizer(tmp_path: Path) -> None:
    words = [f"name_{i} = function_{i * 7 % 13}(argument_{i % 5})\n" for i in range(400)]
    files = [SourceFile("a.py", "".join(words))]
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for path in paths:
        train_tokenizer(files, 300, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    stream = encode_corpus(files, paths[0])
    assert stream.tokens[-1] == 0
    assert stream.windows(10).shape[1] == 11
    with pytest.raises(ValueError, match="corpus gives"):
        train_tokenizer([SourceFile("a.py", "x")], 300, tmp_path / "third.json")
