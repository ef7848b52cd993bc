"""`drafthouse tune`: measures this model on this machine, and says which settings to use.

It runs the engine in this process: steps of many widths, draft depths, prompt pieces and numbers of
threads. Each measurement is a median, and each setting that comes out has its figures beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from drafthouse_server.cli import CHECKOUT
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.config import AUTOMATIC, DRAFT_TYPES, Config
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.engine.protocol import Engine
from drafthouse_server.errors import ConfigError, StartupError
from drafthouse_server.step import EngineLimits, PlanEntry, SamplingOptions, Start, StepPlan

__all__ = ["Advice", "Measurements", "add_tune", "advise", "measure", "read_texts", "tune"]

_OPTIONS = SamplingOptions(temperature=0.0, ignore_eos=True)
_N_STEPS = 12
"""Steps of a measurement, after two that warm up."""
_N_STEPS_MIN = 3
_SECONDS_MAX = 2.0
"""Seconds after which a measurement ends, once it has the fewest steps that it may have."""
_N_PROMPT_MAX = 128
"""Tokens of a stream's prompt; a step costs little more with a few hundred cells."""
_GAIN_MIN = 0.02
"""What a larger setting must give more to be worth it."""
_SHARE_OF_BEST = 0.95
"""Share of the best prompt speed that is enough: the smallest batch that reaches it is chosen."""


_N_THREADS_MAX = 512
"""Threads that the setting `threads` may have."""

_N_CTX_SEQ = 512
"""Context of a stream: prompt, output and drafts of all measurements fit."""

_DEMO = "tiny-mimo2-f16.gguf"
_MODELS = CHECKOUT / "models"
_PROMPTS = _MODELS / "prompts.json"


@dataclass(frozen=True, slots=True)
class Advice:
    """One setting to use."""

    name: str
    """Name of the setting."""
    value: object
    """Value of the setting."""
    reason: str
    """Why this value is advised, with figures."""


@dataclass(slots=True)
class Measurements:
    """All figures of one tuning run."""

    threads: dict[int, float] = field(default_factory=dict)
    """Tokens per second of plain steps, by number of threads."""
    drafts: dict[tuple[int, int], float] = field(default_factory=dict)
    """Tokens per second by streams and draft tokens."""
    acceptance: dict[int, float] = field(default_factory=dict)
    """Accepted share of the draft tokens, by draft tokens; all streams."""
    prefill: dict[int, float] = field(default_factory=dict)
    """Prompt tokens per second, by tokens of a piece."""
    prefill_s: dict[int, float] = field(default_factory=dict)
    """Seconds of a step with such a piece."""


class _Streams:
    """Sequences that generate side by side.

    Args:
        engine: It is empty, and is left so by `close`.
        prompts: Token ids, one list per stream.
        clock: Time in seconds.
    """

    def __init__(
        self, engine: Engine, prompts: Sequence[Sequence[int]], clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._last: dict[int, tuple[int, int]] = {}
        for seq_id, prompt in enumerate(prompts):
            start = Start(seq_id, engine.make_sampler(_OPTIONS))
            self._run(StepPlan([PlanEntry(seq_id, 0, prompt, 0, True)], [start]))

    def _run(self, plan: StepPlan) -> tuple[int, int, int]:
        """Runs a step. Returns emitted, drafted and accepted tokens."""
        n_emitted = n_drafted = n_accepted = 0
        for entry in self._engine.step(plan).entries:
            self._last[entry.seq_id] = entry.n_past, entry.tokens[-1]
            n_emitted += len(entry.tokens)
            n_drafted += entry.n_drafted
            n_accepted += entry.n_accepted
        return n_emitted, n_drafted, n_accepted

    def rate(self, n_draft: int) -> tuple[float, float]:
        """Returns tokens per second and the accepted share of drafts, at K."""
        rates: list[tuple[int, float]] = []
        n_drafted = n_accepted = 0
        begun = self._clock()
        for i in range(min(2 + _N_STEPS, self._n_steps_left(n_draft))):
            if len(rates) >= _N_STEPS_MIN and self._clock() - begun > _SECONDS_MAX:
                break
            entries = [
                PlanEntry(seq_id, n_past, [token], n_draft, True)
                for seq_id, (n_past, token) in self._last.items()
            ]
            started = self._clock()
            n_emitted, drafted, accepted = self._run(StepPlan(entries))
            if i >= 2:
                rates.append((n_emitted, self._clock() - started))
                n_drafted, n_accepted = n_drafted + drafted, n_accepted + accepted
        # Tokens of all steps over the median time: one interrupted step does not decide.
        n_mean = sum(n for n, _ in rates) / len(rates)
        return n_mean / median(s for _, s in rates), n_accepted / max(1, n_drafted)

    def has_room(self, n_draft: int) -> bool:
        """Returns whether their context holds one more measurement at K."""
        return self._n_steps_left(n_draft) >= 2 + _N_STEPS

    def _n_steps_left(self, n_draft: int) -> int:
        n_room = self._engine.limits.n_ctx_seq - max(past for past, _ in self._last.values())
        return n_room // (1 + n_draft)

    def close(self) -> None:
        """Gives the slots back."""
        self._engine.step(StepPlan(frees=list(self._last)))


def measure(
    engine: Engine,
    prompts: Sequence[list[int]],
    measured: Measurements,
    clock: Callable[[], float] = time.perf_counter,
    tell: Callable[[str], object] = lambda _: None,
) -> None:
    """Measures drafts and prompts on an engine.

    Args:
        engine: Without sequences.
        prompts: Held-out texts as token ids; they are cut.
        measured: Takes the figures.
        clock: Time in seconds.
        tell: Takes a line about every number of streams.
    """
    limits = engine.limits
    n_streams = 1
    while n_streams <= limits.n_seq_max:
        cut = [_cut(prompts[i % len(prompts)], limits) for i in range(n_streams)]
        streams = _Streams(engine, cut, clock)
        for n_draft in range(limits.n_draft_max + 1):
            if not streams.has_room(n_draft):
                streams.close()
                streams = _Streams(engine, cut, clock)
            rate, acceptance = streams.rate(n_draft)
            measured.drafts[n_streams, n_draft] = rate
            measured.acceptance[n_draft] = acceptance
        streams.close()
        rates = [measured.drafts[n_streams, k] for k in range(limits.n_draft_max + 1)]
        tell(f"{n_streams} streams, K = 0, 1, …: {', '.join(f'{r:.0f}' for r in rates)} tokens/s")
        n_streams *= 2
    _measure_prefill(engine, prompts, measured, clock)


def _measure_prefill(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    measured: Measurements,
    clock: Callable[[], float],
) -> None:
    text = [token for prompt in prompts for token in prompt]
    n_piece = 16
    while n_piece < engine.limits.n_seq_max * (1 + engine.limits.n_draft_max):
        n_piece *= 2  # a step holds everybody's draft
    while n_piece <= min(engine.limits.n_batch, engine.limits.n_ctx_seq - 1):
        tokens = (text * (1 + n_piece // len(text)))[:n_piece]
        times: list[float] = []
        while len(times) < _N_STEPS_MIN and sum(times) < _SECONDS_MAX:
            start = Start(0, engine.make_sampler(_OPTIONS))
            started = clock()
            engine.step(StepPlan([PlanEntry(0, 0, tokens, 0, True)], [start]))
            times.append(clock() - started)
            engine.step(StepPlan(frees=[0]))
        measured.prefill_s[n_piece] = median(times)
        measured.prefill[n_piece] = n_piece / median(times)
        n_piece *= 2


def advise(measured: Measurements) -> list[Advice]:
    """Returns the settings to use, each with its reason."""
    advice = []
    if measured.threads:
        best = max(measured.threads, key=measured.threads.__getitem__)
        found = ", ".join(f"{n}: {rate:.0f}" for n, rate in sorted(measured.threads.items()))
        advice.append(Advice("threads", best, f"tokens/s of plain steps by threads: {found}"))
    advice += _advise_drafts(measured)
    if measured.prefill:
        best_rate = max(measured.prefill.values())
        n_batch = min(n for n, r in measured.prefill.items() if r >= _SHARE_OF_BEST * best_rate)
        advice.append(
            Advice(
                "batch_size",
                n_batch,
                f"{measured.prefill[n_batch]:.0f} prompt tokens/s of at most {best_rate:.0f};"
                f" a full step takes {measured.prefill_s[n_batch] * 1e3:.1f} ms",
            )
        )
        advice.append(
            Advice("ubatch_size", n_batch, "at most batch_size; one physical batch a step")
        )
    return advice


def _advise_drafts(measured: Measurements) -> list[Advice]:
    if not any(n_draft for _, n_draft in measured.drafts):
        return []
    best: dict[int, int] = {}
    gains = []
    for n_streams in sorted({n for n, _ in measured.drafts}):
        rates = {k: rate for (n, k), rate in measured.drafts.items() if n == n_streams}
        n_draft = 0
        for k in sorted(rates):
            if rates[k] > rates[n_draft] * (1 + _GAIN_MIN):
                n_draft = k
        best[n_streams] = n_draft
        gains.append(f"{n_streams}: K {n_draft}, {rates[n_draft] / rates[0]:.2f} x none")
    table = "; ".join(gains)
    longest = max(best.values())
    if not longest:
        return [Advice("draft_type", "none", f"no draft pays; by streams: {table}")]
    accepted = ", ".join(f"{k}: {a:.2f}" for k, a in sorted(measured.acceptance.items()) if k)
    advice = [Advice("draft_max", longest, f"best by streams: {table}; accepted by K: {accepted}")]
    if len(set(best.values())) > 1:
        advice.append(Advice("draft_policy", "adaptive", "the best K depends on the streams"))
    else:
        reason = "one K is best for all; adaptive finds it too, and follows the texts"
        advice.append(Advice("draft_policy", "adaptive", reason))
    return advice


def tune(
    config: Config,
    load: Callable[[Config], Engine],
    texts: Sequence[str],
    terminal: Terminal,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Advice]:
    """Measures a model on this machine, and prints settings, reasons and how to use them.

    Args:
        config: What to start from.
        load: Makes an engine of settings.
        texts: Held-out prompts.
        terminal: Takes the report.
        clock: Time in seconds.
    """
    measured = Measurements()
    n_cores = min(len(os.sched_getaffinity(0)), _N_THREADS_MAX)
    for n_threads in sorted({1, *(2**i for i in range(1, n_cores.bit_length())), n_cores}):
        if n_threads <= n_cores:
            measured.threads[n_threads] = _plain_rate(config, n_threads, load, texts, clock)
            terminal.note(f"{n_threads} threads: {measured.threads[n_threads]:.0f} tokens/s")
    best = max(measured.threads, key=measured.threads.__getitem__)
    engine = load(dataclasses.replace(config, threads=best))
    try:
        measure(engine, _tokenize(engine, texts), measured, clock, terminal.note)
    finally:
        engine.close()
    advice = advise(measured)
    for found in advice:
        terminal.line(f"{found.name} = {found.value}")
        terminal.line(f"    {found.reason}")
    chosen = _start_of(config) | {found.name: found.value for found in advice}
    if chosen.get("draft_type") == "none":
        chosen.pop("model_draft", None)  # a drafter for no drafts is refused
    flags = [word for name, value in chosen.items() for word in (f"--{_dashed(name)}", str(value))]
    terminal.line(f"\n{shlex.join(['drafthouse', 'serve', *flags])}")
    terminal.line("\n# the same as TOML")
    for name, value in chosen.items():
        # TOML has no surrogates, and takes this one character escaped alone.
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        terminal.line(f"{name} = {text}")
    return advice


def _start_of(config: Config) -> dict[str, object]:
    """Returns the settings that were given, which the advice is for."""
    found: dict[str, object] = {"model": config.model}
    if config.model_draft:
        found["model_draft"] = config.model_draft
    if config.draft_type != AUTOMATIC:
        found["draft_type"] = config.draft_type
    found["parallel"] = config.parallel  # what batches were measured for
    return found


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _cut(prompt: list[int], limits: EngineLimits) -> list[int]:
    return prompt[: min(limits.n_batch, max(1, limits.n_ctx_seq // 6), _N_PROMPT_MAX)]


def _tokenize(engine: Engine, texts: Sequence[str]) -> list[list[int]]:
    return [engine.tokenize(text, add_special=True, parse_special=False) for text in texts]


def _plain_rate(
    config: Config,
    n_threads: int,
    load: Callable[[Config], Engine],
    texts: Sequence[str],
    clock: Callable[[], float],
) -> float:
    engine = load(dataclasses.replace(config, threads=n_threads))
    try:
        prompts = [_cut(prompt, engine.limits) for prompt in _tokenize(engine, texts)]
        n_streams = min(engine.limits.n_seq_max, 8)
        streams = _Streams(engine, [prompts[i % len(prompts)] for i in range(n_streams)], clock)
        return streams.rate(0)[0]
    finally:
        engine.close()


def add_tune(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command `tune`."""
    parser = commands.add_parser(
        "tune",
        help="measure a model on this machine, and print the settings to use",
        description="Measures the engine alone, in this process: threads, drafts, batches."
        " Prints the settings to use, each with its figures. Takes a minute or two.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", type=Path, default=_MODELS / _DEMO, metavar="FILE", help="default: the demo")
    add(
        "--draft-type",
        choices=(AUTOMATIC, *DRAFT_TYPES),
        default=AUTOMATIC,
        help="default: %(default)s",
    )
    add("--model-draft", default="", metavar="FILE", help="where the draft type needs one")
    add("--streams", type=int, default=32, metavar="N", help="slots; default: %(default)s")
    add("--prompts", type=Path, default=_PROMPTS, metavar="FILE", help="a JSON"
        " object with `prompts`, a list of objects with `text`; texts of the kind that you"
        " serve")  # fmt: skip
    parser.set_defaults(run=_tune)


def _tune(arguments: argparse.Namespace, terminal: Terminal) -> int:
    try:
        config = Config(
            model=str(arguments.model),
            draft_type=arguments.draft_type,
            model_draft=arguments.model_draft,
            parallel=arguments.streams,
            max_model_len=_N_CTX_SEQ,
            prefix_cache=False,
            log_level="warning",
        )
        tune(config, LlamaEngine.load, read_texts(arguments.prompts), terminal)
    except ConfigError as error:
        terminal.error(str(error))
        return 2
    except (OSError, StartupError, ValueError) as error:
        terminal.error(str(error))
        return 1
    return 0


def read_texts(path: Path) -> list[str]:
    """Returns the texts of a prompt file, as `models/prompts.json` is one.

    Args:
        path: A JSON object with `prompts`, a list of objects with `text`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else.
    """
    if path == _PROMPTS and not path.exists():
        raise ValueError(
            "the texts to measure with come with the repository alone; name a file of yours by"
            " --prompts"
        )
    try:
        texts = [str(prompt["text"]) for prompt in json.loads(path.read_text("utf-8"))["prompts"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is not a file of prompts") from error
    if not texts or not all(texts):
        raise ValueError(f"{str(path)!r} has no prompts, or one without a text; give each a text")
    return texts
