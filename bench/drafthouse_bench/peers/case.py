"""Which cases `drafthouse-bench peers` measures, and how long that takes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drafthouse_bench.demos import CHECKOUT, DEMOS, MODELS, N_DRAFT, draft_models
from drafthouse_server.config import Config

__all__ = [
    "OWN_DEFAULTS",
    "PeerCase",
    "PeerPlan",
    "Target",
    "describe_estimate",
    "find_target",
    "parse_only",
]

_BENCH_MODELS = CHECKOUT / "build" / "bench"
_BENCH_DRAFT = "draft-30m-Q8_0.gguf"

SCENARIOS = ("closed", "open", "stall", "behind", "chats", "mixed", "defaults")
"""Kinds of load."""

OWN_DEFAULTS = ("behind", "chats", "defaults")
"""Those in which each server has its own defaults."""

_DEFAULTS_MODELS = ("qwen3-0.6b-like-Q4_0", *DEMOS)
_DEFAULTS_STREAMS = (1, 8)
_BEHIND_PROMPTS = (2000,)
_CHATS_PROMPTS = (300,)
_CHATS_STREAMS = (16,)

NGRAM = "ngram-simple"
"""The n-gram kind of both contenders."""

_N_DRAFT_NGRAM = 8
"""An n-gram drafter proposes nothing shorter than 4."""

_STARTUP_S = {True: 3.0, False: 8.0}
"""Seconds to start both servers and compare their tokens, by: demo model or not; estimated."""

_TOKENS_PER_S = {True: 2000.0, False: 30.0}
"""Tokens per second of the slower server, by: demo model or not; for small machines."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model of the benchmark with what belongs to it."""

    name: str
    """Name of the model, as given to `--models`."""
    path: Path
    """The GGUF file."""
    drafts: Mapping[str, Path]
    """Draft models by draft type."""
    is_random: bool
    """Whether its weights are random, so that acceptance must be synthetic."""


def find_target(name: str) -> Target:
    """Returns a demo model, a random-weight model of `python -m models.bench_models`, or a file.

    Raises:
        ValueError: there is none of this name; says what makes it.
    """
    if name in DEMOS:
        return Target(name, MODELS / DEMOS[name][0], draft_models(name), is_random=False)
    path = Path(name) if _is_file(name) else _BENCH_MODELS / f"{name}.gguf"
    if not path.exists():
        shape, _, quant = name.rpartition("-")
        made = f"'{shape} draft-30m --quants {quant} Q8_0'" if shape and "/" not in name else "…"
        raise ValueError(
            f"there is no model {name!r}: dense and hybrid are shipped, a file's path ends in"
            f" .gguf, `make bench-models ARGS={made}` makes others"
        )
    if _is_file(name):
        return Target(name, path, {}, is_random=False)
    draft = _BENCH_MODELS / _BENCH_DRAFT
    return Target(name, path, {"simple": draft} if draft.exists() else {}, is_random=True)


def _is_file(name: str) -> bool:
    """Whether a model is a file of the user's own."""
    return name.endswith(".gguf")


@dataclass(frozen=True, slots=True)
class PeerCase:
    """What is measured at once, for both contenders."""

    scenario: str
    """One of `SCENARIOS`."""
    model: str
    """Name of the target."""
    draft: str
    """How drafts are made."""
    streams: int
    """Requests at once; under an open load, slots."""
    load: float | None = None
    """Open: requests per second, as a share of what the slower contender manages."""
    acceptance: float | None = None
    """Synthetic acceptance of each draft position, given those before it; None: the model's own."""
    n_prompt: int | None = None
    """Tokens of every prompt; None: lengths that vary, by model."""

    @property
    def name(self) -> str:
        """All of it in a line."""
        parts = [self.scenario, self.model, self.draft, f"× {self.streams}"]
        if self.load is not None:
            parts.append(f"load {self.load:.0%}")
        if self.acceptance is not None:
            parts.append(f"acceptance {self.acceptance:g}")
        if self.n_prompt is not None:
            parts.append(f"prompts of {self.n_prompt}")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """What to measure, and how long."""

    models: tuple[str, ...]
    """Targets of the closed and open loops."""
    drafts: tuple[str, ...]
    """Draft types."""
    streams: tuple[int, ...]
    """Requests at once of the closed loop."""
    loads: tuple[float, ...]
    """Shares of capacity of the open loop."""
    acceptances: tuple[float, ...]
    """Synthetic acceptance rates of models with random weights."""
    scenarios: tuple[str, ...]
    """Names of `SCENARIOS` to run."""
    stall_model: str
    """Target with room for the long prompt."""
    n_long: int
    """Tokens of the long prompt."""
    only: Mapping[str, frozenset[str]]
    """Selection, as `parse_only` returns it."""
    n_rounds: int
    """Turns of each contender."""
    round_s: float
    """Seconds of a turn, about."""
    n_threads: int
    """Threads of a decode."""
    n_output: int = 0
    """Tokens of a request; 0: 96 of a demo model, 32 of others."""
    defaults_models: tuple[str, ...] = _DEFAULTS_MODELS
    """Targets of the scenarios with each side's own defaults."""
    defaults_streams: tuple[int, ...] = _DEFAULTS_STREAMS
    """Concurrent requests of that scenario."""
    stall_streams: tuple[int, ...] = (8,)
    """Streams beside which the long prompt comes."""
    chats_streams: tuple[int, ...] = _CHATS_STREAMS
    """Conversations at once."""
    n_prompts: tuple[int, ...] = ()
    """Prompt lengths of these scenarios, a case for each; empty: lengths that vary, 2,000 of long
    prompts, and 300 of a conversation's first message."""
    n_waves: int = 3
    """Requests of each stream in a turn of that scenario, at least."""

    def cases(self) -> list[PeerCase]:
        """Returns the cases that are selected, in the order in which they are measured."""
        every = [*self._closed(), *self._open(), *self._stall(), *self._behind()]
        every += [*self._chats(), *self._mixed(), *self._defaults()]
        return [case for case in every if _is_selected(case, self.only)]

    def _closed(self) -> Iterator[PeerCase]:
        for model, draft, rate in self._drafted("closed"):
            for streams in self.streams:
                yield PeerCase("closed", model, draft, streams, acceptance=rate)

    def _open(self) -> Iterator[PeerCase]:
        for model, draft, rate in self._drafted("open"):
            if draft not in {"none", "mtp"} and "draft" not in self.only:
                continue
            for load in self.loads:
                yield PeerCase("open", model, draft, 16, load=load, acceptance=rate)

    def _stall(self) -> Iterator[PeerCase]:
        if "stall" in self.scenarios:
            rate = self.acceptances[-1]
            for streams in self.stall_streams:
                yield PeerCase("stall", self.stall_model, "none", streams)
                yield PeerCase("stall", self.stall_model, "mtp", streams, acceptance=rate)

    def _behind(self) -> Iterator[PeerCase]:
        if "behind" in self.scenarios:
            for model in self.defaults_models:
                for n_prompt in self.n_prompts or _BEHIND_PROMPTS:
                    if model not in DEMOS:  # their contexts are shorter
                        yield PeerCase("behind", model, "own", 1, n_prompt=n_prompt)

    def _chats(self) -> Iterator[PeerCase]:
        if "chats" in self.scenarios:
            for model in self.defaults_models:
                for n_prompt in self.n_prompts or _CHATS_PROMPTS:
                    for streams in self.chats_streams:
                        if model not in DEMOS:
                            yield PeerCase("chats", model, "own", streams, n_prompt=n_prompt)

    def _mixed(self) -> Iterator[PeerCase]:
        if "mixed" in self.scenarios:
            for streams in (8, 32):
                yield PeerCase("mixed", "dense", "mtp", streams)

    def _defaults(self) -> Iterator[PeerCase]:
        if "defaults" in self.scenarios:
            for model in self.defaults_models:
                for n_prompt in self.n_prompts or (None,):
                    for streams in self.defaults_streams:
                        yield PeerCase("defaults", model, "own", streams, n_prompt=n_prompt)

    def _drafted(self, scenario: str) -> Iterator[tuple[str, str, float | None]]:
        """Yields model, draft type and synthetic acceptance of a scenario's cases."""
        if scenario not in self.scenarios:
            return
        for model in self.models:
            for draft in self.drafts:
                if model in DEMOS or _is_file(model) or draft == "none":
                    yield model, draft, None
                elif draft in {"mtp", "simple"}:  # what random weights can draft
                    for rate in self.acceptances:
                        yield model, draft, rate

    def n_output_of(self, target: Target) -> int:
        """Returns the tokens of a request."""
        return self.n_output or (32 if target.is_random else 96)

    def prompt_bounds(self, target: Target) -> tuple[int, int]:
        """Returns the tokens of the shortest and the longest prompt."""
        return (16, 48) if target.is_random else (64, 256)

    def config(self, case: PeerCase, target: Target) -> Config:
        """Returns the settings of a case, for both contenders; with own defaults, those of ours.

        Raises:
            ConfigError: a draft model is missing.
        """
        if case.scenario in OWN_DEFAULTS:
            return Config(model=str(target.path))
        draft_type = NGRAM if case.draft == "ngram" else case.draft
        n_draft = _N_DRAFT_NGRAM if case.draft == "ngram" else N_DRAFT
        n_ctx_seq = self.prompt_bounds(target)[1] + self.n_output_of(target) + n_draft + 1
        rates = [] if case.acceptance is None else [case.acceptance**i for i in range(1, 4)]
        return Config(
            model=str(target.path),
            draft_type=draft_type,
            model_draft=str(target.drafts.get(draft_type, "")),
            parallel=case.streams + (case.scenario == "stall"),
            max_model_len=self.n_long + 256 if case.scenario == "stall" else n_ctx_seq,
            threads=self.n_threads,
            draft_max=n_draft,
            draft_default=n_draft,
            prefix_cache=False,  # every prompt is computed, as by the peer (`peer_flags`)
            synth_rates=tuple(f"{rate:.6f}" for rate in rates),
            log_level="warning",
        )

    def n_requests(self, n_streams: int, n_output: int, tokens_per_s: float) -> int:
        """Returns the requests of a closed turn: whole waves of streams, about `round_s` long.

        Args:
            n_streams: Requests at once.
            n_output: Tokens of each.
            tokens_per_s: Of the slower contender.
        """
        n_waves = self.round_s * tokens_per_s / (n_output * n_streams)
        n_least = 4 if n_streams == 1 else 1
        return n_streams * max(n_least, round(n_waves))

    def estimate_s(self, case: PeerCase) -> float:
        """Returns about how long a case takes, in seconds."""
        is_demo = case.model in DEMOS
        rate, n_output = _TOKENS_PER_S[is_demo], 96 if is_demo else 32
        wave_s = case.streams * (self.n_output or n_output) / rate
        turn_s = max(self.round_s, wave_s)
        if case.scenario == "open":
            turn_s = max(4 * self.round_s, wave_s) + wave_s / 2
        if case.scenario == "defaults":
            prompt_s = case.streams * (case.n_prompt or 0) / (10 * rate)
            turn_s = max(self.round_s, self.n_waves * (wave_s + prompt_s))
        if case.scenario == "stall":
            turn_s = 2 * self.round_s + 3 * self.n_long / (1000 if "50m" in case.model else 150)
        if case.scenario == "behind":
            turn_s = 4 * (case.n_prompt or 0) / (5 * rate)
        if case.scenario == "chats":
            turn_s = case.streams * ((case.n_prompt or 0) / (5 * rate) + 4 * n_output / rate)
        n_turns = {"mixed": 6, "defaults": 4}.get(case.scenario, 2) * self.n_rounds
        return _STARTUP_S[is_demo] + 1.3 * n_turns * turn_s + 2 * min(wave_s, 8.0)


def describe_estimate(plan: PeerPlan, cases: Sequence[PeerCase]) -> str:
    """Returns how many cases there are and about how long they take."""
    minutes = math.ceil(sum(map(plan.estimate_s, cases)) / 60)
    return (
        f"{len(cases)} cases, {plan.n_rounds} rounds of about {plan.round_s:g} s each:"
        f" about {minutes} min on a small machine that is quiet"
    )


_KEYS = ("scenario", "model", "draft", "streams", "load", "acceptance", "n_prompt")


def parse_only(text: str) -> dict[str, frozenset[str]]:
    """Returns a selection: `draft=mtp+none,model=dense,streams=8`.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    chosen: dict[str, frozenset[str]] = {}
    for part in text.split(","):
        key, _, values = part.partition("=")
        if key not in _KEYS or not values:
            raise argparse.ArgumentTypeError(
                f"{part!r}; write KEY=VALUE or KEY=VALUE+VALUE with a key of {', '.join(_KEYS)}"
            )
        chosen[key] = frozenset(values.split("+"))
    return chosen


def _is_selected(case: PeerCase, only: Mapping[str, frozenset[str]]) -> bool:
    def shown(key: str) -> str:
        value = getattr(case, key)
        return f"{value:g}" if isinstance(value, float) else str(value)

    return all(shown(key) in values for key, values in only.items())
