"""Calls at random on the native engine, a seed a test; `engine_at_random/drive.py` says which.

A failure tells what was wrong, the last operations, the settings, and the command that repeats it:

    python -m tests.proofs.engine_at_random --runs 1 --seed N --operations 60

`make engine-at-random SECONDS=600` is the same with other seeds for as long as wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
from tests.proofs.engine_at_random.drive import Outcome, drive
from tests.proofs.engine_at_random.settings import TARGET_KINDS, Settings
from tests.support.built import needs_extension

from drafthouse_engine import DRAFT_TYPES

pytestmark = needs_extension()

SEEDS = (*range(33), 129, 269)
"""Every target with every drafter; of n-gram caches one that drafts much (129); and one that sees a
token that a preempted sampler hears twice (269)."""
N_OPERATIONS = 60
KINDS_OF_CACHES = {
    "split": lambda it: not it.params.kv_unified,
    "one pool": lambda it: it.params.kv_unified,
    "exact": lambda it: it.is_exact,
    "not exact": lambda it: not it.params.exact,
    "windows alone": lambda it: it.n_window and not it.params.cache.swa_full,
    "quantised": lambda it: it.params.cache.type_k.startswith("q"),
    "without the fused kernel": lambda it: not it.params.flash_attention,
}


@cache
def outcome(seed: int) -> Outcome:
    return drive(seed, N_OPERATIONS)


def counted(is_meant: Callable[[Settings], object]) -> Counter[str]:
    """Returns what was done in all on engines of a kind."""
    outcomes = [outcome(seed) for seed in SEEDS]
    return sum((it.counts for it in outcomes if is_meant(it.settings)), Counter())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sequence_gives_what_it_gives_alone(seed: int) -> None:
    found = outcome(seed)
    assert not found.fault, found.fault
    assert found.counts["tokens"] > 0


@pytest.mark.parametrize("draft_type", DRAFT_TYPES)
def test_every_drafter_was_tried(draft_type: str) -> None:
    counts = counted(lambda settings: settings.params.draft_type == draft_type)
    assert counts["tokens"] > 0
    is_drafter = draft_type != "none"
    assert (counts["drafted"] + counts["drafted by hand"] > 0) == is_drafter
    assert (counts["given"] > 0) == is_drafter


@pytest.mark.parametrize("target", TARGET_KINDS)
@pytest.mark.parametrize("is_unified", [False, True], ids=["split", "one pool"])
def test_every_target_was_tried_in_both_caches(target: str, *, is_unified: bool) -> None:
    counts = counted(lambda it: (it.target, it.params.kv_unified) == (target, is_unified))
    assert counts["tokens"] > 0
    assert counts["drafted"] > 0


@pytest.mark.parametrize("kind", KINDS_OF_CACHES)
def test_every_kind_of_cells_and_sums_was_tried(kind: str) -> None:
    assert counted(KINDS_OF_CACHES[kind])["tokens"] > 0


@pytest.mark.parametrize(
    "name",
    [
        "drafted and accepted", "given and accepted", "rounds by hand", "accepted by hand",
        "runs", "saves", "swaps", "swaps by hand", "resumed", "kept in place",
        "kept of another slot", "kept of a snapshot", "lacking", "loads", "forks", "rollbacks",
        "refused plans", "faults", "failed as alone", "finished",
    ],
)  # fmt: skip
def test_every_operation_was_tried(name: str) -> None:
    assert counted(lambda _: True)[name] > 0
