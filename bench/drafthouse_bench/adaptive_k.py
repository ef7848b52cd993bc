"""Adaptive K beside no drafts and every fixed K, on the real engine, without the network.

    drafthouse-bench adaptive-k [--model dense] [--draft mtp] [--streams 1,8,32]
        [--acceptances real,0.3,0.9] [--slice-s 0.4] [--rounds 5] [--mixed]

Every contender has an engine and a scheduler of its own and takes its turn for a slice of time, in
another order every round; a rate is its median over the rounds. The first round is not counted, but
adaptive's rate in it is shown: it is what a server that has just started gives. `--mixed` gives the
streams of one load prompts and acceptance as they come, half of them sampled at temperature 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from drafthouse_bench.demos import DEMOS, MODELS, PROMPTS, draft_models
from drafthouse_server.cli.tune import read_texts
from drafthouse_server.config import Config
from drafthouse_server.drafting.adaptive import AdaptiveDraft
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.scheduling.sequence import FinishEvent, Request, Sequence, TokensEvent
from drafthouse_server.serving.compose import make_scheduler
from drafthouse_server.step import SamplingOptions

__all__ = ["Contender"]

_N_OUTPUT = 160


@dataclass
class Contender:
    """A way to choose K, with its streams."""

    name: str
    """What the table calls it."""
    config: Config
    """Settings of its engine and scheduler."""
    n_streams: int
    """Requests at once."""
    is_mixed: bool = False
    """Whether every other stream is sampled."""
    n_prompt: int = 64
    """Tokens of a prompt."""
    target_of: LlamaEngine | None = None
    """An engine whose weights it shares."""
    rates: list[float] = field(default_factory=list)
    """Tokens per second, by slice."""
    lengths: Counter[int] = field(default_factory=Counter)
    """How often which K was planned, of generating entries."""

    def __post_init__(self) -> None:
        """Loads the engine and starts the streams."""
        self.engine = LlamaEngine.load(self.config, target_of=self.target_of)
        self.scheduler = make_scheduler(self.engine, self.config)
        texts = read_texts(PROMPTS)
        tokens = [self.engine.tokenize(t, add_special=True, parse_special=False) for t in texts]
        self._prompts = itertools.cycle(
            [t[: self.n_prompt] for t in tokens if len(t) >= self.n_prompt]
        )
        self._n_submitted = 0
        for _ in range(self.n_streams):
            self._submit()

    def _submit(self) -> None:
        n = self._n_submitted
        self._n_submitted += 1
        temperature = 1.0 if self.is_mixed and n % 2 else 0.0
        options = SamplingOptions(temperature=temperature, ignore_eos=True)
        sampler = self.engine.make_sampler(options)
        # Streams that end all at once would be no load that anybody has.
        n_output = _N_OUTPUT // 2 + (n * 37) % _N_OUTPUT
        prompt = next(self._prompts)
        request = Request(str(n), prompt, sampling=options, n_output_max=n_output)
        self.scheduler.submit(Sequence(request, sampler))

    def run(self, seconds: float) -> None:
        """Runs for a slice of time."""
        n_tokens = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            n_tokens += self._step()[0]
        self.rates.append(n_tokens / elapsed)

    def run_steps(self, n_steps: int) -> float:
        """Runs so many steps of the engine, or a few more; returns the tokens per second."""
        n_tokens = n_done = 0
        started = time.perf_counter()
        while n_done < n_steps:
            n_new, n = self._step()
            n_tokens += n_new
            n_done += n
        return n_tokens / (time.perf_counter() - started)

    def _step(self) -> tuple[int, int]:
        """Runs one plan; returns its tokens and steps."""
        n_tokens = 0
        self.scheduler.reap(time.monotonic())
        plan = self.scheduler.plan(time.monotonic())
        self.lengths.update([e.n_draft for e in plan.entries if len(e.tokens) == 1])
        result = self.engine.step(plan)
        for _, event in self.scheduler.commit(result, time.monotonic()):
            if isinstance(event, TokensEvent):
                n_tokens += len(event.tokens)
            elif isinstance(event, FinishEvent):
                self._submit()
        return n_tokens, result.n_steps


def _contenders(arguments: argparse.Namespace, n_streams: int, rate: str) -> list[Contender]:
    common: dict[str, Any] = {
        "model": str(MODELS / DEMOS[arguments.model][0]),
        "parallel": n_streams,
        "max_model_len": 512,
        "prefix_cache": False,
    }
    drafted: dict[str, Any] = {
        "draft_type": arguments.draft,
        "model_draft": str(draft_models(arguments.model).get(arguments.draft, "")),
    }
    if rate != "real":
        drafted["synth_rates"] = tuple(
            f"{float(rate) ** (k + 1):.6f}" for k in range(Config().draft_max)
        )
    cases = {"none": {"draft_type": "none"}}
    for n in arguments.fixed:
        cases[f"K={n}"] = drafted | {"draft_policy": "fixed", "draft_default": n}
    cases["adaptive"] = drafted
    return [
        Contender(name, Config(**common | case), n_streams, arguments.mixed)
        for name, case in cases.items()
    ]


def _measure(arguments: argparse.Namespace, n_streams: int, rate: str) -> None:
    with contextlib.ExitStack() as stack:
        contenders = _contenders(arguments, n_streams, rate)
        for contender in contenders:
            stack.callback(contender.engine.close)
        for i in range(1 + arguments.rounds):
            turn = i % len(contenders)
            for contender in contenders[turn:] + contenders[:turn]:
                contender.run(arguments.slice_s)
    rates = {c.name: statistics.median(c.rates[1:]) for c in contenders}
    adaptive = contenders[-1]
    # Ratios within a round: what the machine does to one round, it does to all of it.
    best = max((name for name in rates if name != "adaptive"), key=rates.__getitem__)
    beside = next(c for c in contenders if c.name == best)
    pairs = zip(adaptive.rates[1:], beside.rates[1:], strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    first = adaptive.rates[0] / beside.rates[0]
    n_all = sum(adaptive.lengths.values())
    chosen = " ".join(f"{k}:{n / n_all:.0%}" for k, n in sorted(adaptive.lengths.items()))
    cells = "  ".join(f"{name} {found:7.0f}" for name, found in rates.items())
    print(f"{n_streams:7}  {rate:>10}  {cells}  x best {ratio:5.2f} ({best})", end="")
    print(f"  first {first:5.2f}", end="")
    policy = adaptive.scheduler.policy
    assert isinstance(policy, AdaptiveDraft), "as configured"
    print(f"  K {chosen}  changes {policy.n_changes}", flush=True)


def main() -> None:
    """Prints a line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dense", choices=sorted(DEMOS))
    parser.add_argument(
        "--draft", default="mtp", choices=("mtp", "eagle3", "simple", "ngram-simple")
    )
    parser.add_argument("--streams", default="1,4,8,16,32")
    parser.add_argument("--acceptances", default="real,0.3,0.6,0.9")
    parser.add_argument("--fixed", default="1,2,4")
    parser.add_argument("--slice-s", type=float, default=0.4)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--mixed", action="store_true")
    arguments = parser.parse_args()
    arguments.fixed = [int(n) for n in arguments.fixed.split(",")]
    for n_streams in map(int, arguments.streams.split(",")):
        for rate in arguments.acceptances.split(","):
            _measure(arguments, n_streams, rate)


if __name__ == "__main__":
    main()
