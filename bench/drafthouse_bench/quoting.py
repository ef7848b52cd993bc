"""N-gram lookup before the drafter: its gain where answers repeat prompts, its cost elsewhere.

    drafthouse-bench quoting [--model FILE] [--draft-type mtp] [--draft-model FILE]
        [--streams 1,4,8,16,32] [--loads edit,plain] [--rounds 3] [--output 96] [--pool 0]
        [--threads 0]

Scheduler and engine without gRPC, adaptive K, greedy; the settings take turns on one engine. Edits
are prompts of a file's beginning, "the same again" and the file's first lines once more; plain
ones are the file's beginning alone. Shown are medians: tokens per second without lookup, with it,
their ratio; with lookup the mean K, and of each source how many of its draft tokens were accepted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from statistics import median

from drafthouse_bench.counts import count, counts
from drafthouse_bench.demos import MODELS, PROMPTS
from drafthouse_server.config import Config
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.scheduling.sequence import Request, Sequence
from drafthouse_server.serving.compose import make_scheduler
from drafthouse_server.serving.metrics import Metrics, Statistics
from drafthouse_server.step import SamplingOptions

GREEDY = SamplingOptions(temperature=0, ignore_eos=True)
N_TEXT = 600
"""Characters of a file that are edited."""
N_AGAIN = 80
"""Characters of that text that the answer is given to begin with."""
N_REQUESTS = 3
"""Requests of each stream, one after the other."""


def prompts(load: str) -> Iterator[str]:
    """Yields prompts of a load, over and over."""
    content = json.loads(PROMPTS.read_text(encoding="utf-8"))
    while True:
        for prompt in content["prompts"]:
            text = prompt["text"][:N_TEXT]
            yield f"{text}\n\n# The same file again:\n{text[:N_AGAIN]}" if load == "edit" else text


def run(engine: LlamaEngine, config: Config, load: str, n_output: int) -> tuple[float, Statistics]:
    """Returns tokens per second of a crowd that fills all slots, and what was counted."""
    scheduler, metrics = make_scheduler(engine, config), Metrics()
    texts = prompts(load)
    n_waiting = config.parallel * N_REQUESTS
    n_emitted, started = 0, time.perf_counter()
    for i in range(n_waiting):
        tokens = engine.tokenize(next(texts), add_special=True, parse_special=False)
        sampler = engine.make_sampler(GREEDY)
        scheduler.submit(
            Sequence(Request(str(i), tokens, sampling=GREEDY, n_output_max=n_output), sampler)
        )
    while not scheduler.is_idle:
        now = time.monotonic()
        scheduler.reap(now)
        result = engine.step(scheduler.plan(now))
        scheduler.commit(result, time.monotonic())
        metrics.count_step(result)
        n_emitted += sum(len(entry.tokens) for entry in result.entries)
    metrics.scheduler = scheduler.counts
    return n_emitted / (time.perf_counter() - started), metrics.statistics()


def _loads(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= {"edit", "plain"}:
        raise ValueError(text)
    return names


def main() -> None:
    """Measures all cases and prints a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=str(MODELS / "tiny-mimo2-f16.gguf"))
    parser.add_argument("--draft-type", default="mtp")
    parser.add_argument("--draft-model", default="")
    parser.add_argument("--streams", type=counts, default=(1, 4, 8, 16, 32))
    parser.add_argument("--loads", type=_loads, default=("edit", "plain"))
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--output", type=count, default=96)
    parser.add_argument("--pool", type=int, default=0)
    parser.add_argument("--n-draft-max", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    print("                    without      with   ratio   mean K   drafter   n-gram  given")
    for streams in options.streams:
        config = Config(
            model=options.model,
            draft_type=options.draft_type,
            model_draft=options.draft_model,
            parallel=streams,
            max_model_len=1024,
            draft_max=options.n_draft_max,
            threads=options.threads,
        )
        first = dataclasses.replace(config, prompt_lookup=True, prompt_lookup_pool=options.pool)
        engine = LlamaEngine.load(config)
        for load in options.loads:
            speeds: list[list[float]] = [[], []]
            counted = Metrics().statistics()
            for _ in range(options.rounds):
                for found, settings in zip(speeds, (config, first), strict=True):
                    speed, counted = run(engine, settings, load, options.output)
                    found.append(speed)
            without, with_ = map(median, speeds)
            sources = counted.by_source
            rates = "".join(f"{source.acceptance_rate:9.2f}" for source in sources.values())
            share = sources["ngram"].n_drafts / max(1, counted.n_drafts)
            print(
                f"{load:>6} × {streams:2} {without:14.0f} {with_:9.0f} {with_ / without:7.2f}"
                f" {counted.mean_n_draft:8.2f} {rates} {share:6.0%}",
                flush=True,
            )
        engine.close()


if __name__ == "__main__":
    main()
