"""What is guessed from measurements, asked and taught through the guard alone.

The cost of a step, the draft policy and the n-grams. A question that fails is answered by a fixed
rule, and the estimator that failed starts over.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from drafthouse_server.drafting.cost import (
    CostModel,
    Splitting,
    StepShape,
    count_ubatches,
    shape_of,
)
from drafthouse_server.drafting.guard import Guard, checked, is_duration
from drafthouse_server.drafting.ngram import NgramDrafter, Searchable
from drafthouse_server.drafting.policy import Draftable, DraftPolicy, FixedDraft
from drafthouse_server.step import (
    EngineLimits,
    PlanEntry,
    ResultEntry,
    SequenceStatus,
    Start,
    StepResult,
    StepTimings,
)

__all__ = ["Drafting", "Estimators", "NoNgrams", "with_checked_timings"]


class Drafting(Draftable, Searchable, Protocol):
    """A sequence for which drafts are made."""


class NoNgrams(NgramDrafter):
    """An n-gram drafter that proposes nothing and remembers nothing.

    What is done for each sequence of each step is not asked of it at all (`is_on`): that costs.
    """

    is_on = False

    def __init__(self) -> None:
        super().__init__(1)

    def forget(self, sequence: Searchable, *, is_finished: bool) -> None:
        """Forgets nothing."""


class Estimators:
    """Cost, policy and n-grams behind one guard.

    Args:
        limits: What the engine can carry.
        policy: Chooses K.
        cost: Predicts what a step takes and learns from each.
        ngrams: Proposes drafts before the engine's drafter is asked.
        splitting: How the engine's decode is cut, for `cost`.
        n_draft_fixed: K of the fixed policy, which answers where `policy` fails.
        sequences: Returns all that have not ended: what an estimator remembers of them goes when it
            starts over.
    """

    def __init__(
        self,
        limits: EngineLimits,
        *,
        policy: DraftPolicy,
        cost: CostModel,
        ngrams: NgramDrafter,
        splitting: Splitting,
        n_draft_fixed: int,
        sequences: Callable[[], Iterable[Drafting]],
    ) -> None:
        self._limits = limits
        self.policy = policy
        self.cost = cost
        self.ngrams = ngrams
        self.splitting = splitting
        self._fixed = FixedDraft(n_draft_fixed)
        self._sequences = sequences
        self._epoch = 0  # the policy's, as far as it was carried out
        self._has_choice = False  # whether the drafts of the step in flight are the policy's
        self.guard = Guard(
            {
                "cost": cost.reset,
                "n-grams": self._reset_ngrams,
                "policy": self._reset_policy,
            }
        )
        self.stall_s = math.inf
        """Seconds of a step of running streams: a snapshot may hold them up as long."""
        self.streams_s = 0.0
        """Seconds of the last step without what its prompts took; 0 is not known."""

    # --- drafts

    def choose(self, decodes: Sequence[Drafting], draft_budget: int) -> list[int]:
        """Returns K for each sequence that generates.

        Args:
            decodes: The sequences.
            draft_budget: Most draft tokens of all together, >= 0.
        """
        policy, limits = self.policy, self._limits

        def choose() -> list[int]:
            self._has_choice = True
            drafts = policy.choose_all(decodes, limits, draft_budget)
            self._check_drafts(decodes, drafts, draft_budget)
            return drafts

        return self.guard.ask(
            "policy",
            choose,
            lambda: self._fixed.choose_all(decodes, limits, draft_budget),
        )

    def _check_drafts(
        self, decodes: Sequence[Drafting], drafts: list[int], draft_budget: int
    ) -> None:
        """Raises ValueError where the engine could not carry drafts of these lengths."""
        limits = self._limits
        is_possible = len(drafts) == len(decodes) and sum(drafts) <= draft_budget
        if is_possible and any(drafts):
            n_most, n_ctx_seq = limits.n_draft_max, limits.n_ctx_seq
            for sequence, n in zip(decodes, drafts, strict=True):
                is_possible &= 0 <= n <= n_most and sequence.n_computed + n < n_ctx_seq
        if not is_possible:
            raise ValueError(f"drafts {drafts} for {len(decodes)} sequences, budget {draft_budget}")

    def propose(
        self,
        decodes: Sequence[Drafting],
        drafts: list[int],
        draft_budget: int,
    ) -> list[PlanEntry]:
        """Returns the entries of sequences that generate.

        Args:
            decodes: The sequences.
            drafts: K of each, by the policy. Where text that stood before promises more, its
                continuation is drafted in its place.
            draft_budget: Most draft tokens of all together.
        """
        ngrams = self.ngrams
        if not ngrams.is_on or not decodes:
            return _decode_entries(decodes, drafts)

        def seconds(entries: list[PlanEntry]) -> float:
            return self.predict(self.decode_shape(entries))

        known = seconds if self.cost.n_observed else None

        def propose() -> list[PlanEntry]:
            entries = _decode_entries(decodes, drafts)
            entries = ngrams.fill(decodes, entries, self._limits, draft_budget, known)
            self._check_drafts(decodes, [entry.n_draft for entry in entries], draft_budget)
            _check_external(decodes, entries)
            return entries

        return self.guard.ask("n-grams", propose, lambda: _decode_entries(decodes, drafts))

    def turn(
        self, running: Mapping[int, Drafting], starts: list[Start]
    ) -> tuple[list[int], list[int]]:
        """Returns the slots whose drafter is fed no more, and those for which it is fed again.

        Args:
            running: Sequences by slot.
            starts: Slots that are taken: whatever they come from, theirs are among them.
        """
        turned = [running[start.seq_id] for start in starts]
        if self.policy.epoch != self._epoch:
            self._epoch = self.policy.epoch
            turned = list(running.values())
        drafts_off: list[int] = []
        drafts_on: list[int] = []
        for sequence, is_wanted in zip(turned, self._wanted(turned), strict=True):
            (drafts_on if is_wanted else drafts_off).append(sequence.seq_id)
            if not is_wanted:
                sequence.is_draft_cold = True
        return drafts_off, drafts_on

    def _wanted(self, sequences: Collection[Drafting]) -> list[bool]:
        """Returns for each sequence whether its drafter is fed."""
        return self.guard.ask(
            "policy",
            lambda: list(map(self.policy.wants, sequences)),
            lambda: list(map(self._fixed.wants, sequences)),
        )

    # --- what a step takes

    def predict(self, shape: StepShape) -> float:
        """Returns the seconds that a step is predicted to take, > 0; infinity: not known."""

        def predict() -> float:
            seconds = self.cost.predict(shape)
            if not 0 < seconds < math.inf:
                raise ValueError(f"a step was predicted to take {seconds} s")
            return seconds

        return self.guard.ask("cost", predict, lambda: math.inf)

    def fit_prefill(self, shape: StepShape, seconds: float, n_past: int, n_most: int) -> int:
        """Returns how many tokens of a prompt fit into a step beside what it does already."""

        def fit() -> int:
            n_tokens = self.cost.fit_prefill(shape, seconds, n_past, n_most)
            if not 0 <= n_tokens <= n_most:
                raise ValueError(f"{n_tokens} tokens fit into a step, of {n_most}")
            return n_tokens

        return self.guard.ask("cost", fit, lambda: 0)

    def recompute_s(self, n_tokens: int) -> float | None:
        """Returns the seconds of computing so many tokens again; None if that is unknown."""
        if not self.cost.n_observed:
            return None

        def recompute() -> float | None:
            seconds = self.cost.recompute_s(n_tokens, self._limits.n_batch)
            if not is_duration(seconds):
                raise ValueError(f"{n_tokens} tokens were predicted to take {seconds} s")
            return seconds

        return self.guard.ask("cost", recompute, lambda: None)

    def decode_shape(self, entries: list[PlanEntry]) -> StepShape:
        """Returns the shape of a step that has these last tokens and drafts, and no more."""
        parts = sorted([(entry.seq_id, 1 + entry.n_verified) for entry in entries])
        lengths = [length for _, length in parts]
        n_tokens = sum(lengths)
        return StepShape(
            n_tokens=n_tokens,
            n_outputs=n_tokens,
            n_ubatches=count_ubatches(
                [seq_id for seq_id, _ in parts], lengths, self.splitting, self._limits.n_ubatch
            ),
            n_pairs=sum([(1 + entry.n_verified) * entry.n_past for entry in entries]),
        )

    # --- learning

    def learn(
        self,
        result: StepResult,
        step_s: float,
        entries: list[PlanEntry],
        n_decodes: int,
        *,
        has_moves: bool,
    ) -> tuple[float, float]:
        """Compares what a step took with what it should have taken.

        Args:
            result: The step's.
            step_s: From its plan to its commit, seconds.
            entries: Its plan's, those that generate first.
            n_decodes: How many of them generate.
            has_moves: Whether slots were taken, saved or given back in it.

        Returns:
            Its seconds as predicted and as measured; both 0 where they cannot be compared.
        """
        self.streams_s = 0.0
        statuses = [entry.status for entry in result.entries]
        if result.n_kept or statuses.count(SequenceStatus.OK) < len(statuses):
            return 0.0, 0.0
        if not is_duration(step_s):
            step_s = 0.0  # the clock has jumped
        timings = result.timings
        if len(entries) == n_decodes and not has_moves:
            self.streams_s = step_s
        if result.n_steps > 1:
            step_s, timings = step_s / result.n_steps, _of_one_step(result)
        is_measured = bool(n_decodes) and not has_moves and step_s > 0

        def learn() -> float:
            cost, n_ubatch = self.cost, self._limits.n_ubatch
            shape = shape_of(entries, result.entries, self.splitting, n_ubatch)
            predicted_s = 0.0
            if is_measured and cost.n_observed:
                predicted_s = self.predict(shape)
                if len(entries) > n_decodes and predicted_s < math.inf:
                    decode = self.decode_shape(entries[:n_decodes])
                    self.streams_s = step_s * min(1.0, self.predict(decode) / predicted_s)
            cost.observe(shape, timings, 0.0 if has_moves else step_s)
            return predicted_s if predicted_s < math.inf else 0.0

        predicted_s = self.guard.ask("cost", learn, lambda: 0.0)
        if is_measured and self.cost.n_observed:
            self.stall_s = step_s
        return predicted_s, step_s

    def teach_policy(self, result: StepResult) -> None:
        """Lets the policy learn what became of the drafts that it has chosen."""
        if self._has_choice:
            drafted = _as_drafted(result) if self.ngrams.is_on else result
            self.guard.tell("policy", lambda: self.policy.observe(drafted, self.streams_s))

    def teach_ngrams(self, result: StepResult, running: Mapping[int, Drafting]) -> None:
        """Lets the n-grams learn what became of their proposals; `running` is by slot."""
        ngrams, ok = self.ngrams, SequenceStatus.OK
        if not ngrams.is_on:
            return

        def teach() -> None:
            for entry in result.entries:
                if entry.status is ok and entry.tokens:
                    ngrams.observe(running[entry.seq_id], entry)

        self.guard.tell("n-grams", teach)

    def forget(self, sequence: Drafting, *, is_finished: bool) -> None:
        """Forgets a sequence that has ended; what it said may serve its tenant's later ones."""
        ngrams = self.ngrams
        self.guard.tell("n-grams", lambda: ngrams.forget(sequence, is_finished=is_finished))

    def _reset_policy(self) -> None:
        self._has_choice = False
        self.policy.reset()

    def forget_tenant(self, tenant: str) -> None:
        """Forgets what the ended sequences of a tenant said."""
        self.guard.tell("n-grams", lambda: self.ngrams.forget_tenant(tenant))

    def _reset_ngrams(self) -> None:
        self.ngrams.reset()
        for sequence in self._sequences():
            sequence.ngram_memory = None


def with_checked_timings(result: StepResult) -> StepResult:
    """Returns a result whose times are durations; zeros where they are none."""
    timings = checked(result.timings)
    return result if timings is result.timings else dataclasses.replace(result, timings=timings)


def _decode_entries(decodes: Sequence[Drafting], drafts: list[int]) -> list[PlanEntry]:
    """Returns the entries of sequences that generate, with drafts of these lengths."""
    return [
        PlanEntry(sequence.seq_id, sequence.n_computed, sequence.tokens[-1:], n_draft, True)
        for sequence, n_draft in zip(decodes, drafts, strict=True)
    ]


def _check_external(decodes: Sequence[Drafting], entries: list[PlanEntry]) -> None:
    """Raises ValueError where entries are not these sequences', or give drafts that are none.

    The engine refuses the plan of all for one such entry.
    """
    for sequence, entry in zip(decodes, entries, strict=True):
        given = entry.external
        is_own = (
            entry.seq_id == sequence.seq_id
            and entry.n_past == sequence.n_computed
            and entry.tokens == sequence.tokens[-1:]
            and entry.is_output
        )
        if not is_own or len(given) > entry.n_draft or (given and min(given) < 0):
            raise ValueError(f"{entry} for slot {sequence.seq_id}")


def _as_drafted(result: StepResult) -> StepResult:
    """Returns a result without the drafts that were given: they say nothing of the drafter."""
    drafted: list[ResultEntry] = [entry for entry in result.entries if not entry.is_external]
    return StepResult(drafted, timings=result.timings)


def _of_one_step(result: StepResult) -> StepTimings:
    """Returns the mean times of a run's steps."""
    n, timings = result.n_steps, result.timings
    return StepTimings(
        timings.draft_s / n,
        timings.decode_s / n,
        timings.process_s / n,
        timings.sample_s / n,
        timings.total_s / n,
    )
