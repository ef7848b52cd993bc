"""What a step costs in seconds, by three coefficients: enough to cut prompts by time. Pure.

    seconds = a x physical batches + b x tokens + c x pairs of a token and a cell before it

The coefficients are the least squares of the relative error over the last steps, none below 0.
Steps with and without a prompt are forgotten apart: there are many more of the one kind.
"""

import math

from drafthouse_server.drafting.cost import StepShape
from drafthouse_server.drafting.guard import is_duration
from drafthouse_server.step import StepTimings

__all__ = ["PlainCost"]

_FADING = 0.95  # what is left of a kind's steps after one more: the last 20 count
_LEAST_S = 1e-6  # seconds: clocks are no finer, and what is divided by it stays finite
_PRIOR = (0.5, 0.5, 1e-4)  # parts of the first step's seconds: batches, tokens; a pair of a token
_PRIOR_WEIGHT = 0.01  # of the prior, in steps: it decides only what no step has told yet
_N_SWEEPS = 2  # over the coefficients after each step; the next step's go on from there


def _counts(shape: StepShape) -> tuple[float, float, float]:
    return max(1.0, shape.n_ubatches), shape.n_tokens, shape.n_pairs


class PlainCost:
    """Predicts what a step takes, and learns from each; as `StepCost` does, with less."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all that was learnt."""
        self.n_observed = 0
        """Steps learnt from."""
        self._coefficients = [_LEAST_S, _LEAST_S, 0.0]
        self._prior = [_LEAST_S] * 3
        # By kind: sums of products of two counts over squared seconds, and of one over seconds.
        self._squares = {kind: [[0.0] * 3 for _ in range(3)] for kind in (False, True)}
        self._targets = {kind: [0.0] * 3 for kind in (False, True)}

    def predict(self, shape: StepShape) -> float:
        """Returns the seconds that a step takes, > 0."""
        a, b, c = self._coefficients
        n_batches, n_tokens, n_pairs = _counts(shape)
        return max(_LEAST_S, a * n_batches + b * n_tokens + c * n_pairs)

    def observe(self, shape: StepShape, timings: StepTimings, wall_s: float = 0.0) -> None:
        """Learns from a step that succeeded.

        Args:
            shape: What it computed.
            timings: What it took in the engine; without a total it is ignored.
            wall_s: Seconds with the host's part; 0 is not known.
        """
        seconds = max(timings.total_s, wall_s)
        counts = _counts(shape)
        if not (timings.total_s > 0 and is_duration(seconds) and all(map(math.isfinite, counts))):
            return
        if not shape.n_tokens:
            return
        if not self.n_observed:
            per_token = seconds * _PRIOR[1] / counts[1]
            self._prior = [seconds * _PRIOR[0] / counts[0], per_token, per_token * _PRIOR[2]]
            self._prior = [max(value, _LEAST_S**2) for value in self._prior]
            self._coefficients = list(self._prior)
        self.n_observed += 1
        # The smaller of both as scale would let one step that was too short weigh like hundreds.
        scale = max(seconds, self.predict(shape))
        kind = shape.n_tokens > shape.n_outputs
        squares, targets = self._squares[kind], self._targets[kind]
        scaled = [count / scale for count in counts]
        for i in range(3):
            targets[i] = targets[i] * _FADING + scaled[i] * seconds / scale
            for j in range(3):
                squares[i][j] = squares[i][j] * _FADING + scaled[i] * scaled[j]
        self._solve()

    def _solve(self) -> None:
        found, (some, others) = self._coefficients, self._squares.values()
        rows = [
            [x + y for x, y in zip(*pair, strict=True)] for pair in zip(some, others, strict=True)
        ]
        targets = [x + y for x, y in zip(*self._targets.values(), strict=True)]
        for _ in range(_N_SWEEPS):
            for i, (row, prior) in enumerate(zip(rows, self._prior, strict=True)):
                weight = _PRIOR_WEIGHT / prior**2
                rest = row[0] * found[0] + row[1] * found[1] + row[2] * found[2] - row[i] * found[i]
                found[i] = max(0.0, (targets[i] + weight * prior - rest) / (row[i] + weight))

    def fit_prefill(self, shape: StepShape, seconds: float, n_past: int, n_most: int) -> int:
        """Returns how many tokens of a prompt fit into a step beside what it does already.

        Args:
            shape: The step without them.
            seconds: What the whole step may take.
            n_past: Tokens of the prompt that are computed.
            n_most: Most tokens, >= 0.
        """
        a, b, c = self._coefficients
        left_s = seconds - self.predict(shape) - (a if shape.n_tokens else 0.0)
        if not left_s > 0:
            return 0
        # c / 2 n² + (b + c n_past) n = left_s, solved so that it holds for c = 0, too.
        slope = b + c * n_past
        n = 2 * left_s / max(slope + math.sqrt(slope**2 + 2 * c * left_s), _LEAST_S**2)
        return int(min(n, n_most))

    def recompute_s(self, n_tokens: int, n_batch: int) -> float:
        """Returns the seconds of computing a prompt again, at most `n_batch` tokens a step."""
        n_steps = -(-n_tokens // n_batch)
        a, b, c = self._coefficients
        return a * n_steps + b * n_tokens + c * n_tokens**2 / 2
