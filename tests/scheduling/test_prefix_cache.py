"""Prefixes found, kept and given up: the longest, the tenant's own, the least used first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from drafthouse_server.scheduling import prefix_cache
from drafthouse_server.scheduling.cells import Windows
from drafthouse_server.scheduling.prefix_cache import (
    BLOCK_SIZE,
    BlocksRemoved,
    BlocksStored,
    PrefixCache,
    Tier,
)
from drafthouse_server.scheduling.sequence import Blocks

B = BLOCK_SIZE


def tokens(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


def cache(
    *, can_cut: bool = True, n_window: int = 0, n_host_bytes_max: int = 1000, **more: bool
) -> PrefixCache:
    return PrefixCache(
        can_cut=can_cut, windows=Windows(n_window), n_host_bytes_max=n_host_bytes_max, **more
    )


def test_nothing_is_found_in_an_empty_cache() -> None:
    assert cache().find("a", tokens(100)) is None


@pytest.mark.parametrize("n_shared", [B, B + 1, 2 * B - 1, 2 * B, 3 * B + 5])
def test_the_shared_tokens_are_found_to_the_token(n_shared: int) -> None:
    prefixes = cache()
    prefixes.hold(0, "a", tokens(5 * B), is_running=False)
    match = prefixes.find("a", tokens(n_shared) + [9999] * B)
    assert match is not None
    assert (match.n_tokens, match.prefix.seq_id) == (n_shared, 0)


def test_less_than_a_block_is_not_found() -> None:
    prefixes = cache()
    prefixes.hold(0, "a", tokens(B), is_running=False)
    prefixes.hold(1, "a", tokens(B - 1, 500), is_running=False)
    assert prefixes.find("a", tokens(B - 1) + [9999] * B) is None
    assert prefixes.find("a", tokens(B - 1, 500) + [9999] * B) is None
    assert [prefix.seq_id for prefix in prefixes.retained()] == [0]


@pytest.mark.parametrize("can_cut", [True, False])
def test_one_token_is_left_to_compute(can_cut: bool) -> None:
    prefixes = cache(can_cut=can_cut)
    prefixes.hold(0, "a", tokens(2 * B), is_running=False)
    match = prefixes.find("a", tokens(2 * B))
    assert (match and match.n_tokens) == (2 * B - 1 if can_cut else None)
    longer = prefixes.find("a", tokens(2 * B + 1))
    assert longer is not None
    assert longer.n_tokens == 2 * B


@pytest.mark.parametrize("can_cut", [True, False])
def test_other_tenants_find_nothing_where_hashes_collide(
    can_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is theirs left out of host memory because another's is there, nor made to go by it."""
    monkeypatch.setattr(prefix_cache, "Blocks", lambda _, tokens: Blocks("", tokens))
    prefixes = cache(can_cut=can_cut)
    prefixes.hold(0, "a", tokens(2 * B), is_running=False)
    assert prefixes.find("a", tokens(3 * B)) is not None
    assert prefixes.find("b", tokens(3 * B)) is None
    assert prefixes.store("a", tokens(2 * B, 700), b"x")
    assert prefixes.store("b", tokens(2 * B, 700), b"x")
    assert prefixes.store("b", tokens(3 * B, 700), b"x")
    # Of "b" the longer one makes the shorter one needless, where prefixes are used in part.
    assert prefixes._shares.total == (2 if can_cut else 3)


def test_other_tenants_find_nothing() -> None:
    prefixes = cache()
    prefixes.hold(0, "a", tokens(4 * B), is_running=False)
    prefixes.store("a", tokens(4 * B, 700), b"x")
    assert prefixes.find("b", tokens(4 * B)) is None
    assert prefixes.find("b", tokens(5 * B, 700)) is None


def test_a_recurrent_prefix_is_used_whole_or_not_at_all() -> None:
    prefixes = cache(can_cut=False)
    prefixes.hold(0, "a", tokens(2 * B + 3), is_running=False)
    prefixes.hold(1, "a", tokens(B + 7), is_running=False)
    prefixes.hold(2, "a", tokens(3 * B), is_running=True)  # it cannot be copied
    match = prefixes.find("a", tokens(4 * B))
    assert match is not None
    assert (match.prefix.seq_id, match.n_tokens) == (0, 2 * B + 3)
    match = prefixes.find("a", [*tokens(2 * B), 9999, 9999])
    assert match is not None
    assert (match.prefix.seq_id, match.n_tokens) == (1, B + 7)
    assert prefixes.find("a", [*tokens(B), 9999, 9999]) is None


@pytest.mark.parametrize(
    ("n_window", "n_held", "n_shared", "n_found"),
    [
        (40, 3 * B, 2 * B, None),  # what lies before the window is gone
        (40, 3 * B, 3 * B - 2, None),
        (40, 3 * B, 3 * B - 1, 3 * B - 1),
        (40, 3 * B, 3 * B, 3 * B),
        (3 * B, 3 * B, 2 * B, 2 * B),  # all of it lies in the window
        (3 * B - 1, 3 * B, 2 * B, None),
    ],
)
def test_a_snapshot_beyond_the_window_is_used_whole_or_but_for_its_last_token(
    n_window: int, n_held: int, n_shared: int, n_found: int | None
) -> None:
    prefixes = cache(n_window=n_window)
    assert prefixes.store("a", tokens(n_held), bytes(10))
    match = prefixes.find("a", tokens(n_shared) + [9999] * B)
    assert (match and match.n_tokens) == n_found


def test_a_slot_that_came_out_of_a_snapshot_is_cut_no_shorter() -> None:
    prefixes = cache(n_window=B)
    prefixes.hold(0, "a", tokens(5 * B), is_running=False, n_cut_min=3 * B)
    assert prefixes.find("a", tokens(3 * B - 1) + [9999] * B) is None
    match = prefixes.find("a", tokens(3 * B) + [9999] * B)
    assert match is not None
    assert match.n_tokens == 3 * B


@pytest.mark.parametrize(
    ("n_window", "n_cells", "n_began", "n_held", "n_cut_min"),
    [
        (0, 0, 0, 100, 0),
        (10, 0, 0, 100, 0),  # layers with a window hold all
        (10, 40, 0, 40, 0),  # nothing is lost yet
        (10, 40, 0, 41, 11),  # the first token is, which the one at 10 would not read
        (10, 40, 0, 100, 70),
        (10, 40, 90, 100, 90),  # it came out of a snapshot
        (10, 40, 30, 100, 70),
        (10, 10, 0, 100, 100),  # of a shared pool only the window is promised
    ],
)
def test_a_slot_is_cut_to_what_its_layers_hold_the_window_of(
    n_window: int, n_cells: int, n_began: int, n_held: int, n_cut_min: int
) -> None:
    assert Windows(n_window, n_cells).n_cut_min_of_slot(n_began, n_held) == n_cut_min


def test_where_layers_keep_the_window_alone_nothing_is_copied_from_who_runs() -> None:
    assert cache(n_window=10).can_copy_running
    assert not PrefixCache(can_cut=True, windows=Windows(10, 40)).can_copy_running
    assert not PrefixCache(can_cut=False).can_copy_running


def test_where_the_longest_cannot_be_cut_the_next_one_is_taken() -> None:
    prefixes = cache(n_window=B)
    prefixes.store("a", tokens(5 * B), bytes(10))
    prefixes.store("a", tokens(2 * B), bytes(10))  # not covered: the longer one is of no use for it
    match = prefixes.find("a", tokens(4 * B) + [9999] * B)
    assert match is not None
    assert (match.n_tokens, match.prefix.tokens) == (2 * B, tuple(tokens(2 * B)))
    prefixes.store("a", tokens(3 * B), bytes(10))  # nor does a shorter one leave for it
    assert prefixes._shares.total == 30


def test_the_cheapest_of_equals_is_taken() -> None:
    prefixes = cache()
    prefixes.store("a", tokens(2 * B), b"x")
    prefixes.hold(0, "a", tokens(2 * B), is_running=True)
    match = prefixes.find("a", tokens(3 * B))
    assert match is not None
    assert match.prefix.tier is Tier.RUNNING
    prefixes.hold(1, "a", tokens(2 * B), is_running=False)
    match = prefixes.find("a", tokens(3 * B))
    assert match is not None
    assert match.prefix.tier is Tier.RETAINED


def test_what_a_slot_held_before_is_forgotten() -> None:
    prefixes = cache()
    prefixes.hold(0, "a", tokens(2 * B), is_running=True)
    prefixes.hold(0, "b", tokens(2 * B, 500), is_running=False)
    assert prefixes.find("a", tokens(3 * B)) is None
    prefixes.drop(0)
    prefixes.drop(0)
    assert prefixes.find("b", tokens(3 * B, 500)) is None
    assert list(prefixes.retained()) == []


def test_the_least_recently_used_slot_goes_first() -> None:
    prefixes = cache()
    for seq_id in range(3):
        prefixes.hold(seq_id, "a", tokens(2 * B, 100 * seq_id), is_running=False)
    prefixes.count(2 * B, prefixes.find("a", tokens(2 * B)))  # slot 0
    assert [prefix.seq_id for prefix in prefixes.retained()] == [1, 2, 0]
    assert prefixes.evict(1).seq_id == 1
    assert [prefix.seq_id for prefix in prefixes.retained()] == [2, 0]
    with pytest.raises(KeyError):
        prefixes.evict(1)


def test_host_memory_is_bounded_and_the_least_recently_used_leaves() -> None:
    prefixes = cache(n_host_bytes_max=100)
    for i in range(3):
        assert prefixes.store("a", tokens(2 * B, 100 * i), bytes(40)) is True
    assert prefixes._shares.total == 80
    assert prefixes.find("a", tokens(3 * B)) is None
    prefixes.count(3 * B, prefixes.find("a", tokens(3 * B, 100)))
    assert prefixes.store("a", tokens(2 * B, 300), bytes(40)) is True
    assert prefixes.find("a", tokens(3 * B, 100)) is not None
    assert prefixes.find("a", tokens(3 * B, 200)) is None
    assert prefixes.store("a", tokens(2 * B, 900), bytes(101)) is False
    assert prefixes._shares.total == 80


def test_host_memory_off_stores_nothing() -> None:
    prefixes = cache(n_host_bytes_max=0)
    prefixes.hold(0, "a", tokens(2 * B), is_running=False)
    assert not prefixes.is_worth_storing(next(prefixes.retained()))
    assert prefixes.store("a", tokens(2 * B), b"x") is False


def test_a_longer_snapshot_takes_the_place_of_a_shorter_one() -> None:
    prefixes = cache()
    assert prefixes.store("a", tokens(2 * B), b"short") is True
    assert prefixes.store("a", tokens(3 * B), b"longer") is True
    assert prefixes._shares.total == len(b"longer")
    assert prefixes.store("a", tokens(2 * B + 3), b"again") is False
    prefixes.hold(0, "a", tokens(3 * B), is_running=False)
    assert not prefixes.is_worth_storing(next(prefixes.retained()))


def test_recurrent_snapshots_of_one_conversation_live_side_by_side() -> None:
    prefixes = cache(can_cut=False)
    assert prefixes.store("a", tokens(2 * B), b"turn 1") is True
    assert prefixes.store("a", tokens(3 * B), b"turn 2") is True
    assert prefixes.store("a", tokens(3 * B), b"turn 2") is False
    match = prefixes.find("a", [*tokens(2 * B), 9999])
    assert match is not None
    assert match.prefix.snapshot == b"turn 1"


class _Compared(tuple[int, ...]):
    """Tokens that count how often some of them are taken."""

    n_taken = 0

    def __getitem__(self, key: Any) -> Any:
        _Compared.n_taken += 1
        return super().__getitem__(key)


def test_what_slots_hold_alike_is_not_compared_where_host_memory_is_searched() -> None:
    prefixes, n_slots = cache(), 8
    for seq_id in range(n_slots):
        prefixes.hold(seq_id, "a", tokens(200 * B) + tokens(2 * B, 9999 + seq_id), is_running=False)
    given_up = prefixes.evict(0)
    for prefix in prefixes.retained():
        prefix.tokens = _Compared(prefix.tokens)
    _Compared.n_taken = 0
    assert prefixes.n_hosted(given_up) == 0
    assert _Compared.n_taken == 0, "each costs the time of a prompt, for each block of it"


def test_a_prefix_that_cannot_be_cut_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes, n_stored, n_blocks = cache(n_window=20), 9, 200
    for i in range(n_stored):
        prefixes.store("a", tokens(n_blocks * B) + tokens(2 * B, 9999 + i), b"state")
    prefixes.hold(3, "a", tokens(B), is_running=False)
    looked_at = list[object]()

    match_type = prefix_cache.Match

    def counted(prefix: prefix_cache.Prefix, n_tokens: int) -> prefix_cache.Match:
        looked_at.append(prefix)
        return match_type(prefix, n_tokens)

    monkeypatch.setattr(prefix_cache, "Match", counted)
    match = prefixes.find("a", tokens(n_blocks * B) + [7] * B)
    assert match is not None
    assert match.prefix.seq_id == 3
    assert len(looked_at) == n_stored + 1


def test_counts_tell_what_was_saved() -> None:
    prefixes = cache()
    prefixes.hold(0, "a", tokens(2 * B), is_running=False)
    prefixes.count(3 * B, prefixes.find("a", tokens(3 * B)))
    prefixes.count_hit(2 * B)
    prefixes.count(B, None)
    counts = prefixes.counts
    assert (counts.n_lookups, counts.n_hits) == (2, 1)
    assert (counts.n_prompt_tokens, counts.n_reused) == (4 * B, 2 * B)


def test_events_tell_of_a_block_once() -> None:
    prefixes = cache(has_events=True)
    prefixes.hold(0, "a", tokens(2 * B + 3), is_running=True)
    (stored,) = prefixes.take_events()
    assert isinstance(stored, BlocksStored)
    assert (stored.tenant, stored.parent, len(stored.hashes)) == ("a", None, 2)
    prefixes.hold(1, "a", tokens(3 * B), is_running=False)
    (more,) = prefixes.take_events()
    assert isinstance(more, BlocksStored)
    assert (more.parent, len(more.hashes)) == (stored.hashes[-1], 1)
    prefixes.drop(0)
    assert prefixes.take_events() == []
    prefixes.drop(1)
    assert prefixes.take_events() == [
        BlocksRemoved("a", tuple(reversed([*stored.hashes, *more.hashes])))
    ]


texts = st.lists(st.sampled_from([0, 1]), max_size=5).map(
    lambda blocks: [token for block in blocks for token in [block] * B]
)
ends = st.lists(st.integers(0, 2), max_size=B)


@settings(max_examples=200)
@given(held=st.lists(st.tuples(texts, ends), max_size=6), text=texts, end=ends)
def test_no_longer_prefix_exists(
    held: list[tuple[list[int], list[int]]], text: list[int], end: list[int]
) -> None:
    prefixes = cache()
    prompt = text + end
    best = 0
    for seq_id, (first, last) in enumerate(held):
        prefixes.hold(seq_id, "a", first + last, is_running=False)
        n = 0
        while n < min(len(first + last), len(prompt) - 1) and (first + last)[n] == prompt[n]:
            n += 1
        best = max(best, n)
    match = prefixes.find("a", prompt)
    assert (match.n_tokens if match else 0) == (best if best >= B else 0)


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 60)), min_size=1, max_size=80
    )
)
def test_host_memory_is_given_up_in_the_order_of_last_use(
    calls: list[tuple[bool, int, int]],
) -> None:
    """Against a list that is kept by hand: stored or used last stands last."""
    n_max = 100
    prefixes = cache(n_host_bytes_max=n_max, can_cut=False)
    model: list[tuple[int, int]] = []  # which text, and its bytes; the least recently used first
    for is_store, i, n_bytes in calls:
        text = tokens(2 * B, 1000 * i)
        known = next((entry for entry in model if entry[0] == i), None)
        if is_store:
            assert prefixes.store("a", text, bytes(n_bytes)) is (known is None)
        else:
            match = prefixes.find("a", [*text, 1])
            assert (match is None) is (known is None)
            prefixes.count(2 * B + 1, match)
        if known is not None:
            model.remove(known)
            model.append(known)
        elif is_store:
            while sum(n for _, n in model) + n_bytes > n_max:
                del model[0]
            model.append((i, n_bytes))
        held = [prefix.tokens[0] // 1000 for prefix in prefixes._hosted]
        assert held == [i for i, _ in model]
        assert prefixes._shares.total == sum(n for _, n in model) <= n_max


class AnyOrder(RuleBasedStateMachine):
    """Whatever is held, stored and dropped: nothing dangling is found, and nothing is left over."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = cache(n_host_bytes_max=50, has_events=True)
        self.held: dict[int, tuple[str, list[int]]] = {}
        self.blocks: set[int] = set()

    @rule(seq_id=st.integers(0, 3), tenant=st.sampled_from("ab"), text=texts, end=ends)
    def hold(self, seq_id: int, tenant: str, text: list[int], end: list[int]) -> None:
        self.cache.hold(seq_id, tenant, text + end, is_running=bool(len(end) % 2))
        self.held[seq_id] = (tenant, text + end)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.held)))
        self.cache.drop(seq_id)
        del self.held[seq_id]

    @rule(tenant=st.sampled_from("ab"), text=texts, n=st.integers(1, 60))
    def store(self, tenant: str, text: list[int], n: int) -> None:
        self.cache.store(tenant, text, bytes(n))

    @rule(tenant=st.sampled_from("ab"), text=texts, end=ends)
    def find(self, tenant: str, text: list[int], end: list[int]) -> None:
        match = self.cache.find(tenant, text + end)
        if match is not None:
            assert match.prefix.tenant == tenant
            assert list(match.prefix.tokens[: match.n_tokens]) == (text + end)[: match.n_tokens]
            if match.prefix.tier is Tier.HOST:
                assert match.prefix.snapshot
            else:
                assert self.held[match.prefix.seq_id] == (tenant, list(match.prefix.tokens))
        self.cache.count(len(text + end), match)

    @invariant()
    def events_agree(self) -> None:
        for event in self.cache.take_events():
            if isinstance(event, BlocksStored):
                assert not self.blocks & set(event.hashes)
                assert event.parent is None or event.parent in self.blocks
                self.blocks |= set(event.hashes)
            else:
                assert isinstance(event, BlocksRemoved)
                assert set(event.hashes) <= self.blocks
                self.blocks -= set(event.hashes)
        assert self.cache._shares.total <= 50

    def teardown(self) -> None:
        for seq_id in range(4):
            self.cache.drop(seq_id)
        for tenant in "ab":
            self.cache.forget_tenant(tenant)
        self.events_agree()
        assert not self.blocks
        assert self.cache._shares.total == 0
        assert self.cache.store("z", tokens(B, 9000), bytes(50))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
