"""Compares PyTorch with the engine on finished files: `python -m models.verify --family dense`.

The same weights and the same tokens must give the same logits, and each draft head the same drafts;
so it shows that llama.cpp understands a file as the training meant it. Needs the built engine.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafthouse_engine import Engine, EngineParams, Model, Sampler, SamplingParams
from drafthouse_engine.options import DraftType
from models.architecture import FAMILIES
from models.losses import DraftHead
from models.measure import load_eagle3, load_mtp, load_trunk
from models.prompts import PATH, PromptFile
from models.trunk import Trunk

__all__ = ["Agreement", "compare_drafts", "compare_logits", "main"]

LOGIT_TOLERANCE = 0.05
"""Largest difference of a logit: llama.cpp rounds activations to float16 in each product."""

DRAFT_SHARE_MIN = 0.95
"""Share of drafted tokens that must be equal: rounding may flip a near-tie."""

N_TOKENS = 600
N_DRAFT = 3
DRAFT_EVERY = 32


@dataclass(frozen=True, slots=True)
class Agreement:
    """How near two computations are."""

    worst: float
    """Largest absolute difference of a logit."""

    n_equal: int
    """Equal choices (arg-max tokens or drafted tokens)."""

    n_compared: int
    """Compared choices."""


def compare_logits(trunk: Trunk, target: Model, tokens: list[int]) -> Agreement:
    """Compares the target's logits at every position of a text.

    Args:
        trunk: The target in PyTorch.
        target: The same in the engine.
        tokens: The text, at most a context.
    """
    with torch.no_grad():
        ours = trunk(torch.tensor([tokens])).logits[0].numpy()
    with Engine(target, None, EngineParams(flash_attention=False)) as engine:
        _begin(engine)
        theirs = np.stack([_step(engine, i, token) for i, token in enumerate(tokens)])
    n_equal = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    return Agreement(float(np.abs(ours - theirs).max()), n_equal, len(tokens))


def compare_drafts(trunk: Trunk, head: DraftHead, engine: Engine, tokens: list[int]) -> Agreement:
    """Compares the drafts after every thirty-second token of a text.

    Args:
        trunk: The target in PyTorch.
        head: The draft head in PyTorch.
        engine: The same pair in the engine; its first sequence is free.
        tokens: The text, at most a context.
    """
    n_equal = n_compared = 0
    for n_past in range(DRAFT_EVERY, len(tokens) - N_DRAFT, DRAFT_EVERY):
        theirs = _engine_draft(engine, tokens[: n_past + 1])
        ours = _torch_draft(trunk, head, tokens[: n_past + 1], len(theirs))
        n_compared += len(theirs)
        n_equal += sum(left == right for left, right in zip(ours, theirs, strict=True))
    return Agreement(0.0, n_equal, n_compared)


def main() -> int:
    """Compares a family's shipped files, and prints one line for each part.

    Returns:
        Exit status: 0 if all agree.
    """
    parser = argparse.ArgumentParser(prog="python -m models.verify", description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, default="dense", help="which target")
    parser.add_argument("--models", type=Path, default=Path(__file__).parent, help="folder")
    options = parser.parse_args()
    arch = FAMILIES[options.family]
    target_path = options.models / f"tiny-{arch.name}-f16.gguf"
    eagle3_path = options.models / f"tiny-{arch.name}-eagle3-f16.gguf"
    trunk, target = load_trunk(target_path, arch), Model(target_path)
    tokens = _text_tokens(target)
    logits = compare_logits(trunk, target, tokens)
    print(f"logits: differ by {logits.worst:.4f}, choice {logits.n_equal}/{logits.n_compared}")
    is_good = logits.worst <= LOGIT_TOLERANCE
    mtp, eagle3 = load_mtp(target_path, arch), load_eagle3(eagle3_path, arch)
    with _engine(target, None, "mtp") as engine:
        is_good &= _report("mtp", compare_drafts(trunk, mtp, engine, tokens))
    with _engine(target, Model(eagle3_path), "eagle3") as engine:
        is_good &= _report("eagle3", compare_drafts(trunk, eagle3, engine, tokens))
    return 0 if is_good else 1


def _text_tokens(target: Model) -> list[int]:
    prompts: PromptFile = json.loads(PATH.read_text(encoding="utf-8"))
    return [int(token) for token in target.tokenize(prompts["prompts"][0]["text"])[:N_TOKENS]]


def _engine(target: Model, draft: Model | None, draft_type: DraftType) -> Engine:
    params = EngineParams(draft_type=draft_type, n_draft_max=N_DRAFT, flash_attention=False)
    return Engine(target, draft, params)


def _begin(engine: Engine) -> None:
    engine.seq_begin(0, Sampler(engine.target, SamplingParams(temperature=0)))


def _step(engine: Engine, position: int, token: int) -> npt.NDArray[np.float32]:
    # One token at a time: an engine without drafts gives one row of logits a sequence and decode.
    engine.decode([token], [position], [0], [True])
    engine.process()
    return engine.logits(0)


def _report(name: str, agreement: Agreement) -> bool:
    print(f"{name}: drafts {agreement.n_equal}/{agreement.n_compared} equal")
    return agreement.n_equal >= DRAFT_SHARE_MIN * agreement.n_compared


def _engine_draft(engine: Engine, tokens: list[int]) -> list[int]:
    """Drafts after the last token, which is not decoded yet."""
    n_past = len(tokens) - 1
    _begin(engine)
    is_output = [False] * (n_past - 1) + [True]
    engine.decode(tokens[:-1], list(range(n_past)), [0] * n_past, is_output)
    engine.process()
    (draft,) = engine.draft_many([(0, n_past, tokens[-1], N_DRAFT)])
    engine.seq_end(0)
    return draft


def _torch_draft(trunk: Trunk, head: DraftHead, tokens: list[int], n_draft: int) -> list[int]:
    draft: list[int] = []
    with torch.no_grad():
        for step in range(n_draft):
            # Step j at the newest position: j own rows, and the target's rows before them.
            ids = torch.tensor([tokens + draft])
            logits = _last(list(head.unroll(trunk, ids, trunk(ids), step + 1)))
            draft.append(int(logits.argmax()))
    return draft


def _last(steps: list[Tensor]) -> Tensor:
    return steps[-1][0, -1]


if __name__ == "__main__":
    sys.exit(main())
