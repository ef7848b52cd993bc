"""One K for all sequences of a step: the one with the most tokens per second measured. Pure.

Tokens of a step over its seconds: averages of the seconds by bucket of running sequences and K, and
of accepted tokens by position, for all K. Only a probe, some steps with another K, changes the one.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from drafthouse_server.drafting.guard import checked, is_duration
from drafthouse_server.drafting.policy import Draftable, FixedDraft
from drafthouse_server.step import EngineLimits, StepResult

__all__ = ["AdaptiveDraft"]

_MARGIN = (1.02, 1.1, 1.5)  # ratios of tokens/s: a probe's K is better; is probed early; is sure
_N_PROBE, _N_WARM = 6, 8  # steps: of a probe (the first, with a new graph, is left out); fed before
_REST_S = (0.25, 16.0)  # seconds from probe to probe: doubled, or quartered by a change; these, too
_CHANGE_S = 1.0  # seconds from one change of K to the next
_N_KNOWN = 3  # steps that were measured, without which an average says nothing
_N_AWAY = 6  # steps in a row with other numbers of sequences after which a probe is given up
_COST = (0.02, 0.007)  # share of the time that probes may lose: in the first seconds, and later
_FIRST_S = 10.0  # seconds of steps: how long first averages may be wrong
_N_SECONDS = (8, 2)  # steps that an average rests on (5 % noise each); an old one is worth
_N_SETTLED = 24  # steps with another K until its average owes little to its probe
_STALL = (1.25, 2.0)  # a step counts for so many averages at most, and an average for two steps
_N_DRAFTS = (400, 12)  # that an average of accepted tokens rests on: 2 points' error; old ones
_PRIOR, _N_PRIOR = 0.6, 8  # share of first tokens before any draft; drafts that replace a prior
_FEEDING = 0.01  # share of a step: a drafter that takes less to feed is fed while K = 0, too


class _Mean:
    value, n = 0.0, 0

    def add(self, value: float, n_max: int, n: int = 1) -> None:
        self.n = min(self.n + n, n_max)
        self.value += (value - self.value) * min(1.0, n / self.n)


class _Probe:
    k, n_steps, n_left = -1, 0, 0  # K that is tried (-1: none); steps of it, steps that are left
    i_bucket, n_away = 0, 0  # where it is tried; steps of other buckets since
    n_drafts, n_right = 0, 0  # of it; those whose first token was accepted


class _Bucket:  # of 1, 2, 3 to 4, 5 to 8 and so on sequences
    def __init__(self, k: int, n_draft_max: int, now_s: float) -> None:
        self.k, self.n_probes, self.rest_s = k, 0, _REST_S[0]
        self.early_s, self.due_s = now_s, now_s + _REST_S[0]
        self.former = -1  # K before a change, until a probe has confirmed the change; -1: none
        self.seconds = [_Mean() for _ in range(n_draft_max + 1)]  # by K; a sequence's


class AdaptiveDraft:
    """Chooses K by measured tokens per second.

    Args:
        n_draft_max: The engine's limit, >= 0.
    """

    def __init__(self, n_draft_max: int) -> None:
        self._n_draft_max, self.epoch = n_draft_max, 0
        self.reset()

    def reset(self) -> None:
        """Forgets all that was learnt; drafters are fed."""
        self.epoch, self.n_changes, self.is_enabled = self.epoch + 1, 0, True
        self._k, self._n_warm_up = min(1, self._n_draft_max), _N_WARM  # K beside probes; steps fed
        self._now_s, self._changed_s, self._paid_s, self._feeding = 0.0, -_CHANGE_S, 0.0, _Mean()
        self._buckets = defaultdict[int, _Bucket](
            lambda: _Bucket(self._k, self._n_draft_max, self._now_s)
        )
        self._accepted = [_Mean() for _ in range(self._n_draft_max)]  # by position
        self._probe = _Probe()
        self._kind = self._last = (-1, -1, True)  # of a step: bucket, K, whether drafters are fed
        self._asked, self._base, self._free = dict[int, int](), 1.0, 1.0  # K by slot; `choose_all`

    def wants(self, sequence: Draftable) -> bool:
        """Returns whether a sequence's drafter shall be fed."""
        n_draft = sequence.request.n_draft
        return self.is_enabled if n_draft is None else n_draft > 0

    def choose_all(
        self, sequences: Sequence[Draftable], limits: EngineLimits, draft_budget: int
    ) -> list[int]:
        """Returns K for each sequence; a request that asks for a K gets it."""
        bound = [k for s in sequences if (k := s.request.n_draft) is not None]
        n, k, i_bucket = len(sequences), -1, (len(sequences) - 1).bit_length()
        if n > len(bound) and self._n_draft_max:
            self._base, self._free = 1 + sum(map(self._gain, bound)) / n, 1 - len(bound) / n
            k = self._next(i_bucket, n)
        drafts = FixedDraft(k).choose_all(sequences, limits, draft_budget)
        self._asked = {s.seq_id: d for s, d in zip(sequences, drafts, strict=True)}
        self._kind = i_bucket, k if k <= max(drafts, default=0) else -1, self.is_enabled
        return drafts

    def _next(self, i_bucket: int, n: int) -> int:
        bucket, probe = self._buckets[i_bucket], self._probe
        probe.n_away = 0 if i_bucket == probe.i_bucket else probe.n_away + 1
        if probe.n_away > _N_AWAY:
            probe.k = -1
        elif not probe.n_away and probe.k >= 0 and (probe.n_left <= 0 or self._is_lost(bucket)):
            self._conclude(bucket, n)
        if bucket.seconds[bucket.k].n < _N_KNOWN:
            bucket.k = self._k  # nothing speaks for another one
        elif probe.k < 0 and self._now_s >= bucket.early_s:
            self._begin_probe(bucket, i_bucket, n)
        if probe.k < 0 and bucket.k != self._k and self._now_s >= self._changed_s + _CHANGE_S:
            self._k, self._changed_s, self.n_changes = bucket.k, self._now_s, self.n_changes + 1
        # Without drafts, drafters are not fed; so that is how 0 is measured. Those of a probe are
        # fed while it waits for its bucket, too: else they would be warmed up in vain.
        k = self._k if probe.k < 0 or probe.n_away else probe.k
        is_enabled = max(k, probe.k) > 0 or self._feeding.value < _FEEDING
        if is_enabled != self.is_enabled:
            self.is_enabled, self.epoch, self._n_warm_up = is_enabled, self.epoch + 1, 0
        if self.is_enabled and self._n_warm_up < _N_WARM:
            return -1
        probe.n_left -= k == probe.k
        return k

    def _begin_probe(self, bucket: _Bucket, i_bucket: int, n: int) -> None:
        """Tries 0, 1 and further up while that may be better; then others.

        After a change the former K comes first: a wrong change must not wait for dear probes.
        """
        rates = [self._rate(k, mean) for k, mean in enumerate(bucket.seconds)]
        # At most, since K takes K - 1's time at least. 0 where that was not measured.
        most = [math.inf, *(self._rate(k + 1, s) for k, s in enumerate(bucket.seconds[:-1]))]
        new = [k for k, rate in enumerate(rates) if not rate and most[k] > max(rates)]
        k = new[0] if new else max(range(len(rates)), key=lambda k: rates[k] * (k != bucket.k))
        is_early = bool(new) or rates[k] > _MARGIN[1] * rates[bucket.k]
        due_s = bucket.due_s if bucket.former >= 0 else max(bucket.due_s, self._paid_s)
        if self._now_s < due_s and not is_early:
            return
        near = [k for k in (bucket.k + 1, 0, bucket.k - 1) if k <= self._n_draft_max]
        probe = self._probe
        due = near[bucket.n_probes % len(near)] if bucket.k else max(k, 1)
        probe.k = k if is_early else due if bucket.former < 0 else bucket.former
        probe.i_bucket, probe.n_away, bucket.n_probes = i_bucket, 0, bucket.n_probes + 1
        probe.n_drafts = probe.n_right = 0
        probe.n_left = probe.n_steps = max(_N_PROBE, 0 if self._k else 2 * _N_PRIOR // n)
        n_old = _N_SECONDS[1] if probe.k != bucket.former else 0  # that one is measured afresh
        bucket.seconds[probe.k].n = min(bucket.seconds[probe.k].n, n_old)
        for mean in self._accepted if not self._k else ():
            mean.n = min(mean.n, _N_DRAFTS[1])

    def _is_lost(self, bucket: _Bucket) -> bool:
        """Returns whether drafts would lose to none even if their next two were right.

        Where one stream's drafts are never right, all steps of a probe are longer for nothing.
        """
        probe, tried = self._probe, bucket.seconds[self._probe.k]
        if bucket.k or probe.n_drafts < _N_PROBE or tried.n < _N_KNOWN:
            return False
        gain = probe.k * (probe.n_right + 2) / (probe.n_drafts + 2)
        return (self._base + self._free * gain) / tried.value < self._rate(0, bucket.seconds[0])

    def _conclude(self, bucket: _Bucket, n: int) -> None:
        """Takes the better K, and says when to probe again."""
        probe = self._probe
        is_early, probe.n_steps = probe.n_left > 0, probe.n_steps - max(0, probe.n_left)
        tried, kept = bucket.seconds[probe.k], bucket.seconds[bucket.k]
        rate, rate_kept = self._rate(probe.k, tried), self._rate(bucket.k, kept)
        # The loser is the other one's next probe.
        lost = 1 - min(rate, rate_kept) / max(rate, rate_kept) if rate_kept else 0.0
        n_lost = probe.n_steps + (_N_WARM if self._k and not probe.k else 0)
        lost_s = lost * n_lost * n * min(tried.value, 3 * kept.value)  # 3: stalls aside
        lost_s += 0 if self._k else self._feeding.value * _N_WARM * n * kept.value
        is_better = tried.n >= _N_KNOWN and rate > _MARGIN[0] * rate_kept
        # What is changed back was compared twice: that needs no third time.
        is_doubted = is_better and rate < _MARGIN[2] * rate_kept and probe.k != bucket.former
        bucket.former = bucket.k if is_doubted else -1
        bucket.k = probe.k if is_better else bucket.k
        bucket.rest_s = min(max(_REST_S[0], bucket.rest_s * (0.25 if is_better else 2)), _REST_S[1])
        cost = _COST[self._now_s > _FIRST_S or is_early]
        cost_s = lost_s / cost if not is_doubted else 0.0
        self._paid_s = max(self._paid_s, self._now_s) + cost_s
        wait_s = max(bucket.rest_s, cost_s, _N_SETTLED * n * tried.value * is_doubted)
        probe.k, bucket.due_s = -1, self._now_s + wait_s
        bucket.early_s = self._now_s + wait_s / 4 * (bucket.n_probes > self._n_draft_max)

    def _gain(self, k: int) -> float:
        """Returns the tokens to be accepted of a draft; a position's prior is the one before."""
        total, still, share = 0.0, 1.0, _PRIOR
        for mean in self._accepted[:k]:
            n_prior = max(0, _N_PRIOR - mean.n)
            share = (mean.n * mean.value + n_prior * share) / (mean.n + n_prior)
            still *= share
            total += still
        return total

    def _rate(self, k: int, seconds: _Mean) -> float:
        """Returns the tokens/s of a sequence; 0: not measured."""
        return (self._base + self._free * self._gain(k)) / seconds.value if seconds.n else 0.0

    def observe(self, result: StepResult, streams_s: float = 0.0) -> None:
        """Learns from a step that took `streams_s` without its prompts; 0 is not known."""
        (i_bucket, k, is_fed), n, timings = self._kind, len(self._asked), checked(result.timings)
        is_first, self._last = self._kind != self._last, self._kind
        self._now_s, self._n_warm_up = self._now_s + timings.total_s, self._n_warm_up + is_fed
        counts = Counter((self._asked.get(e.seq_id, 0), e.n_accepted) for e in result.entries)
        for (n_asked, n_right), n_drafts in counts.items():
            if n_asked and k == self._probe.k:
                self._probe.n_drafts += n_drafts
                self._probe.n_right += n_drafts if n_right else 0
            for i, mean in enumerate(self._accepted[: min(n_asked, n_right + 1)]):
                mean.add(float(i < n_right), _N_DRAFTS[0], n_drafts)
        share = 0.0 if k else timings.process_s / max(timings.total_s, 1e-9)  # of the step: feeding
        seconds = streams_s * (1 - share) / max(1, n * result.n_steps)
        if k < 0 or is_first or not (seconds > 1e-9 and is_duration(seconds)):
            return
        bucket = self._buckets[i_bucket]
        mean = bucket.seconds[k]
        before = mean.value = min(mean.value, _STALL[1] * seconds) if mean.n else seconds
        mean.add(min(seconds, _STALL[0] * mean.value), _N_SECONDS[0])
        if k == bucket.k:  # as contexts grow, all K take longer: none is the better for its age
            for other in bucket.seconds:
                other.value *= 1.0 if other is mean else mean.value / before
        if is_fed and not k:
            self._feeding.add(share, _N_SECONDS[0])
