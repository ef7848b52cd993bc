"""How many prompt tokens a step carries, and whose."""

from __future__ import annotations

import math
from collections import abc

from drafthouse_server.drafting.cost import Splitting, StepShape
from drafthouse_server.drafting.estimators import Estimators
from drafthouse_server.scheduling.checkpoints import Checkpoints
from drafthouse_server.scheduling.pacing import N_ALONE, N_PIECE, STEP_FREE_S, ChunkSizer
from drafthouse_server.scheduling.plan_builder import PlanBuilder
from drafthouse_server.scheduling.sequence import Sequence
from drafthouse_server.step import EngineLimits, PlanEntry
from drafthouse_server.tenancy.fairness import VirtualCounters

__all__ = ["N_QUANTUM", "Newcomers", "Prefill", "PrefillShares"]

_FLOOR_SHARE = 4
"""While prompts wait, 1/4 of the step's tokens is kept for them: drafts get the rest."""

_LEAST_SHARE = 32
"""At least 1/32 of the step's tokens goes to prompts, however long the step is already."""

N_QUANTUM = N_PIECE + 1
"""Smallest piece of a prompt that is worth a place in a step, in tokens; a rest may be smaller.

One is computed together with the running streams' next tokens.
"""

_BASE_SHARE = 0.05
"""Part of a step of prompts, while nobody generates, that it would take with any tokens."""

_STEP_SHARE = 0.5
"""Part of the others' step that a newcomer's may take: so much longer is a gap."""

_TIME_SHARE = 0.05
"""Part of the time that newcomers' steps may take."""

_CREDIT_S = 0.1
"""Seconds of such steps that may be saved up."""

_DEBT_S = 1.0
"""Seconds of such steps that may be owed: one that took longer did not because of its prompts."""


class Prefill:
    """Cuts prompts into pieces that running streams hardly feel, nor who comes meanwhile.

    Args:
        limits: What the engine can carry.
        estimators: Predict what a step takes.
        checkpoints: Tell where a prompt is to be cut for one.
        gap_s: Target of the gap between tokens while prompts are computed, seconds; 0 is twice the
            unloaded 99th percentile.
    """

    def __init__(
        self,
        limits: EngineLimits,
        estimators: Estimators,
        checkpoints: Checkpoints,
        gap_s: float,
    ) -> None:
        self._limits = limits
        self._estimators = estimators
        self._checkpoints = checkpoints
        self._sizer = ChunkSizer(gap_s)
        self._shares = PrefillShares()
        estimators.guard.add("pacing", self._sizer.reset)

    def draft_budget(self, n_decodes: int, prefills: list[Sequence], n_cells_free: int) -> int:
        """Returns the most draft tokens of all together; prompts keep a share of the step.

        Args:
            n_decodes: Sequences that generate.
            prefills: Those with tokens to compute first.
            n_cells_free: Cells that are left once each that generates has its next token.
        """
        limits = self._limits
        n_used = n_decodes + len(prefills)
        budget = min(min(limits.n_batch, limits.n_outputs_max) - n_used, n_cells_free)
        if prefills:
            n_pending = sum([sequence.n_pending for sequence in prefills])
            prompt_floor = min(n_pending, limits.n_batch // _FLOOR_SHARE)
            budget = min(budget, limits.n_batch - n_decodes - prompt_floor)
        return max(0, budget)

    def add_pieces(self, plan: PlanBuilder, prefills: list[Sequence], prompt_budget: int) -> None:
        """Gives the plan pieces of prompts.

        Args:
            plan: It has the entries of those that generate.
            prefills: Sequences with tokens to compute, at least one.
            prompt_budget: Tokens that the step has room for besides.
        """
        decodes, estimators = plan.entries, self._estimators
        paced_budget, n_beside = prompt_budget, None
        if decodes and prompt_budget > 0 and estimators.cost.n_observed:
            paced_budget = self._pace(plan, prefills, prompt_budget)
            # Where slots have cells of their own, what all have is computed together: a piece's
            # first tokens with the last tokens and drafts of the others.
            is_split = estimators.splitting is Splitting.EQUAL
            n_beside = min([1 + entry.n_verified for entry in decodes]) if is_split else 0
        elif not decodes and not plan.is_newcomers:
            paced_budget = self._pace_alone(prefills, prompt_budget)
        pieces = self._share(plan, prefills, paced_budget, prompt_budget, n_beside)
        plan.entries = [*decodes, *pieces]

    def _pace(self, plan: PlanBuilder, prefills: list[Sequence], prompt_budget: int) -> int:
        """Returns how many prompt tokens fit beside running streams, so that their gap holds."""
        estimators = self._estimators
        shape = estimators.decode_shape(plan.entries)
        decode_s = estimators.predict(shape)
        n_past = max([sequence.n_computed for sequence in prefills])

        def step_s() -> float:
            seconds = self._sizer.step_s(decode_s)
            if not 0 < seconds < math.inf:
                raise ValueError(f"a step may take {seconds} s")
            return seconds

        n_tokens = 0
        if decode_s < math.inf:
            seconds = estimators.guard.ask("pacing", step_s, lambda: 0.0)
            n_tokens = estimators.fit_prefill(shape, seconds, n_past, prompt_budget)
        n_least = max(1, self._limits.n_batch // _LEAST_SHARE)
        return min(prompt_budget, max(n_tokens, n_least))

    def _pace_alone(self, prefills: list[Sequence], prompt_budget: int) -> int:
        """Returns how many prompt tokens a step has while nobody generates.

        Who comes meanwhile waits for its end. So it is as short as costs the prompts next to
        nothing: what a step takes anyway is a small part of it, and rows share their work.
        """
        estimators = self._estimators
        if estimators.cost.n_observed < 2:  # of two lengths, steps tell what a token takes
            return min(prompt_budget, N_ALONE) if estimators.cost.n_observed else prompt_budget
        n_past = max([sequence.n_computed for sequence in prefills])
        base = StepShape()
        base_s = estimators.predict(base)
        token_s = estimators.predict(StepShape(n_tokens=1, n_pairs=n_past)) - base_s
        if not token_s > 0:  # nothing known of it, too
            return prompt_budget
        n_least = max(float(N_ALONE), base_s * (1 / _BASE_SHARE - 1) / token_s)
        if not n_least < prompt_budget:
            return prompt_budget
        n_free = estimators.fit_prefill(base, STEP_FREE_S, n_past, prompt_budget)
        return max(n_free, int(n_least))

    def _share(
        self,
        plan: PlanBuilder,
        prefills: list[Sequence],
        paced_budget: int,
        prompt_budget: int,
        n_beside: int | None,
    ) -> abc.Iterator[PlanEntry]:
        """Yields pieces of prompts until the budget is used up.

        Args:
            plan: What the step does besides.
            prefills: Those with tokens to compute.
            paced_budget: Tokens to share.
            prompt_budget: Tokens that the step has room for: a piece may need more.
            n_beside: Tokens of a piece that are computed with running streams'; None: nothing runs,
                or nothing is known of what a piece takes.
        """
        wanted = {sequence: self._n_wanted(plan, sequence) for sequence in prefills}
        n_external = 0
        # A newcomer's step has room for all: it changes nothing in whose turn it is.
        shares = PrefillShares() if plan.is_newcomers else self._shares
        n_quantum = N_QUANTUM if plan.entries else N_ALONE
        for sequence, n_share in shares.share(wanted.items(), paced_budget, n_quantum):
            n_tokens, n_wanted = n_share, wanted[sequence]
            if n_beside is not None:
                n_tokens = self._align(n_share, n_wanted, sequence.n_computed, n_beside)
                if n_external and n_external + min(n_tokens, n_wanted) > paced_budget:
                    continue  # its piece waits for a step of its own
            elif not plan.entries and n_wanted - n_share < N_PIECE:
                n_tokens = n_wanted  # what would be left makes no piece of its own
            n_tokens = min(n_tokens, n_wanted, prompt_budget - n_external)
            if n_tokens <= 0:
                continue
            n_external += n_tokens
            shares.charge(sequence, n_tokens)
            start = sequence.n_computed
            piece = sequence.tokens[start : start + n_tokens]
            # A resumed sequence knows what comes after its last token but one.
            is_output = n_tokens == sequence.n_pending
            yield PlanEntry(sequence.seq_id, start, piece, 0, is_output)

    def _align(self, n_tokens: int, n_wanted: int, n_past: int, n_beside: int) -> int:
        """Returns the tokens of a piece that attention computes together."""

        def align() -> int:
            n_aligned = self._sizer.align(n_tokens, n_wanted, n_past, n_beside)
            if not 0 <= n_aligned <= n_wanted:
                raise ValueError(f"a piece of {n_aligned} tokens, of {n_wanted}")
            return n_aligned

        return self._estimators.guard.ask("pacing", align, lambda: n_tokens)

    def _n_wanted(self, plan: PlanBuilder, sequence: Sequence) -> int:
        """Returns the tokens to compute next before a sequence generates.

        The prompt, up to where a checkpoint is to be taken, or to its end in a newcomer's step,
        which is to give a token; or, where the sequence was preempted, all but the last token: that
        one goes on as if nothing had happened, with a draft.
        """
        if sequence.tally.n_steps:
            return sequence.n_pending - 1
        if plan.is_newcomers:
            return sequence.n_pending
        return self._checkpoints.n_before(plan, sequence)

    def observe(self, predicted_s: float, step_s: float, *, has_prefill: bool) -> None:
        """Learns from a step in which streams went on; both times are 0 where nothing is known."""
        if predicted_s > 0:
            self._estimators.guard.tell(
                "pacing",
                lambda: self._sizer.observe(predicted_s, step_s, has_prefill=has_prefill),
            )


class Newcomers:
    """Decides whose short prompts are computed while all others wait for one step.

    On a processor a step of many streams, or of a piece of a long prompt, takes several times as
    long as a short prompt alone. A tenant with nothing running that comes with one would wait for
    the end of the step in flight, then for one in which its prompt is computed beside what the
    others have. It gets a step of its own instead; the others feel one gap that is a little longer.

    Args:
        limits: What the engine can carry.
        estimators: Predict what a step takes.
        counters: Say which tenant was served more.
        gap_s: Target of the gap between tokens, seconds; 0 is none.
    """

    def __init__(
        self,
        limits: EngineLimits,
        estimators: Estimators,
        counters: VirtualCounters,
        gap_s: float,
    ) -> None:
        self._limits = limits
        self._estimators = estimators
        self._counters = counters
        self._gap_s = gap_s
        self._credit_s = _CREDIT_S
        self._is_step = False  # whether the step in flight is newcomers'

    def choose(
        self, decodes: list[Sequence], prefills: list[Sequence], n_cells_free: int
    ) -> list[Sequence]:
        """Returns the sequences whose prompts get the next step to themselves; mostly none.

        Never in two steps in a row, and only prompts for whose end there is room, too.

        Args:
            decodes: Those that generate.
            prefills: Those with tokens to compute first.
            n_cells_free: Cells that are left once each that generates has its next token.
        """
        was_step, self._is_step = self._is_step, False
        if was_step or not prefills or not self._estimators.cost.n_observed:
            return []
        others = decodes or [sequence for sequence in prefills if sequence.n_pending > N_ALONE]
        if not others:
            return []
        running = {sequence.request.tenant for sequence in others}
        new = [s for s in prefills if s.request.tenant not in running]
        light = self._counters.light({s.request.tenant for s in new}, running) if new else ()
        new = [s for s in new if s.request.tenant in light]
        stall_s = self._estimators.stall_s if decodes else self._piece_s(others)
        if not stall_s < math.inf:
            return []
        most_s = min(_STEP_SHARE * stall_s, self._credit_s)
        if self._gap_s and decodes:
            most_s = min(most_s, self._gap_s - stall_s)
        chosen = self._fitting(new, min(self._limits.n_batch, n_cells_free), most_s)
        self._is_step = bool(chosen)
        return chosen

    def _piece_s(self, others: list[Sequence]) -> float:
        """Returns the predicted seconds of the smallest step of these prompts."""
        n_past = max([sequence.n_computed for sequence in others])
        return self._estimators.predict(StepShape(N_ALONE, n_pairs=N_ALONE * n_past))

    def _fitting(self, new: list[Sequence], n_room: int, most_s: float) -> list[Sequence]:
        """Returns those, from the shortest on, for which there is room, and time.

        One that found room for a part of its prompt alone could wait for the rest for ever: nobody
        gives up a cell while nobody generates.

        Args:
            new: Those that may.
            n_room: Tokens for which there is room.
            most_s: Seconds that all of them may take.
        """
        chosen = list[Sequence]()
        for sequence in sorted(new, key=lambda it: it.n_pending):
            n_room -= sequence.n_pending
            if n_room < 0 or self._alone_s([*chosen, sequence]) > most_s:
                break
            chosen.append(sequence)
        return chosen

    def _alone_s(self, new: list[Sequence]) -> float:
        """Returns the predicted seconds of a step with these prompts alone."""
        n_tokens = [sequence.n_pending for sequence in new]
        n_pairs = sum([s.n_pending * (s.n_computed + s.n_pending / 2) for s in new])
        shape = StepShape(sum(n_tokens), len(new), len(set(n_tokens)), n_pairs)
        return self._estimators.predict(shape)

    def observe(self, step_s: float) -> None:
        """Notes what the last step took, seconds."""
        saved_s = self._credit_s + _TIME_SHARE * step_s - self._is_step * step_s
        self._credit_s = max(-_DEBT_S, min(_CREDIT_S, saved_s))


class PrefillShares:
    """Shares a step's prompt tokens: the tenants by weight and in turn, inside one by rank.

    In every other of a tenant's turns its short prompts go before a long one that came earlier and
    has no higher priority: they need not wait for its end, and take half of its time at most.

    A tenant's turn comes earlier the fewer tokens it got, for its weight, while others had prompts
    too. What was granted and then found no place in the step is not charged (`charge`), or a tenant
    whose pieces are too small again and again would never have its turn.
    """

    def __init__(self) -> None:
        # Tokens over the tenant's weight, of tenants with prompts now.
        self._served: dict[str, float] = {}
        self._weights: dict[str, float] = {}  # of those among whom was shared last
        self._overtaken = set[str]()  # tenants whose short prompts went first in their last turn

    def share(
        self,
        prefills: abc.Iterable[tuple[Sequence, int]],
        n_tokens: int,
        n_quantum: int = N_QUANTUM,
    ) -> list[tuple[Sequence, int]]:
        """Returns how many tokens each sequence gets, those with none left out.

        Every tenant gets the part that its weight says, or, where that would be too little to be
        worth a place in the step, its turn. What one does not need, the others get.

        Args:
            prefills: Sequences, and the tokens that each has to compute, > 0.
            n_tokens: Tokens to share, >= 0.
            n_quantum: Tokens that are worth a place in the step.
        """
        lines: dict[str, list[tuple[Sequence, int]]] = {}
        for part in prefills:
            lines.setdefault(part[0].request.tenant, []).append(part)
        for line in lines.values():
            line.sort(key=_part_rank)
        moved = {t for t, line in lines.items() if t not in self._overtaken and _overtake(line)}
        if len(lines) == 1:
            self._weights = {}
            shares = _share_line(next(iter(lines.values())), n_tokens)
        else:
            shares = self._share_lines(lines, n_tokens, n_quantum)
        had_turn = {sequence.request.tenant for sequence, _ in shares}
        self._overtaken = (self._overtaken & lines.keys()) - had_turn | moved & had_turn
        return shares

    def charge(self, sequence: Sequence, n_tokens: int) -> None:
        """Counts tokens of a sequence that the step computes, of those that it was to get."""
        weight = self._weights.get(sequence.request.tenant)
        if weight is not None:
            self._served[sequence.request.tenant] += n_tokens / weight

    def _share_lines(
        self, lines: dict[str, list[tuple[Sequence, int]]], n_left: int, n_quantum: int
    ) -> list[tuple[Sequence, int]]:
        # A tenant that joins starts at the lowest current balance.
        before = self._served
        least = min((before[tenant] for tenant in lines if tenant in before), default=0.0)
        served = self._served = {tenant: before.get(tenant, least) for tenant in lines}
        wanted = {tenant: sum(n for _, n in line) for tenant, line in lines.items()}
        tenants = sorted(lines, key=lambda tenant: (served[tenant], wanted[tenant]))
        weights = self._weights = {tenant: lines[tenant][0][0].request.weight for tenant in tenants}
        granted = dict.fromkeys(tenants, 0)
        n_open = len(tenants)
        while n_left > 0 and n_open:
            n_open = 0
            still = sum(weights[tenant] for tenant in tenants if wanted[tenant] > granted[tenant])
            for tenant in tenants:
                n_more = wanted[tenant] - granted[tenant]
                if not n_more or not n_left:
                    continue
                share = weights[tenant] / max(still, weights[tenant])
                n = min(n_more, n_left, max(int(n_left * share), n_quantum))
                granted[tenant] += n
                n_left -= n
                still -= weights[tenant]
                n_open += n < n_more
        return [part for t in tenants for part in _share_line(lines[t], granted[t])]


def _part_rank(part: tuple[Sequence, int]) -> tuple[float, int]:
    return part[0].rank


def _overtake(line: list[tuple[Sequence, int]]) -> bool:
    """Puts short prompts of one tenant before a long one; returns whether there were any."""
    first = line[0][0]
    if first.n_pending <= N_ALONE:
        return False
    short, rest = list[tuple[Sequence, int]](), list[tuple[Sequence, int]]()
    for part in line:
        is_short = part[0].n_pending <= N_ALONE
        is_next = is_short and part[0].request.priority >= first.request.priority
        (short if is_next else rest).append(part)
    line[:] = short + rest
    return bool(short)


def _share_line(
    line: abc.Sequence[tuple[Sequence, int]], n_left: int
) -> list[tuple[Sequence, int]]:
    """Returns what each of one tenant's sequences gets, the first in rank first."""
    shares = []
    for sequence, n_wanted in line:
        n = min(n_wanted, n_left)
        if n <= 0:
            break
        shares.append((sequence, n))
        n_left -= n
    return shares
