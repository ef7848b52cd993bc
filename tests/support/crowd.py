"""A machine and a crowd of sequences whose costs and acceptance are known: for draft policies."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from drafthouse_server.drafting.cost import CostModel, Splitting, StepShape, shape_of
from drafthouse_server.drafting.policy import DraftPolicy
from drafthouse_server.scheduling.sequence import Request
from drafthouse_server.step import (
    EngineLimits,
    PlanEntry,
    ResultEntry,
    SequenceStatus,
    StepResult,
    StepTimings,
)

__all__ = ["Machine", "Member", "best_fixed", "limits_of", "make_crowd", "run"]


_N_FED_GOOD = 8
"""Steps after which a drafter that is fed again is as good as before."""


@dataclass(frozen=True, slots=True)
class Machine:
    """True costs, in seconds."""

    draft_pass_s: float = 0.001
    """Per drafting pass."""
    draft_token_s: float = 0.0001
    """Per draft token."""
    ubatch_s: float = 0.010
    """Per physical batch."""
    token_s: float = 0.0002
    """Per token of the target, up to `n_wide`."""
    wide_token_s: float = 0.0008
    """Per token beyond."""
    n_wide: int = 8
    """Width from which decoding is bound by arithmetic."""
    process_token_s: float = 0.00005
    """Per token fed to the drafter."""
    sample_s: float = 0.00005
    """Per sampled position."""
    splitting: Splitting = Splitting.EQUAL
    """How decodes are cut."""

    def timings(
        self, shape: StepShape, drafts: list[int], *, is_fed: bool = True, noise: float = 1.0
    ) -> StepTimings:
        """Returns what a step takes, with drafts of these lengths asked for."""
        width = shape.n_tokens / shape.n_ubatches
        narrow = min(width, self.n_wide)
        decode_s = shape.n_ubatches * (
            self.ubatch_s + self.token_s * narrow + self.wide_token_s * (width - narrow)
        )
        parts = (
            self.draft_pass_s * max(drafts, default=0) + self.draft_token_s * sum(drafts),
            decode_s,
            self.process_token_s * shape.n_tokens * is_fed,
            self.sample_s * shape.n_outputs,
        )
        draft_s, decode_s, process_s, sample_s = (part * noise for part in parts)
        total_s = draft_s + decode_s + process_s + sample_s + 0.0001
        return StepTimings(draft_s, decode_s, process_s, sample_s, total_s)


@dataclass(slots=True, eq=False)
class Member:
    """A sequence that never ends."""

    seq_id: int
    """Slot."""
    acceptance: Callable[[int], float]
    """Probability of acceptance by position."""
    coming: float = 1.0
    """Probability that its drafter has anything to propose."""
    request: Request = field(default_factory=lambda: Request("r", [1]))
    """What was asked for."""
    n_computed: int = 100
    """Tokens in the cache; kept as it is."""
    n_output_left: int = 1 << 30
    """No end."""
    n_no_room: int = 0
    """Always room."""
    is_draft_cold: bool = False
    """Whether its drafter is not fed."""
    n_fed: int = _N_FED_GOOD
    """Steps for which its drafter has been fed."""
    random: random.Random = field(default_factory=random.Random)
    """Decides what is accepted."""

    def propose(self, n_draft: int) -> int:
        """Returns the length of a draft that is asked for."""
        return n_draft if self.coming == 1.0 or self.random.random() < self.coming else 0

    def verify(self, n_draft: int) -> tuple[int, float]:
        """Returns how many tokens of a draft are accepted, and how many could be expected."""
        quality = min(1.0, self.n_fed / _N_FED_GOOD)
        n_accepted, n_expected, still = 0, 0.0, 1.0
        for position in range(n_draft):
            share = quality * self.acceptance(position)
            still *= share
            n_expected += still
            if n_accepted == position and self.random.random() < share:
                n_accepted += 1
        return n_accepted, n_expected


def limits_of(n: int, n_draft_max: int) -> EngineLimits:
    """Returns the limits of an engine for so many sequences."""
    return EngineLimits("mtp", n, 1 << 30, 1 << 29, 4096, 512, n_draft_max, n * (1 + n_draft_max))


def make_crowd(acceptances: list[float]) -> list[Member]:
    """Returns one sequence per acceptance rate, the same at each position."""
    return [
        # A lambda's default has no annotation to give it a type.
        Member(i, lambda _, p=p: p, random=random.Random(1000 + i))  # type: ignore[misc]  # a default has no type
        for i, p in enumerate(acceptances)
    ]


def run(
    policy: DraftPolicy,
    cost: CostModel,
    machine: Machine,
    crowd: list[Member],
    n_steps: int,
    *,
    n_prompt: int = 0,
    noise: random.Random | None = None,
) -> tuple[float, list[int]]:
    """Runs a policy for so many steps; a piece of a prompt is in every step, or none.

    Returns:
        Tokens per second, and the longest draft of each step.
    """
    limits = limits_of(len(crowd), 4)
    n_emitted, total_s, depths = 0.0, 0.0, []
    for _ in range(n_steps):
        n_drafts = policy.choose_all(crowd, limits, limits.n_outputs_max - len(crowd))
        for member in crowd:  # as the engine does: cold until fed once
            if not policy.wants(member):
                member.is_draft_cold, member.n_fed = True, 0
        entries, results = [], []
        for member, n_draft in zip(crowd, n_drafts, strict=True):
            n_drafted = member.propose(n_draft)
            n_accepted, n_expected = member.verify(n_drafted)
            # What it could expect counts, so that luck does not.
            n_emitted += 1 + n_expected
            entries.append(PlanEntry(member.seq_id, member.n_computed, [1], n_draft, True))
            results.append(
                ResultEntry(
                    member.seq_id,
                    SequenceStatus.OK,
                    member.n_computed + 1 + n_accepted,
                    [1] * (1 + n_accepted),
                    n_drafted=n_drafted,
                    n_accepted=n_accepted,
                )
            )
        if n_prompt:
            entries.append(PlanEntry(len(crowd), 0, [1] * n_prompt, 0, False))
            results.append(ResultEntry(len(crowd), SequenceStatus.OK, n_prompt))
        is_fed = any(map(policy.wants, crowd))
        shape = shape_of(entries, results, machine.splitting, limits.n_ubatch)
        factor = 1.0
        if noise is not None:
            factor = noise.gauss(1.0, 0.05) * (8 if noise.random() < 0.01 else 1)
        measured = machine.timings(shape, n_drafts, is_fed=is_fed, noise=max(0.5, factor))
        # What it should have taken counts, so that luck with outliers does not.
        total_s += machine.timings(shape, n_drafts, is_fed=is_fed).total_s
        # Of what prompts took the scheduler has as good a guess.
        n = len(crowd)
        alone = shape_of(entries[:n], results[:n], machine.splitting, limits.n_ubatch)
        found = machine.timings(alone, n_drafts, is_fed=is_fed, noise=max(0.5, factor))
        streams_s = found.total_s
        policy.observe(StepResult(results, timings=measured), streams_s)
        cost.observe(shape, measured)
        for member in crowd:
            if policy.wants(member):
                member.is_draft_cold = False
                member.n_fed += 1
        depths.append(max(n_drafts))
    return n_emitted / total_s, depths


def best_fixed(
    machine: Machine, acceptances: list[float], *, only: int | None = None
) -> tuple[float, int]:
    """Returns the tokens per second of the best K for all, and that K. K = 0 has no drafter.

    With `only`, of that K.
    """
    n = len(acceptances)
    found = []
    for n_draft in range(5) if only is None else (only,):
        n_emitted = sum(sum(p**i for i in range(n_draft + 1)) for p in acceptances)
        shape = StepShape(n * (1 + n_draft), n * (1 + n_draft))
        timings = machine.timings(shape, [n_draft] * n, is_fed=n_draft > 0)
        found.append((n_emitted / timings.total_s, n_draft))
    return max(found)
