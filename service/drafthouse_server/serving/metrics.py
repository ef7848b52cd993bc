"""What the server counts and times, as plain values; `exposition` writes them for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from drafthouse_server.operations.histograms import (
    TOKEN_BOUNDS_S,
    Distribution,
    Histogram,
    TenantCounts,
    Tenants,
)
from drafthouse_server.step import SchedulerCounts, StepResult
from drafthouse_server.tenancy.backends import BackendState
from drafthouse_server.usage.record import UsageCounts

__all__ = [
    "DraftCounts",
    "FrontCounts",
    "Metrics",
    "Statistics",
    "StreamTimer",
]

_PHASES = ("draft", "decode", "process", "sample", "other")


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What became of drafts. Counts only grow."""

    n_drafts: int = 0
    """Drafts verified."""
    n_drafted: int = 0
    """Draft tokens verified."""
    n_accepted: int = 0
    """Draft tokens accepted."""

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the draft tokens; 0 without any."""
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0


@dataclass(frozen=True, slots=True)
class FrontCounts:
    """What clients hold of the server, and what they were refused."""

    n_calls: int = 0
    """Calls that are open now."""
    n_refused: Mapping[str, int] = field(default_factory=dict)
    """Calls that were one too many, or without a key that is known, by the error's reason."""
    n_stuck: int = 0
    """Calls that were ended because their client sent or read nothing."""
    n_watchers: int = 0
    """Watchers of health now."""
    n_descriptors: int = 0
    """File descriptors that are open, when they were counted last."""
    n_bytes: int = 0
    """Bytes of the requests that were read."""
    n_held_bytes: int = 0
    """Bytes of memory that open calls hold."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """All counts at one moment. Counts only grow; `n_running` and `n_waiting` are as of now."""

    n_requests: Mapping[str, int]
    """Requests that ended, by outcome: stop, length, cancelled, deadline, or an error's reason."""
    n_running: int
    """Sequences with a slot."""
    n_waiting: int
    """Sequences without a slot."""
    n_prompt_tokens: int
    """Prompt tokens of requests that ended."""
    n_output_tokens: int
    """Tokens in the messages of requests that ended: those that are billed."""
    n_drafts: int
    """Drafts verified."""
    n_drafted: int
    """Draft tokens verified."""
    n_accepted: int
    """Draft tokens accepted."""
    n_steps: int
    """Steps that succeeded."""
    n_steps_failed: int
    """Steps that the engine lost."""
    n_threads: int
    """Threads that the engine had for the last step; 0 before the first one."""
    n_batch_tokens: int
    """Tokens of the target's decodes."""
    n_generated: int
    """Tokens that steps have yielded, whether or not anybody was sent them."""
    host_s: float
    """Seconds between steps: the engine waits while Python reaps, plans and commits."""
    fan_out_s: float
    """Seconds of the event loop spent on handing out what steps yielded, while the next one ran."""
    model: str = ""
    """Name of the model."""
    tenants: Mapping[str, TenantCounts] = field(default_factory=dict)
    """Times and drafts by tenant, of a bounded number."""
    steps: Mapping[str, Distribution] = field(default_factory=dict)
    """Times of steps by phase: draft, decode, process (feeding the draft), sample (verifying too),
    and other, what is in the engine and none of these."""
    n_text_waiting: int = 0
    """Jobs that wait for a text worker, as of now."""
    text_s: float = 0.0
    """Processor seconds of text workers, with the starts of those that jobs have ended."""
    n_text_workers_lost: Mapping[str, int] = field(default_factory=dict)
    """Text workers that ended in the middle of a job, by cause: late, crashed, ended."""
    external: DraftCounts = DraftCounts()
    """Drafts found by prompt lookup, not made by the drafter."""
    scheduler: SchedulerCounts = field(default_factory=SchedulerCounts)
    """How slots and cells were shared."""
    front: FrontCounts = FrontCounts()
    """Calls, watchers and bytes that clients hold."""
    usage: UsageCounts = field(default_factory=UsageCounts)
    """How the recording of usage does."""
    backends: Mapping[str, BackendState] = field(default_factory=dict)
    """How each does that is kept outside of the server, by name: store, usage, rate_counters."""
    certificate_expires_at: float | None = None
    """When the server's certificate expires, seconds since 1970; None without one."""

    @property
    def by_source(self) -> Mapping[str, DraftCounts]:
        """Drafts by who proposed them: the engine's "drafter", or "ngram" lookup before it."""
        external = self.external
        made = DraftCounts(
            self.n_drafts - external.n_drafts,
            self.n_drafted - external.n_drafted,
            self.n_accepted - external.n_accepted,
        )
        return {"drafter": made, "ngram": external}

    @property
    def mean_n_draft(self) -> float:
        """Draft tokens chosen (K) per sequence and step that generated; 0 without any."""
        n_planned = self.scheduler.n_planned
        return self.scheduler.n_draft_planned / n_planned if n_planned else 0.0


@dataclass(slots=True)
class Metrics:
    """Counts what happens.

    Thread:
        Event loop only.
    """

    n_running: int = 0
    """Sequences with a slot."""
    n_waiting: int = 0
    """Sequences without a slot."""
    n_steps_failed: int = 0
    """Steps that the engine lost."""
    host_s: float = 0.0
    """Seconds between steps."""
    fan_out_s: float = 0.0
    """Seconds spent on fan-out."""
    n_text_waiting: int = 0
    """Jobs that wait for a text worker."""
    text_s: float = 0.0
    """Processor seconds of text workers."""
    n_text_workers_lost: Counter[str] = field(default_factory=Counter)
    """Text workers that ended in the middle of a job, by cause."""
    scheduler: SchedulerCounts = field(default_factory=SchedulerCounts)
    """How slots and cells were shared."""
    usage: UsageCounts = field(default_factory=UsageCounts)
    """How the recording of usage does; the journal's own where there is one."""
    certificate_expires_at: Callable[[], float | None] = lambda: None
    """Returns when the server's certificate expires, seconds since 1970; None without one."""
    model: str = ""
    """Name of the model."""
    tenants: Tenants = field(default_factory=Tenants)
    """Times and drafts by tenant."""
    steps: dict[str, Histogram] = field(
        default_factory=lambda: {phase: Histogram(TOKEN_BOUNDS_S) for phase in _PHASES}
    )
    """Times of steps by phase."""
    _n_requests: Counter[str] = field(default_factory=Counter)
    _n_prompt_tokens: int = 0
    _n_output_tokens: int = 0
    _n_drafts: int = 0
    _n_drafted: int = 0
    _n_accepted: int = 0
    _n_drafts_external: int = 0
    _n_drafted_external: int = 0
    _n_accepted_external: int = 0
    _n_steps: int = 0
    _n_threads: int = 0
    _n_batch_tokens: int = 0
    _n_generated: int = 0

    def count_step(self, result: StepResult) -> None:
        """Counts one successful step, or a run of them."""
        self._n_steps += result.n_steps
        self._n_threads = result.n_threads
        self._n_batch_tokens += result.n_batch_tokens
        self._n_generated += sum([len(entry.tokens) for entry in result.entries])
        drafted = [entry for entry in result.entries if entry.n_drafted]
        if drafted:
            self._n_drafts += len(drafted)
            self._n_drafted += sum([entry.n_drafted for entry in drafted])
            self._n_accepted += sum([entry.n_accepted for entry in drafted])
            external = [entry for entry in drafted if entry.is_external]
            if external:
                self._n_drafts_external += len(external)
                self._n_drafted_external += sum([entry.n_drafted for entry in external])
                self._n_accepted_external += sum([entry.n_accepted for entry in external])
        timings, n_steps = result.timings, result.n_steps
        phases = (timings.draft_s, timings.decode_s, timings.process_s, timings.sample_s)
        # Never negative: a counter that falls reads as a restart.
        other_s = max(0.0, timings.total_s - sum(phases))
        for histogram, spent_s in zip(self.steps.values(), (*phases, other_s), strict=True):
            histogram.observe(spent_s / n_steps, n_steps)

    def count_request(self, outcome: str) -> None:
        """Counts one request that ended, or was refused.

        Args:
            outcome: stop, length, cancelled, deadline, or an error's reason.
        """
        self._n_requests[outcome] += 1

    def count_tokens(self, n_prompt: int, n_output: int) -> None:
        """Counts the tokens of an accepted stream that ended.

        Args:
            n_prompt: Tokens of its prompt.
            n_output: Tokens in its messages.
        """
        self._n_prompt_tokens += n_prompt
        self._n_output_tokens += n_output

    def statistics(self, *, has_tenants: bool = True) -> Statistics:
        """Returns all counts as they are now.

        Args:
            has_tenants: Whether those by tenant are wanted: of a thousand tenants they take ten
                milliseconds of the event loop.
        """
        return Statistics(
            n_requests=dict(self._n_requests),
            n_running=self.n_running,
            n_waiting=self.n_waiting,
            n_text_waiting=self.n_text_waiting,
            text_s=self.text_s,
            n_text_workers_lost=dict(self.n_text_workers_lost),
            n_prompt_tokens=self._n_prompt_tokens,
            n_output_tokens=self._n_output_tokens,
            n_drafts=self._n_drafts,
            n_drafted=self._n_drafted,
            n_accepted=self._n_accepted,
            n_steps=self._n_steps,
            n_steps_failed=self.n_steps_failed,
            n_threads=self._n_threads,
            n_batch_tokens=self._n_batch_tokens,
            n_generated=self._n_generated,
            host_s=self.host_s,
            fan_out_s=self.fan_out_s,
            model=self.model,
            tenants=self.tenants.counts() if has_tenants else {},
            steps={phase: times.distribution() for phase, times in self.steps.items()},
            external=DraftCounts(
                self._n_drafts_external, self._n_drafted_external, self._n_accepted_external
            ),
            scheduler=self.scheduler,
            usage=self.usage.copy(),
            certificate_expires_at=self.certificate_expires_at(),
        )


class StreamTimer:
    """Times the messages of one stream.

    A message may carry the tokens of several steps, so a gap between messages is no gap between
    tokens: the time per output token tells that, in the mean over a stream.

    Args:
        metrics: Takes the times.
        received_at: When the request was received, by the clock.
        clock: Monotonic time in seconds.
        tenant: Name of the tenant.

    Thread:
        Event loop only.
    """

    def __init__(
        self, metrics: Metrics, received_at: float, clock: Callable[[], float], tenant: str = ""
    ) -> None:
        self._times = metrics.tenants.of(tenant)
        self._received_at = received_at
        self._clock = clock
        self._first_at = 0.0
        self._last_at = 0.0
        self._n_messages = 0
        self._n_tokens = 0

    def note(self, n_tokens: int) -> None:
        """Notes that a message with tokens has been written.

        Args:
            n_tokens: Tokens that the message carries, >= 1.
        """
        now = self._clock()
        if self._n_messages:
            self._times.message_gap.observe(now - self._last_at)
        else:
            self._first_at = now
            self._times.first_token.observe(now - self._received_at)
        self._last_at = now
        self._n_messages += 1
        self._n_tokens += n_tokens

    def end(self) -> None:
        """Notes that the stream has ended; one message alone has no time per token."""
        if self._n_messages > 1:
            span_s = self._last_at - self._first_at
            self._times.output_token.observe(span_s / (self._n_tokens - 1))
