"""One token stream: what was asked, how far it is, and how it ended."""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from hashlib import blake2b

from drafthouse_server.errors import DrafthouseError
from drafthouse_server.step import ResultEntry, SamplingOptions, Snapshot

__all__ = [
    "BLOCK_SIZE",
    "Blocks",
    "Clock",
    "ErrorEvent",
    "Event",
    "FinishEvent",
    "FinishReason",
    "ProgressEvent",
    "Request",
    "Sequence",
    "SequenceState",
    "SpeculationCounts",
    "Swap",
    "Tally",
    "Timings",
    "TokensEvent",
    "Usage",
]

BLOCK_SIZE = 16
"""Tokens of one block; shorter prefixes are not worth the look-up."""

_HASH_BYTES = 8

_N_RUN = 64
"""Blocks of which the hashes are made together, where it is not known how many are of use."""


class SequenceState(enum.Enum):
    """Where a sequence is. There is no prefill state and no decode state."""

    WAITING = enum.auto()
    """The sequence has no slot yet."""
    RUNNING = enum.auto()
    """The sequence owns a slot."""
    PREEMPTED = enum.auto()
    """The sequence had to give its slot back, and goes on as soon as it gets another."""
    FINISHED = enum.auto()
    """The sequence has had its terminal event."""


class FinishReason(enum.Enum):
    """Why a sequence ended without an error."""

    STOP = enum.auto()
    """End token, stop token or stop text."""
    LENGTH = enum.auto()
    """The output limit or the end of the context was reached."""
    CANCELLED = enum.auto()
    """The client left."""
    DEADLINE = enum.auto()
    """The deadline passed."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted."""

    n_prompt: int
    """Tokens of the prompt."""
    n_output: int
    """Tokens generated, the end token included."""
    n_reused: int = 0
    """Tokens of the prompt that were not computed again."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, in seconds; 0 for what was not reached."""

    queue_s: float
    """From the receipt to the slot."""
    prefill_s: float
    """From the slot to the first token."""
    decode_s: float
    """From the first token to the last."""
    first_token_s: float
    """From the receipt to the first token."""
    preempted_s: float = 0.0
    """Without a slot after the first one, within the spans above."""


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Drafts of one sequence, and how many of their tokens were accepted."""

    n_drafts: int
    """Steps that verified a draft."""
    n_drafted: int
    """Draft tokens verified."""
    n_accepted: int
    """Draft tokens accepted."""
    n_accepted_by_position: tuple[int, ...]
    """Accepted tokens by their place in the draft."""
    n_steps: int
    """Steps that generated tokens, with a draft or without."""


# Not frozen: one is made per sequence and step, and a frozen one takes three times as long.
@dataclass(slots=True)
class TokensEvent:
    """New tokens of one step."""

    tokens: Tokens[int]
    """At least one, in order."""
    logprobs: Tokens[float] = ()
    """One per token, or empty."""


@dataclass(slots=True)
class ProgressEvent:
    """More of the prompt is computed."""

    n_computed: int
    """Tokens of the prompt in the KV cache, [1, n_prompt]."""
    n_prompt: int
    """Length of the prompt."""


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The sequence ended well. Terminal."""

    reason: FinishReason
    """Why it ended: stop, length, client or deadline."""
    timings: Timings
    """Seconds by phase: queue, prompt, generation."""
    speculation: SpeculationCounts
    """Drafts and what was accepted of them."""


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The sequence ended in an error. Terminal."""

    error: DrafthouseError
    """The error that the client receives."""


Event = TokensEvent | ProgressEvent | FinishEvent | ErrorEvent


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for. It never changes."""

    request_id: str
    """Id of the request, as in logs and errors."""
    prompt: Tokens[int]
    """Token ids, at least one."""
    tenant: str = "default"
    """Name of the tenant."""
    end_user: str = ""
    """For whom the tenant asks; empty where it does not say."""
    weight: float = 1.0
    """The tenant's share of the server relative to other tenants' weights, > 0."""
    priority: int = 0
    """[-100, 100]; higher runs first, see `Sequence.rank`."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    """What the sampler was made from."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence besides the model's own."""
    n_output_max: int | None = None
    """Most tokens to generate, >= 1; None: until the context is full."""
    n_draft: int | None = None
    """K asked for; None is the server's default."""
    deadline: float = math.inf
    """Monotonic time in seconds after which the client does not wait for the output."""
    received_at: float = 0.0
    """Monotonic time of the request's receipt, in seconds."""
    has_progress: bool = False
    """Whether `ProgressEvent`s are wanted."""

    @property
    def owner(self) -> str:
        """Whose the computed tokens are: the tenant's, or an end user's of it alone."""
        return f"{self.tenant}\0{self.end_user}" if self.end_user else self.tenant


@dataclass(slots=True)
class Tally:
    """Steps of one sequence, and what became of its drafts. Counts only grow."""

    n_steps: int = 0
    """Steps that generated tokens."""
    n_drafts: int = 0
    """Steps that verified a draft."""
    n_drafted: int = 0
    """Draft tokens verified."""
    n_accepted: int = 0
    """Draft tokens accepted."""
    n_drafts_by_accepted: list[int] = field(default_factory=list)
    """Verified drafts by how many of their tokens were accepted: one count a step."""

    def count_draft(self, entry: ResultEntry) -> None:
        """Counts the draft of one step."""
        n_drafted, n_accepted = entry.n_drafted, entry.n_accepted
        self.n_drafts += 1
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted
        by_accepted = self.n_drafts_by_accepted
        if len(by_accepted) <= n_drafted:
            by_accepted += [0] * (n_drafted + 1 - len(by_accepted))
        by_accepted[n_accepted] += 1

    @property
    def counts(self) -> SpeculationCounts:
        """How speculation did so far."""
        by_accepted = self.n_drafts_by_accepted
        return SpeculationCounts(
            n_drafts=self.n_drafts,
            n_drafted=self.n_drafted,
            n_accepted=self.n_accepted,
            # At a place, in every draft of which more were accepted than stand before it.
            n_accepted_by_position=tuple(
                [sum(by_accepted[n:]) for n in range(1, len(by_accepted))]
            ),
            n_steps=self.n_steps,
        )


@dataclass(slots=True)
class Clock:
    """When things happened to one sequence: monotonic times in seconds; NaN before they do."""

    slot_at: float = math.nan
    """When it got its first slot."""
    first_token_at: float = math.nan
    """When its first token was there."""
    last_token_at: float = math.nan
    """When its last token was there."""


@dataclass(slots=True)
class Swap:
    """What preemption took from one sequence, and for how long."""

    is_preempted: bool = False
    """Whether the sequence had to give its slot back and waits for another."""
    n_preemptions: int = 0
    """Times that it was preempted."""
    preempted_at: float = math.nan
    """Monotonic time of its last preemption, seconds; NaN if there was none."""
    preempted_s: float = 0.0
    """Seconds that it was preempted, all times together; the current one is not counted yet."""
    snapshot: Snapshot | None = None
    """All that its slot held, while it is preempted in host memory."""

    def begin(self, now: float) -> None:
        """Notes that the sequence lost its slot."""
        self.is_preempted = True
        self.preempted_at = now
        self.n_preemptions += 1

    def end(self, now: float) -> None:
        """Notes that a preempted sequence has a slot again, or ends without one."""
        self.is_preempted = False
        self.preempted_s += now - self.preempted_at


class Blocks:
    """Hashes of the whole blocks of tokens, each made once: a long prompt has thousands.

    Each covers the owner and all tokens before it.

    Args:
        owner: Whose tokens they are (`Request.owner`).
        tokens: Which may grow, and change in no other way.
    """

    __slots__ = ("_digest", "_hashes", "_tokens", "n_branch")

    def __init__(self, owner: str, tokens: Tokens[int]) -> None:
        self._tokens = tokens
        self._hashes: list[int] = []
        self._digest = blake2b(owner.encode(), digest_size=_HASH_BYTES).digest()
        self.n_branch = 0
        """First tokens that another prompt of the owner had, too, as far as that is kept."""

    def first(self, n: int) -> tuple[int, ...]:
        """Returns the hashes of the first blocks, `n` or as many as there are."""
        self._make(n)
        return tuple(self._hashes[:n])

    def __iter__(self) -> Iterator[int]:
        """Yields the hashes in order, and makes few that nobody asks for."""
        n_given = 0
        while n_given < len(self._tokens) // BLOCK_SIZE:
            if n_given == len(self._hashes):
                self._make(n_given + _N_RUN)
            yield self._hashes[n_given]
            n_given += 1

    def _make(self, n: int) -> None:
        """Makes what is missing of the first `n` hashes."""
        n_whole = min(n, len(self._tokens) // BLOCK_SIZE)
        tokens = array("i", self._tokens[len(self._hashes) * BLOCK_SIZE : n_whole * BLOCK_SIZE])
        data, n_bytes = tokens.tobytes(), BLOCK_SIZE * tokens.itemsize
        for start in range(0, len(data), n_bytes):
            text = self._digest + data[start : start + n_bytes]
            self._digest = blake2b(text, digest_size=_HASH_BYTES).digest()
            self._hashes.append(int.from_bytes(self._digest))


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's token stream. The scheduler alone changes it."""

    request: Request
    """What was asked for."""
    sampler: object
    """Made by `Engine.make_sampler`; the engine owns it once the sequence has a slot."""

    tokens: list[int] = field(init=False)
    """Prompt and output."""
    blocks: Blocks = field(init=False)
    """Hashes of their blocks."""
    n_prompt: int = field(init=False)
    """Length of the prompt."""
    n_output_max: int = 0
    """Most tokens to generate, >= 1; set at submission, 0 before."""
    rank: tuple[float, int] = (0.0, -1)
    """Place inside its tenant, set at submission: the least goes first. See `order`."""
    seq_id: int = -1
    """Slot; -1 without one."""
    n_computed: int = 0
    """Tokens in the KV cache."""
    n_reserved: int = 0
    """KV cells that it is likely to need."""
    n_reused: int = 0
    """Tokens of the prompt that were not computed again."""
    n_cut_min: int = 0
    """Fewest of its tokens that its slot can be cut to, but 0: see `Prefix.n_cut_min`."""
    n_progress: int = 0
    """Tokens of the prompt that its last `ProgressEvent` told of."""
    n_no_room: int = 0
    """Steps in a row that found no cell."""
    is_draft_cold: bool = False
    """Whether the draft state was lost, so that speculation is over."""
    ngram_memory: object | None = None
    """What the n-gram drafter remembers of it."""
    swap: Swap = field(default_factory=Swap)
    """What preemption took from it."""
    tally: Tally = field(default_factory=Tally)
    """Its steps and drafts, counted."""
    clock: Clock = field(default_factory=Clock)
    """When things happened to it."""
    terminal: FinishEvent | ErrorEvent | None = None
    """How it ended; None while it goes on."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.blocks = Blocks(self.request.owner, self.tokens)
        self.n_prompt = len(self.tokens)

    @property
    def order(self) -> int:
        """Place in the order of arrival; -1 before submission."""
        return self.rank[1]

    @property
    def state(self) -> SequenceState:
        """Where it is."""
        if self.terminal is not None:
            return SequenceState.FINISHED
        if self.seq_id >= 0:
            return SequenceState.RUNNING
        return SequenceState.PREEMPTED if self.swap.is_preempted else SequenceState.WAITING

    @property
    def n_target(self) -> int:
        """Tokens that are known; the next one is chosen when all of them are computed."""
        return len(self.tokens)

    @property
    def n_pending(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.tokens) - self.n_computed

    @property
    def is_generating(self) -> bool:
        """Whether all but the last token are computed, and that one is an output."""
        n_target = len(self.tokens)
        return self.n_computed == n_target - 1 and n_target > self.n_prompt

    @property
    def n_output(self) -> int:
        """Tokens generated."""
        return len(self.tokens) - self.n_prompt

    @property
    def output(self) -> list[int]:
        """Tokens generated."""
        return self.tokens[self.n_prompt :]

    @property
    def n_output_left(self) -> int:
        """Tokens that may still be generated; the scheduler has set the limit."""
        return self.n_output_max - self.n_output

    @property
    def timings(self) -> Timings:
        """Where the time went so far."""
        received_at, clock = self.request.received_at, self.clock
        return Timings(
            queue_s=_span(received_at, clock.slot_at),
            prefill_s=_span(clock.slot_at, clock.first_token_at),
            decode_s=_span(clock.first_token_at, clock.last_token_at),
            first_token_s=_span(received_at, clock.first_token_at),
            preempted_s=self.swap.preempted_s,
        )

    def extend(self, entry: ResultEntry, now: float) -> tuple[TokensEvent, FinishReason | None]:
        """Takes one step's tokens; those after an end are dropped.

        Args:
            entry: The engine's answer, with at least one token.
            now: Monotonic time in seconds.

        Returns:
            The tokens that count, and why the sequence ends, if it does.
        """
        tokens, logprobs, reason = entry.tokens, entry.logprobs, None
        n_tokens = len(tokens)
        n_after = len(self.tokens) + n_tokens
        n_most = self.n_prompt + self.n_output_max
        # Most steps end nothing; this runs once per sequence and step.
        if entry.is_eog or n_after >= n_most or self.request.stop_token_ids:
            n_kept, reason = self._find_end(entry)
            if n_kept < n_tokens:
                tokens, logprobs = tokens[:n_kept], logprobs[:n_kept]
        self.tokens += tokens
        tally, clock = self.tally, self.clock
        if tally.n_steps == 0:
            clock.first_token_at = now
        clock.last_token_at = now
        # A step yields what was accepted and one token more; a run of steps several such.
        tally.n_steps += n_tokens - entry.n_accepted
        if entry.n_drafted:
            tally.count_draft(entry)
        return TokensEvent(tokens, logprobs), reason

    def _find_end(self, entry: ResultEntry) -> tuple[int, FinishReason | None]:
        """Returns how many of the tokens count, and why the sequence ends after them."""
        tokens = entry.tokens
        n_left, stop_token_ids = self.n_output_left, self.request.stop_token_ids
        if stop_token_ids:
            for i, token in enumerate(tokens[:n_left]):
                if token in stop_token_ids:
                    return i + 1, FinishReason.STOP
        if entry.is_eog and len(tokens) <= n_left:
            return len(tokens), FinishReason.STOP
        if len(tokens) >= n_left:
            return n_left, FinishReason.LENGTH
        return len(tokens), None

    def finish(self, reason: FinishReason) -> FinishEvent:
        """Ends the sequence well and returns its terminal event. At most one end per sequence."""
        assert self.terminal is None, f"{self.request.request_id} ended twice"
        event = FinishEvent(reason, self.timings, self.tally.counts)
        self.terminal = event
        return event

    def fail(self, error: DrafthouseError) -> ErrorEvent:
        """Ends the sequence in an error and returns its terminal event.

        At most one end per sequence.
        """
        assert self.terminal is None, f"{self.request.request_id} ended twice"
        event = ErrorEvent(error)
        self.terminal = event
        return event


def _span(start: float, end: float) -> float:
    return 0.0 if math.isnan(start) or math.isnan(end) else end - start
