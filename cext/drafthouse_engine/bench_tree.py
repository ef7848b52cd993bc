"""Measures where a draft pays: `python -m drafthouse_engine.bench_tree TARGET DRAFT PROMPTS`.

Every way of drafting writes the same prompts on, greedily, one sequence alone. Chain and tree go
through the same decoders, so that they differ in what they draft only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from drafthouse_engine._spec import Model
from drafthouse_engine.errors import Unsupported
from drafthouse_engine.generate import Generation, TreeShape, generate

__all__ = ["main"]

CHAINS = (2, 3, 4, 6)
SHAPES = (
    TreeShape(2, 2, 4),
    TreeShape(2, 4, 8),
    TreeShape(3, 2, 6),
    TreeShape(3, 4, 12),
    TreeShape(4, 4, 12),
    TreeShape(4, 4, 16),
    TreeShape(6, 4, 16),
    TreeShape(6, 8, 32),
)


class _Bench:
    def __init__(self, target: Model, draft: Model, prompts: Sequence[Sequence[int]]) -> None:
        self._target = target
        self._draft = draft
        self._prompts = prompts

    def autoregressive(self, n_tokens: int, n_threads: int) -> list[Generation]:
        return [
            generate(self._target, prompt, n_tokens=n_tokens, n_threads=n_threads)
            for prompt in self._prompts
        ]

    def chain(self, n_draft: int, n_tokens: int, n_threads: int) -> list[Generation]:
        return [
            generate(
                self._target,
                prompt,
                method="vanilla",
                draft=self._draft,
                n_draft=n_draft,
                n_tokens=n_tokens,
                n_threads=n_threads,
            )
            for prompt in self._prompts
        ]

    def tree(self, shape: TreeShape, n_tokens: int, n_threads: int) -> list[Generation]:
        return [
            generate(
                self._target,
                prompt,
                method="tree",
                draft=self._draft,
                shape=shape,
                n_tokens=n_tokens,
                n_threads=n_threads,
            )
            for prompt in self._prompts
        ]


def _line(name: str, found: Sequence[Generation]) -> str:
    n_tokens = sum(len(one.tokens) for one in found)
    n_forwards = sum(one.stats.n_target_forwards for one in found)
    n_drafted = sum(one.stats.n_drafted for one in found)
    n_draft_forwards = sum(one.stats.n_draft_forwards for one in found)
    speed = statistics.median(one.tokens_per_s for one in found)
    return (
        f"{name:<24}{n_tokens / n_forwards:>14.2f}{n_draft_forwards / n_forwards:>14.1f}"
        f"{n_drafted / n_forwards:>14.1f}{speed:>12.0f}\n"
    )


def _prompts(model: Model, path: Path, n_prompts: int, n_prompt: int) -> list[list[int]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    texts = [entry["text"] for entry in content["prompts"][:n_prompts]]
    return [[int(token) for token in model.tokenize(text)[:n_prompt]] for text in texts]


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m drafthouse_engine.bench_tree", description="Chain and tree drafts, measured"
    )
    parser.add_argument("target", type=Path, help="GGUF file of the target")
    parser.add_argument("draft", type=Path, help="GGUF file of an ordinary draft model")
    parser.add_argument("prompts", type=Path, help='JSON: {"prompts": [{"text": …}, …]}')
    parser.add_argument("--n-prompts", type=int, default=8, help="prompts, of the first (8)")
    parser.add_argument("--n-prompt", type=int, default=128, help="tokens of a prompt (128)")
    parser.add_argument("--n-tokens", type=int, default=128, help="new tokens of a prompt (128)")
    parser.add_argument("--n-threads", type=int, default=1, help="threads; 0 is all cores (1)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line per way of drafting: what a forward of the target yields, what it costs."""
    options = _arguments(arguments)
    with Model(options.target) as target, Model(options.draft) as draft:
        prompts = _prompts(target, options.prompts, options.n_prompts, options.n_prompt)
        bench = _Bench(target, draft, prompts)
        sizes = (options.n_tokens, options.n_threads)
        write = sys.stdout.write
        write(
            f"{'':<24}{'tokens/forward':>14}{'draft fwd/fwd':>14}{'drafts/fwd':>14}"
            f"{'tokens/s':>12}\n"
        )
        write(_line("autoregressive", bench.autoregressive(*sizes)))
        for n_draft in CHAINS:
            write(_line(f"chain {n_draft}", bench.chain(n_draft, *sizes)))
        for shape in SHAPES:
            name = f"tree {shape.depth} x {shape.width}, {shape.n_nodes} nodes"
            try:
                write(_line(name, bench.tree(shape, *sizes)))
            except Unsupported as error:
                write(f"trees: {error}\n")
                break
    return 0


if __name__ == "__main__":
    sys.exit(main())
