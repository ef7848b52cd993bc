"""What sequences are likely to need, and what is kept of those that were preempted."""

from __future__ import annotations

from drafthouse_server.scheduling.cells import CellLedger
from drafthouse_server.scheduling.preemption import SwapSpace
from drafthouse_server.scheduling.sequence import Request, Sequence
from drafthouse_server.step import EngineLimits

LIMITS = EngineLimits("mtp", 4, 1000, 500, 64, 64, 4, 20)


def make(n_output: int = 0, n_output_max: int = 400, tenant: str = "a") -> Sequence:
    sequence = Sequence(Request("r", [1] * 50, tenant=tenant), None, n_output_max=n_output_max)
    sequence.tokens += [2] * n_output
    return sequence


def test_slots_with_cells_of_their_own_share_nothing() -> None:
    assert CellLedger(LIMITS).is_shared
    assert not CellLedger(EngineLimits("mtp", 4, 2000, 500, 64, 64, 4, 20)).is_shared


def test_a_sequence_counts_with_what_its_tenants_others_came_to() -> None:
    ledger = CellLedger(LIMITS)
    before = ledger.need(make())
    assert 50 < before < 450
    for _ in range(40):
        ledger.lengths.observe(make(n_output=20))
        ledger.lengths.observe(make(n_output=300, tenant="b"))
    assert ledger.need(make()) == 50 + 20 + 4
    assert ledger.need(make(tenant="b")) == 50 + 300 + 4
    assert 74 < ledger.need(make(tenant="new")) <= 50 + 400 + 4


def test_lengths_that_differ_are_counted_with_a_margin() -> None:
    ledger = CellLedger(LIMITS)
    for i in range(100):
        ledger.lengths.observe(make(n_output=10 + 40 * (i % 2)))
    assert 50 + 30 + 15 <= ledger.need(make()) <= 50 + 60


def test_who_exceeds_the_expected_grows_and_never_beyond_its_limit() -> None:
    ledger = CellLedger(LIMITS)
    for _ in range(40):
        ledger.lengths.observe(make(n_output=20))
    for n_output in range(399):
        sequence = make(n_output)
        need = ledger.need(sequence)
        assert len(sequence.tokens) < need <= 50 + 400 + 4
    assert ledger.need(make(3, n_output_max=5)) == 50 + 5 + 4


def test_what_the_engine_lacks_is_not_counted_on_until_somebody_ends() -> None:
    ledger = CellLedger(LIMITS)
    ledger.shrink(700)
    ledger.shrink(800)
    assert ledger.n_cells == 700
    ledger.restore()
    assert ledger.n_cells == 1000


def preempted(n_computed: int) -> Sequence:
    sequence = make(5)
    sequence.n_computed = n_computed
    return sequence


def test_snapshots_are_bounded_and_what_does_not_fit_is_computed_again() -> None:
    swap = SwapSpace(1000)
    one, other = preempted(50), preempted(40)
    swap.put(one, b"x" * 800)
    swap.put(other, b"x" * 300)
    assert (one.n_computed, other.n_computed) == (50, 0)
    assert other.swap.snapshot is None
    assert (swap._n_bytes, swap.n_recomputed) == (800, 40)
    assert not swap.is_worth_saving(50, None)  # 16 bytes a token were seen
    assert swap.is_worth_saving(10, None)
    assert swap.take(one) == b"x" * 800
    assert swap.take(one) is None
    assert swap._n_bytes == 0


def test_the_cheaper_way_is_taken() -> None:
    swap = SwapSpace(1 << 30)
    assert swap.is_worth_saving(100, 0.1)
    assert not swap.is_worth_saving(100, 0.0001)
    assert not swap.is_worth_saving(0, 0.1)
    swap.put(preempted(10), b"x" * 1_000_000)  # a recurrent state: dear per token
    assert not swap.is_worth_saving(100, 0.01)
    assert swap.is_worth_saving(100, 0.03)
    assert not SwapSpace(0).is_worth_saving(100, None)
