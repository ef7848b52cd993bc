"""Measures where a draft pays: `drafthouse-bench tree TARGET DRAFT PROMPTS`.

DRAFT is an ordinary small model, or an EAGLE-3 model of the target.

Every way of drafting writes the same prompts on, greedily, one sequence alone, through the same
decoders, so that they differ in what they draft only. A chain of an EAGLE-3 model is a tree of
width 1; its lines "engine chain" are the chain that `generate(method="eagle3")` drafts, without the
decoders' copies of logits to Python. The columns: tokens that a forward of the
target yields, forwards of the draft and drafted tokens per forward of the target, speed by the
clock, and by the processor's time, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from drafthouse_engine._spec import Model
from drafthouse_engine.decoder import Decoder
from drafthouse_engine.decoder_config import DecoderConfig
from drafthouse_engine.decoder_pool import DecoderPool
from drafthouse_engine.eagle3_drafter import Eagle3Drafter
from drafthouse_engine.generate import (
    Generation,
    TreeShape,
    generate,
    generate_autoregressive,
    generate_tree,
    generate_vanilla,
)
from drafthouse_engine.tree_decoder import TreeDecoder

__all__ = ["main"]

Way: TypeAlias = Callable[[Sequence[int], int], Generation]
HEADER: Final = "tokens/forward drafts/target  nodes/target    tokens/s  tokens/CPU s\n"
CHAINS: Final = (2, 3, 4, 6)
SHAPES: Final = (
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
    """Decoders that are used again for every prompt and way of drafting."""

    def __init__(self, *decoders: Decoder) -> None:
        self._decoders = decoders

    def measure(self, way: Way, prompts: Sequence[Sequence[int]], n_tokens: int) -> str:
        """Returns the numbers of one way of drafting as text."""
        found = [self._run(way, prompt, n_tokens) for prompt in prompts]
        texts = [text for text, _ in found]
        n_forwards = sum(text.stats.n_target_forwards for text in texts)
        numbers = (
            sum(len(text.tokens) for text in texts) / n_forwards,
            sum(text.stats.n_draft_forwards for text in texts) / n_forwards,
            sum(text.stats.n_drafted for text in texts) / n_forwards,
        )
        speed = statistics.median(text.tokens_per_s for text in texts)
        cpu_speed = statistics.median(len(text.tokens) / cpu_s for text, cpu_s in found)
        columns = "".join(f"{number:>14.2f}" for number in numbers)
        return f"{columns}{speed:>12.0f}{cpu_speed:>14.0f}\n"

    def _run(self, way: Way, prompt: Sequence[int], n_tokens: int) -> tuple[Generation, float]:
        """Generates; the processor time is that of all tokens but the first."""
        cpu_s = -self._timed(way, prompt, 1)[1]
        text, full_s = self._timed(way, prompt, n_tokens)
        return text, max(1e-9, cpu_s + full_s)

    def _timed(self, way: Way, prompt: Sequence[int], n_tokens: int) -> tuple[Generation, float]:
        for decoder in self._decoders:
            decoder.rollback_to(0)
        start_s = time.process_time()
        text = way(prompt, n_tokens)
        return text, time.process_time() - start_s


def _prompts(model: Model, path: Path, n_prompts: int, n_prompt: int) -> list[list[int]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    texts = [entry["text"] for entry in content["prompts"][:n_prompts]]
    return [[int(token) for token in model.tokenize(text)[:n_prompt]] for text in texts]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="drafthouse-bench tree", description="Chain and tree drafts, measured"
    )
    parser.add_argument("target", type=Path, help="GGUF file of the target")
    parser.add_argument("draft", type=Path, help="GGUF file of a draft model, ordinary or EAGLE-3")
    parser.add_argument("prompts", type=Path, help='JSON: {"prompts": [{"text": …}, …]}')
    parser.add_argument("--n-prompts", type=int, default=8, help="prompts, of the first (8)")
    parser.add_argument("--n-prompt", type=int, default=128, help="tokens of a prompt (128)")
    parser.add_argument("--n-tokens", type=int, default=128, help="new tokens of a prompt (128)")
    parser.add_argument("--n-threads", type=int, default=1, help="threads; 0 is all cores (1)")
    return parser.parse_args()


def _ways(target: Decoder, draft: Decoder) -> Iterator[tuple[str, Way]]:
    yield "autoregressive", lambda prompt, n: generate_autoregressive(target, prompt, n)
    for n_draft in CHAINS:
        yield (
            f"chain {n_draft}",
            partial(generate_vanilla, target, draft, n_draft=n_draft),
        )
    if isinstance(target, TreeDecoder) and isinstance(draft, TreeDecoder):
        for shape in SHAPES:
            yield (
                f"tree {shape.depth} x {shape.width}, {shape.n_nodes} nodes",
                partial(generate_tree, target, draft, shape=shape),
            )


def _eagle3_ways(
    target: TreeDecoder, drafter: Eagle3Drafter, n_threads: int
) -> Iterator[tuple[str, Way]]:
    yield "autoregressive", lambda prompt, n: generate_autoregressive(target, prompt, n)
    for n_draft in CHAINS:
        shape = TreeShape(n_draft, 1, n_draft)
        yield f"chain {n_draft}", partial(generate_tree, target, drafter, shape=shape)
    for shape in SHAPES:
        yield (
            f"tree {shape.depth} x {shape.width}, {shape.n_nodes} nodes",
            partial(generate_tree, target, drafter, shape=shape),
        )
    yield "engine, no draft", _engine_way(target.pool.model, None, 1, n_threads)
    for n_draft in CHAINS:
        way = _engine_way(target.pool.model, drafter.model, n_draft, n_threads)
        yield f"engine chain {n_draft}", way


def _engine_way(target: Model, draft: Model | None, n_draft: int, n_threads: int) -> Way:
    def way(prompt: Sequence[int], n_tokens: int) -> Generation:
        return generate(
            target,
            prompt,
            method="eagle3" if draft else "autoregressive",
            draft=draft,
            n_tokens=n_tokens,
            n_draft=n_draft,
            n_threads=n_threads,
        )

    return way


def _measure(
    bench: _Bench,
    ways: Iterator[tuple[str, Way]],
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
) -> None:
    for name, way in ways:
        sys.stdout.write(f"{name:<24}" + bench.measure(way, prompts, n_tokens))
        sys.stdout.flush()


def _decoder(pool: DecoderPool) -> Decoder:
    return pool.tree_decoder() if pool.limits.n_branch_max > 0 else pool.decoder()


def main() -> int:
    """Prints one line per way of drafting: what a forward of the target yields, what it costs."""
    options = _arguments()
    sys.stdout.write(f"{'':<24}" + HEADER)
    with Model(options.target) as model, Model(options.draft) as draft_model:
        n_ctx = options.n_prompt + options.n_tokens + 64
        config = DecoderConfig(n_branch_max=64, n_ctx_seq=n_ctx, n_threads=options.n_threads)
        prompts = _prompts(model, options.prompts, options.n_prompts, options.n_prompt)
        with DecoderPool(model, config) as pool:
            if draft_model.n_target_layers > 0:
                tree_target = pool.tree_decoder()
                with Eagle3Drafter(tree_target, draft_model, config) as drafter:
                    ways = _eagle3_ways(tree_target, drafter, options.n_threads)
                    _measure(_Bench(tree_target), ways, prompts, options.n_tokens)
            else:
                target = _decoder(pool)
                with DecoderPool(draft_model, config) as drafts:
                    draft = _decoder(drafts)
                    ways = _ways(target, draft)
                    _measure(_Bench(target, draft), ways, prompts, options.n_tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
