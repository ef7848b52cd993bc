"""Parameters of samplers and engines, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

from drafthouse_engine.devices import CacheParams, RopeParams
from drafthouse_engine.fields import (
    FLOAT32_MAX,
    INT32_MAX,
    check_bool,
    check_float,
    check_int,
    check_text,
    refusal,
)

__all__ = [
    "DRAFT_TYPES",
    "SAMPLERS",
    "DraftType",
    "EngineParams",
    "SamplerKind",
    "SamplingParams",
]

DraftType: TypeAlias = Literal[
    "none",
    "mtp",
    "eagle3",
    "simple",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
    "dflash",
    "dspark",
]
"""How drafts are made: not at all, by the target's MTP heads, by an EAGLE-3 model, by a small
model, from n-grams, or by a model that drafts a whole block in one pass (DFlash, DSpark)."""

DRAFT_TYPES: Final[tuple[DraftType, ...]] = get_args(DraftType)
"""All draft types; the place of one is its `spec_draft_type`."""

SamplerKind: TypeAlias = Literal[
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typical_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
    "infill",
]
"""What a chain of samplers can be made of; `infill` is for fill-in-the-middle prompts."""

SAMPLERS: Final[tuple[SamplerKind, ...]] = get_args(SamplerKind)
"""All kinds of samplers; the place of one is its `spec_sampler_kind`. Without `infill` this is the
order in which they apply unless `SamplingParams.samplers` says otherwise."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens of one sequence are chosen; the defaults are those of `spec.h`.

    Temperature 0 is greedy.

    Raises:
        InvalidConfig: a field is out of its range.
    """

    seed: int | None = None
    """[0, 2^32 − 2]; None draws one at random."""
    temperature: float = 0.8
    """≥ 0; 0 is greedy."""
    top_k: int = 40
    """≥ 0; 0 is off."""
    top_p: float = 0.95
    """(0, 1]; 1 is off."""
    min_p: float = 0.05
    """[0, 1]; 0 is off."""
    typical_p: float = 1.0
    """(0, 1]; 1 is off."""
    top_n_sigma: float | None = None
    """> 0; None is off."""
    penalty_last_n: int = 64
    """Tokens looked back, ≥ −1; 0 is off, −1 the model's training context."""
    penalty_repeat: float = 1.0
    """> 0; 1 is off."""
    penalty_frequency: float = 0.0
    """Any finite number; 0 is off."""
    penalty_presence: float = 0.0
    """Any finite number; 0 is off."""
    dry_multiplier: float = 0.0
    """≥ 0; 0 is off."""
    dry_base: float = 1.75
    """≥ 1."""
    dry_allowed_length: int = 2
    """Tokens that may repeat free, ≥ 0."""
    dry_penalty_last_n: int = -1
    """Tokens looked back, ≥ −1; −1 is the model's training context."""
    dry_breakers: tuple[str, ...] | None = None
    """Texts at which a repetition ends; None is llama.cpp's defaults."""
    xtc_probability: float = 0.0
    """[0, 1]; 0 is off."""
    xtc_threshold: float = 0.1
    """[0, 1]; above 0.5 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and bias added to its logit; −inf forbids the token."""
    grammar: str = ""
    """GBNF with a rule `root`; empty is off."""
    ignore_eos: bool = False
    """Tokens that end a generation are never chosen."""
    logprobs: bool = False
    """Log-probabilities of the emitted tokens are computed."""
    n_top_logprobs: int = 0
    """[0, 32]: so many likeliest tokens are told with each emitted token; 0 is off."""
    min_keep: int = 0
    """Fewest tokens that top_p, min_p, typical_p and XTC leave, ≥ 0."""
    dynatemp_range: float = 0.0
    """≥ 0: the temperature follows the entropy, within temperature ± this; 0 is off."""
    dynatemp_exponent: float = 1.0
    """≥ 0: how the entropy maps to the temperature."""
    mirostat: Literal[0, 1, 2] = 0
    """0 is off; 1 and 2 hold the surprise of the text constant, and replace all filters but the
    temperature. Source: Basu et al., arXiv:2007.14966."""
    mirostat_tau: float = 5.0
    """Target surprise in bits, ≥ 0."""
    mirostat_eta: float = 0.1
    """Learning rate, [0, 1]."""
    adaptive_target: float | None = None
    """[0, 1]: tokens near this probability are chosen, on average; None is off."""
    adaptive_decay: float = 0.9
    """How long the average remembers, [0, 0.99]: about 1 / (1 − decay) tokens."""
    samplers: tuple[SamplerKind, ...] | None = None
    """The chain in its order, each kind once; what is not named does not apply. None is the
    default order. `infill` needs a top_k in [1, 1024] before it, and no grammar."""
    match_only: bool = False
    """Drafts stand where they are what is drawn without them, so that a seed draws the same tokens
    whatever is drafted. Without it fewer drafts of MTP heads and draft models are lost."""

    def __post_init__(self) -> None:
        self._check_filters()
        self._check_penalties()
        self._check_bias()
        check_text(self, "grammar", self.grammar)
        check_bool(self, "ignore_eos")
        check_bool(self, "logprobs")
        check_bool(self, "match_only")
        check_int(self, "n_top_logprobs", 0, 32)
        self._check_adaptive()
        self._check_order()

    def _check_filters(self) -> None:
        if self.seed is not None:
            check_int(self, "seed", 0, 2**32 - 2)
        check_float(self, "temperature", 0)
        check_int(self, "top_k", 0)
        check_float(self, "top_p", 0, 1, ends="(]")
        check_float(self, "min_p", 0, 1)
        check_float(self, "typical_p", 0, 1, ends="(]")
        if self.top_n_sigma is not None:
            check_float(self, "top_n_sigma", 0, ends="(]")
        check_float(self, "xtc_probability", 0, 1)
        check_float(self, "xtc_threshold", 0, 1)

    def _check_penalties(self) -> None:
        check_int(self, "penalty_last_n", -1)
        check_float(self, "penalty_repeat", 0, ends="(]")
        check_float(self, "penalty_frequency", -FLOAT32_MAX)
        check_float(self, "penalty_presence", -FLOAT32_MAX)
        check_float(self, "dry_multiplier", 0)
        check_float(self, "dry_base", 1)
        check_int(self, "dry_allowed_length", 0)
        check_int(self, "dry_penalty_last_n", -1)
        for text in self.dry_breakers or ():
            check_text(self, "dry_breakers", text)

    def _check_adaptive(self) -> None:
        check_int(self, "min_keep", 0)
        check_float(self, "dynatemp_range", 0)
        check_float(self, "dynatemp_exponent", 0, 1e6)
        check_int(self, "mirostat", 0, 2)
        check_float(self, "mirostat_tau", 0, 1e6)
        check_float(self, "mirostat_eta", 0, 1)
        if self.adaptive_target is not None:
            check_float(self, "adaptive_target", 0, 1)
            if self.mirostat:
                raise refusal(self, "adaptive_target", self.adaptive_target, "None with mirostat")
        check_float(self, "adaptive_decay", 0, 0.99)

    def _check_order(self) -> None:
        order = () if self.samplers is None else self.samplers
        if not isinstance(order, tuple) or len(set(order)) != len(order):
            raise refusal(self, "samplers", order, "a tuple that names each sampler once")
        for name in order:
            if name not in SAMPLERS:
                raise refusal(self, "samplers", order, f"names of {', '.join(SAMPLERS)}")

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, tuple | list):
            raise refusal(self, "logit_bias", self.logit_bias, "a tuple of pairs")
        for pair in self.logit_bias:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise refusal(self, "logit_bias", pair, "pairs of a token id ≥ 0 and a bias")
            token, bias = pair
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= INT32_MAX:
                raise refusal(self, "logit_bias", pair, "pairs of a token id ≥ 0 and a bias")
            if not isinstance(bias, int | float) or not -math.inf <= bias <= FLOAT32_MAX:
                raise refusal(self, "logit_bias", pair, "pairs whose bias is finite or -inf")


@dataclass(frozen=True, slots=True)
class EngineParams:
    """How an engine is built.

    Raises:
        InvalidConfig: a field is out of its range.
    """

    draft_type: DraftType = "none"
    """How drafts are made."""
    n_ctx: int = 0
    """KV cells of all sequences together; 0 is n_seq_max × n_ctx_seq."""
    n_ctx_seq: int = 0
    """Most tokens of one sequence; 0 is the model's training context."""
    n_batch: int = 2048
    """Most tokens of one step, ≥ 1."""
    n_ubatch: int = 512
    """Most tokens of one physical batch, [1, n_batch]."""
    n_seq_max: int = 1
    """Sequences at once, [1, 256]."""
    n_draft_max: int = 3
    """Most drafted tokens of one sequence and step, ≥ 1; unused when draft_type is none. A dflash
    or dspark model drafts no more than its block holds: see `EngineLimits.n_draft_max`."""
    n_rs_seq: int = -1
    """Recurrent-state snapshots per sequence; −1 is n_draft_max where the model supports them."""
    n_threads: int = 0
    """Threads of a narrow decode; 0 is all cores that the process may use (`find_cores`)."""
    n_threads_batch: int = 0
    """Threads of a wide decode; 0 is n_threads."""
    n_wide: int = 2
    """A decode of so many tokens is wide, ≥ 2."""
    p_min: float = 0.0
    """Drafting stops below this probability, [0, 1)."""
    probabilistic: bool = False
    """Drafts are sampled and verified by rejection at a temperature above 0 (mtp, simple); else
    argmax and match."""
    kv_unified: bool = False
    """One pool of cells for all sequences; else each has its own n_ctx_seq cells."""
    flash_attention: bool = True
    """Attention is computed by the fused kernel, where model and device allow it."""
    flash_forced: bool = False
    """With flash_attention: without asking whether they do."""
    n_min: int = 0
    """Shorter drafts are dropped, [0, n_draft_max]; at most 1 with probabilistic, where more would
    change the distribution."""
    exact: bool = False
    """Logits of a token do not depend on what else is in the batch, bit for bit: reference kernels
    of the CPU instead of those that are chosen by the batch's width. Slower; not with kv_unified.
    Without `swa_full`, or without `flash_attention`, a snapshot puts a window's cells in another
    order, and sums differ by their rounding. Not for graphs that take
    a step's tokens as a block (minimax-01, minimax-m3): there its width counts. See `spec.h`."""
    cache: CacheParams = field(default_factory=CacheParams)
    """What the cells are."""
    rope: RopeParams = field(default_factory=RopeParams)
    """How positions are turned."""
    synth_rates: tuple[float, ...] = ()
    """Benchmarks only: drafts are accepted at random, not verified, and what is generated is not
    the model's output. Entry i is the probability that the first i + 1 drafted tokens are all
    accepted: [0, 1], never rising, n_draft_max of them; empty is off."""

    def __post_init__(self) -> None:
        if self.draft_type not in DRAFT_TYPES:
            raise refusal(self, "draft_type", self.draft_type, f"one of {', '.join(DRAFT_TYPES)}")
        for name in ("n_ctx", "n_ctx_seq", "n_threads", "n_threads_batch"):
            check_int(self, name, 0)
        check_int(self, "n_wide", 2)
        check_int(self, "n_batch", 1)
        check_int(self, "n_ubatch", 1, self.n_batch)
        check_int(self, "n_seq_max", 1, 256)
        check_int(self, "n_draft_max", 0 if self.draft_type == "none" else 1)
        check_int(self, "n_rs_seq", -1)
        check_float(self, "p_min", 0, 1, ends="[)")
        for name in ("probabilistic", "kv_unified", "flash_attention", "flash_forced", "exact"):
            check_bool(self, name)
        n_min_max = 1 if self.probabilistic else self.n_draft_max
        check_int(self, "n_min", 0, 0 if self.draft_type == "none" else n_min_max)
        self._check_groups()
        self._check_synth_rates()

    def _check_groups(self) -> None:
        for name, kind in (("cache", CacheParams), ("rope", RopeParams)):
            if not isinstance(getattr(self, name), kind):
                raise refusal(self, name, getattr(self, name), f"{kind.__name__}(…)")

    def _check_synth_rates(self) -> None:
        rates = self.synth_rates
        n_expected = 0 if self.draft_type == "none" else self.n_draft_max
        if not isinstance(rates, tuple) or len(rates) not in {0, n_expected} or len(rates) > 256:
            wanted = "no rates, or n_draft_max of them, at most 256, with a draft type"
            raise refusal(self, "synth_rates", rates, wanted)
        for rate, before in zip(rates, (1.0, *rates), strict=False):
            if not isinstance(rate, int | float) or not 0 <= rate <= before:
                raise refusal(self, "synth_rates", rates, "numbers in [0, 1] that never rise")
