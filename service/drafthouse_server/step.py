"""What one step asks of the engine, what the engine answers, and what it can carry.

A step carries every sequence that has something to do: a piece of a prompt, or the last token and a
draft to verify. The scheduler writes a `StepPlan`, the engine turns it into a `StepResult`. Both
are plain values, so that the scheduler stays pure and an engine may live in another process.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "EngineLimits",
    "ModelCard",
    "PlanEntry",
    "ResultEntry",
    "SamplingOptions",
    "SchedulerCounts",
    "SequenceStatus",
    "Snapshot",
    "Start",
    "StepPlan",
    "StepResult",
    "StepTimings",
]

Snapshot = bytes | memoryview
"""A sequence as an engine wrote it. Its memory is the next one's once no view of it is left."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a client may know of the loaded model."""

    name: str
    """Name that requests use."""
    architecture: str
    """Architecture as named in the GGUF file."""
    description: str
    """One line: architecture, size, quantisation."""
    n_params: int
    """Number of weights."""
    size_bytes: int
    """Size of the weights."""
    n_vocab: int
    """Valid token ids are [0, n_vocab)."""
    n_ctx_train: int
    """Context in tokens that the model was trained with."""
    is_recurrent: bool
    """Whether the model has recurrent layers."""
    has_chat_template: bool
    """Whether chat messages are accepted."""
    token_eos: int
    """Id of the token that ends a generation; -1 if none."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Capacities that a plan must respect."""

    draft_type: str
    """One of `config.DRAFT_TYPES`, such as "mtp"."""
    n_seq_max: int
    """Slots."""
    n_ctx: int
    """KV cells of all slots together."""
    n_ctx_seq: int
    """Most tokens of one sequence, prompt and output together."""
    n_batch: int
    """Most tokens of one step: sum over entries of len(tokens) + n_draft."""
    n_ubatch: int
    """Most tokens of one physical batch."""
    n_draft_max: int
    """Most draft tokens of one sequence and step; 0 when the engine does not speculate."""
    n_outputs_max: int
    """Most sampled positions of one step: sum of 1 + n_draft over entries with is_output."""
    n_window: int = 0
    """Tokens that the model's sliding windows look back; 0: it has none. Of a snapshot with more
    tokens a start keeps all, or all but the last; so it does of a slot that came out of one."""
    n_window_cells: int = 0
    """Cells that a slot has in layers with a window, which keep its last tokens alone; 0: as many
    as in others. Then a slot can be cut to what they hold the window of."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens of one sequence are chosen.

    Ranges are those of `drafthouse.v1.SamplingOptions`.
    """

    temperature: float = 0.8
    """0 is greedy."""
    top_k: int = 40
    """0 is off."""
    top_p: float = 0.95
    """1 is off."""
    min_p: float = 0.05
    """0 is off."""
    typical_p: float = 1.0
    """1 is off."""
    top_n_sigma: float | None = None
    """None is off."""
    penalty_last_n: int = 64
    """Tokens looked back; 0 is off, -1 the model's context."""
    penalty_repeat: float = 1.0
    """1 is off."""
    penalty_frequency: float = 0.0
    """0 is off."""
    penalty_presence: float = 0.0
    """0 is off."""
    dry_multiplier: float = 0.0
    """0 is off."""
    dry_base: float = 1.75
    """Growth of the DRY penalty with the length of the repetition."""
    dry_allowed_length: int = 2
    """Repetitions up to this many tokens are free."""
    dry_penalty_last_n: int = -1
    """Tokens looked back; -1 is the model's context."""
    dry_breakers: tuple[str, ...] | None = None
    """Texts at which a repetition ends; None is llama.cpp's defaults."""
    xtc_probability: float = 0.0
    """0 is off."""
    xtc_threshold: float = 0.1
    """Above 0.5 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and bias; -inf forbids."""
    seed: int | None = None
    """None draws one at random; with one, drafts change no token but by rounding."""
    grammar: str = ""
    """GBNF; empty is off."""
    ignore_eos: bool = False
    """End-of-generation tokens are never chosen."""
    logprobs: bool = False
    """Log-probabilities of the emitted tokens are wanted."""

    def window_bytes(self, n_context: int) -> int:
        """Returns what a sampler takes for the tokens that it looks back at, rather too many bytes.

        Args:
            n_context: Tokens of the model's context.
        """
        penalties = n_context if self.penalty_last_n < 0 else self.penalty_last_n
        dry = n_context if self.dry_penalty_last_n < 0 else self.dry_penalty_last_n
        return 4 * penalties + (16 * dry if self.dry_multiplier else 0)


# Not frozen: one is made per sequence and step, and a frozen one takes three times as long.
@dataclass(slots=True)
class PlanEntry:
    """One sequence's part of a step."""

    seq_id: int
    """Slot, [0, n_seq_max)."""
    n_past: int
    """Tokens of the sequence in the KV cache before the step."""
    tokens: Sequence[int]
    """A piece of the prompt, or the last emitted token alone; at least one."""
    n_draft: int
    """Draft tokens wanted (K); 0 is none. Above 0 only when `tokens` is the last emitted token."""
    is_output: bool
    """Whether a token is chosen after the last one of `tokens`."""
    external: Sequence[int] = ()
    """A draft that the host proposes, at most `n_draft` tokens, to be verified in place of one of
    the engine's drafter.

    It changes no token, whatever it is. The engine cuts it before its first end token, and asks its
    drafter after all where nothing is left, or where it cannot tell the drafter of a foreign draft:
    `ResultEntry.is_external` says what was verified. A sequence without draft state may have one.
    """

    @property
    def n_verified(self) -> int:
        """Draft tokens that are likely to be verified."""
        return len(self.external) or self.n_draft


@dataclass(frozen=True, slots=True)
class Start:
    """A slot taken into use, empty or with tokens that are computed already.

    With `n_kept` the sequence goes on from the first `n_kept` tokens of `snapshot`, or else of the
    slot `source`, or else of what this slot still holds of the sequence before; at most one of
    `snapshot` and `source` is given, and with `n_kept` 0 neither. The engine may keep none of them
    and tells so in `StepResult.n_kept`: a recurrent target goes on only from all that a slot or a
    snapshot holds and copies from no slot; a snapshot may be damaged, or another model's.

    A sampler is fed every token of its sequence once: those kept, those of the entries, and those
    that it chose. A resumed one counts what it has been fed: tokens that it knows are computed
    again without being fed. Once it has chosen a token, the entries compute again up to that token
    and no further; the entry that reaches it is an output, all before it are not.
    """

    seq_id: int
    """Slot, [0, n_seq_max)."""
    sampler: object | None
    """Made by `Engine.make_sampler`, or given back by `StepPlan.swap_outs`.

    The engine owns it from then on. None: the one that `snapshot` holds; if the snapshot is then
    refused, or holds none, the slot stays idle and its entry is DECODE_FAILED. To be safe from
    that, preempt in the plan that saves and resume with both.
    """
    n_kept: int = 0
    """Tokens not to be computed again.

    At most what is held there, and less than the sequence's known tokens: the last one has to be
    computed to go on from.
    """
    source: int | None = None
    """Another slot in use, of the same tag, whose first tokens are copied.

    It may be running or finished, and stays as it is. Starts happen in the plan's order, so it is
    read as the starts before left it.
    """
    snapshot: Snapshot | None = None
    """What `StepResult.snapshots` gave, of this or an earlier process."""
    is_resumed: bool = False
    """The sampler was preempted, or is the snapshot's; else it is as `make_sampler` made it."""
    tag: int = 0
    """Whose the sequence is, [0, 2**64): a digest of the tenant's name; 0 is nobody's.

    The slot, its copies, its snapshots and its preempted sampler carry it. A start that would go on
    from what another tag's sequence has left is refused with its plan (BAD_PLAN).
    """


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that the engine does in one step, in this order.

    Saves, swap_outs, frees, starts, drafts_off, drafts_on, entries. So a slot may be saved,
    preempted and started again in one plan. All of it is checked before any of it is done: a plan
    that is refused has changed nothing, and its samplers can be used again. A finished sequence
    holds its cells until its slot is freed, preempted or started: this is what prefix reuse lives
    on.
    """

    entries: Sequence[PlanEntry] = ()
    """At most one per sequence."""
    starts: Sequence[Start] = ()
    """Slots taken into use, each once. What one still holds and `n_kept` does not keep is gone."""
    frees: Sequence[int] = ()
    """Slots given back: KV cells, speculative state and sampler are gone. Harmless when idle."""
    swap_outs: Sequence[int] = ()
    """Slots in use given back whose samplers are wanted: the sequences will be resumed later."""
    saves: Sequence[int] = ()
    """Slots in use to be written to `StepResult.snapshots`; they stay as they are.

    The snapshot of a slot that is preempted in the same plan holds its sampler. All others are for
    prefix reuse: they hold tokens and cells, and nothing of what their request asked for.
    """
    drafts_off: Sequence[int] = ()
    """Slots in use, starts included, whose draft state is given up. Harmless without one."""
    drafts_on: Sequence[int] = ()
    """Slots in use, starts included, whose drafters are fed again, from this step's tokens on.

    They are cold until those are computed. Harmless where the draft state is there.
    """
    n_steps: int = 1
    """Most steps that the engine may run before it answers.

    Above 1 every entry is an output without a draft; in the further steps each goes on from the
    token that it has emitted, and nothing else of the plan is done again. The run ends with the
    step in which a sequence emits an end token, fails, finds no room or fills its context, or at
    `Engine.interrupt`. An engine may always run fewer.
    """

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.entries or self.starts or self.frees or self.swap_outs or self.saves)


class SequenceStatus(enum.Enum):
    """What became of a sequence in a step."""

    OK = "OK"
    """The step did what the plan said."""
    NO_ROOM = "NO_ROOM"
    """No cell was free; the sequence is as it was before the step and may be tried again."""
    DECODE_FAILED = "DECODE_FAILED"
    """The decode failed; the sequence's state is lost."""
    SAMPLING_FAILED = "SAMPLING_FAILED"
    """No token could be chosen; the sequence's state is lost."""
    GRAMMAR_TOO_COSTLY = "GRAMMAR_TOO_COSTLY"
    """The grammar took too many comparisons for one token; the sequence's state is lost."""
    NO_TOKEN_ALLOWED = "NO_TOKEN_ALLOWED"  # noqa: S105  # a token of text
    """The grammar and the biases allow no token; the sequence's state is lost."""


# Not frozen: one is made per sequence and step, and a frozen one takes three times as long.
@dataclass(slots=True)
class ResultEntry:
    """What one step did for one sequence."""

    seq_id: int
    """Slot, as in the plan."""
    status: SequenceStatus
    """Whether the step succeeded for this sequence."""
    n_past: int
    """Tokens in the KV cache after the step."""
    tokens: Sequence[int] = ()
    """Emitted tokens.

    The accepted drafts, then one chosen by the target; empty when not `is_output`.
    """
    logprobs: Sequence[float] = ()
    """Natural log-probabilities of `tokens` under the target's unmodified distribution.

    Empty when not asked for.
    """
    n_drafted: int = 0
    """Draft tokens verified."""
    n_accepted: int = 0
    """Draft tokens accepted."""
    is_eog: bool = False
    """Whether the last emitted token ends the generation."""
    is_draft_cold: bool = False
    """Whether the draft state was lost: the sequence goes on without its drafter."""
    is_external: bool = False
    """Whether the draft that was verified is `PlanEntry.external`, and not the drafter's."""
    n_mask_work: int = 0
    """Comparisons that its grammar took in this step, over all positions, failed ones too, and its
    samplers where they sort a large vocabulary."""


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where the time of one step went, in seconds."""

    draft_s: float = 0.0
    """Drafting for all sequences."""
    decode_s: float = 0.0
    """The target's decode."""
    process_s: float = 0.0
    """Feeding the decoded batch to the draft."""
    sample_s: float = 0.0
    """Verification, log-probabilities and rollback."""
    total_s: float = 0.0
    """The whole step inside the engine, but for what it moves first."""
    moves_s: float = 0.0
    """Writing and reading snapshots, starting sequences; 0 where nothing was moved."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The engine's answer to a `StepPlan`."""

    entries: Sequence[ResultEntry] = ()
    """One per plan entry, in the plan's order."""
    n_batch_tokens: int = 0
    """Tokens of the target's decodes."""
    n_kept: Mapping[int, int] = field(default_factory=dict)
    """By slot: the tokens that a start kept, where they are fewer than the plan said: so far 0.

    The sequence has begun nevertheless, with its sampler. The plan's entry of that slot was not
    computed: its result is OK, without tokens, and `n_past` is this number.
    """
    snapshots: Mapping[int, Snapshot] = field(default_factory=dict)
    """By slot: what `StepPlan.saves` asked for; one that could not be written is missing."""
    samplers: Mapping[int, object] = field(default_factory=dict)
    """By slot: what `StepPlan.swap_outs` asked for, all of it, as it was before the step."""
    timings: StepTimings = field(default_factory=StepTimings)
    """Where the time went, of all its steps."""
    n_steps: int = 1
    """Steps that were run, >= 1. What failed after the first one has its tokens nevertheless."""
    n_threads: int = 1
    """Threads that the engine had for it, >= 1: fewer while other processes take the cores."""


# Not frozen: one is made per step, and a frozen one takes three times as long.
@dataclass(slots=True)
class SchedulerCounts:
    """How slots and cells were shared. Counts only grow; what says "now" is as of now."""

    n_preempted_now: int = 0
    """Sequences that were preempted and have not come back by now."""
    n_preempted_bytes: int = 0
    """Bytes of their snapshots in host memory now."""
    n_preempted: int = 0
    """Times that a sequence was preempted."""
    n_resumed: int = 0
    """Times that a preempted sequence came back."""
    n_recomputed: int = 0
    """Tokens that had to be computed again for it."""
    n_prefix_lookups: int = 0
    """Prompts that got a slot while prefixes were reused."""
    n_prefix_hits: int = 0
    """Prompts that went on from a prefix."""
    n_prefix_tokens: int = 0
    """Tokens of the prompts that got a slot while prefixes were reused."""
    n_reused: int = 0
    """Prompt tokens that were not computed again."""
    n_prefix_evicted: int = 0
    """Prefixes that had to leave a slot or host memory."""
    n_prefix_bytes: int = 0
    """Bytes of prefixes in host memory now."""
    n_retained: int = 0
    """Slots that hold an ended sequence's tokens now."""
    n_retained_cells: int = 0
    """KV cells of these slots."""
    n_planned: int = 0
    """Times that a sequence that generates had its part in a step."""
    n_draft_planned: int = 0
    """Draft tokens chosen for them (K), over all."""
    n_estimator_resets: int = 0
    """Times that an estimator failed and started over; streams go on."""
