"""The engine's slots: which run, which are free, which are retained, and which to take next.

A slot whose sequence has ended may be *retained*: its tokens stay in its cells until the slot or
the cells are needed, and a prompt that begins with them goes on from there.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from heapq import heapify, heappush
from typing import NamedTuple

from drafthouse_server.scheduling.prefix_cache import (
    BLOCK_SIZE,
    Match,
    Prefix,
    PrefixCache,
    Tier,
    tenant_of,
)
from drafthouse_server.scheduling.sequence import Sequence
from drafthouse_server.step import EngineLimits
from drafthouse_server.tenancy.fairness import VirtualCounters

__all__ = ["LastSlot", "Lead", "SlotTable"]

_N_COPIED_MIN = 16
"""Tokens of a prefix that are worth copying from slot to slot: fewer cost less in a decode."""

_N_COMPARED = 16
"""Running sequences that a new one is compared with, token by token."""

_TOKEN_BYTES = array("i").itemsize

_AWAY_S = 0.2
"""Seconds that a tenant may be away: programs that ask again at once are back sooner."""

_KEPT_S = 1.0
"""Seconds for which the last slot is kept from a tenant without a break."""


class Lead(NamedTuple):
    """What a sequence with a slot waits for: another one computes what both begin with."""

    sequence: Sequence
    """The other one."""
    n_usable: int
    """Tokens to go on from then."""
    n_computed: int
    """Tokens that it must have computed."""

    def n_rest(self, sequence: Sequence) -> int:
        """Returns how many tokens the one that waits will have to compute."""
        return sequence.n_target - self.n_usable


class SlotTable:
    """Which sequence has which slot.

    Args:
        limits: What the engine can carry.
        prefixes: Notes what slots hold.
        is_shared: Whether slots share KV cells, or have their own.
    """

    def __init__(self, limits: EngineLimits, prefixes: PrefixCache, *, is_shared: bool) -> None:
        self._prefixes = prefixes
        self._is_shared = is_shared
        self.n_slots = limits.n_seq_max
        """How many there are."""
        # The lowest first: llama.cpp computes sequences whose ids follow one another together.
        self._free = list(range(limits.n_seq_max))
        self.running: dict[int, Sequence] = {}
        """Sequences that run, by slot."""
        self.leads: dict[int, Lead] = {}
        """What those that wait with a slot wait for, by slot: the engine knows nothing of them."""
        self._packed: dict[Sequence, bytes] = {}  # tokens of those that were compared last
        self.retained: dict[int, int] = {}
        """Cells by slot, of sequences that have ended."""
        self.n_retained_cells = 0
        """Sum of these."""
        self.given_back: list[int] = []
        """Slots that the engine has not been told of yet."""

    @property
    def has_room(self) -> bool:
        """Whether a slot can be taken without taking it away from a running sequence."""
        return bool(self._free or self.retained)

    @property
    def n_copied_min(self) -> int:
        """Fewest tokens of a prefix that are worth copying from slot to slot."""
        return 1 if self._is_shared else _N_COPIED_MIN

    @property
    def n_cells_held(self) -> int:
        """KV cells in use: the running sequences' and the retained slots'."""
        return self.n_cells_running() + self.n_retained_cells

    def n_cells_running(self) -> int:
        """Returns the KV cells of the sequences that run."""
        return sum([sequence.n_computed for sequence in self.running.values()])

    def held(self) -> dict[str, int]:
        """Returns the slots that run by tenant."""
        held: dict[str, int] = {}
        for sequence in self.running.values():
            tenant = sequence.request.tenant
            if tenant in held:  # no call: this runs in every step while sequences wait
                held[tenant] += 1
            else:
                held[tenant] = 1
        return held

    def n_due(self, tenant: str) -> int:
        """Returns the tokens of a tenant's running prompts that are not computed yet."""
        running = self.running.values()
        mine = [it for it in running if it.request.tenant == tenant and it.n_computed < it.n_prompt]
        return sum([sequence.n_prompt - sequence.n_computed for sequence in mine])

    def is_anybody_generating(self) -> bool:
        """Returns whether a sequence waits for its next token alone."""
        return any(sequence.is_generating for sequence in self.running.values())

    def begun(self) -> dict[int, Sequence]:
        """Returns the sequences that the engine knows of, by slot."""
        if not self.leads:
            return self.running
        return {
            seq_id: sequence
            for seq_id, sequence in self.running.items()
            if seq_id not in self.leads
        }

    def alike(self, sequence: Sequence) -> list[tuple[Sequence, int]]:
        """Returns running sequences of the same owner, and the tokens that both begin with.

        In whole blocks, at least one, and not the last token of the sequence.
        """
        owner, tokens = sequence.request.owner, sequence.tokens
        first = tokens[:BLOCK_SIZE]
        begin_alike = [
            other
            for other in self.running.values()
            if other.request.owner == owner and other.tokens[:BLOCK_SIZE] == first
        ][:_N_COMPARED]
        if not begin_alike:
            return []
        # Packed once: lists would be copied for each comparison.
        before, self._packed = self._packed, {}
        for it in (*begin_alike, sequence):
            packed = before.get(it, b"")
            if len(packed) != _TOKEN_BYTES * len(it.tokens):
                packed = array("i", it.tokens).tobytes()
            self._packed[it] = packed
        found, n_best = list[tuple[Sequence, int]](), 0
        for other in begin_alike:
            n_most = min(len(tokens) - 1, len(other.tokens))
            n_alike = _n_alike(self._packed[sequence], self._packed[other], n_most, n_best)
            n_best = max(n_best, n_alike)
            if n_alike:
                found.append((other, n_alike))
        return found

    def split(self) -> tuple[list[Sequence], list[Sequence]]:
        """Returns the sequences that generate and those with tokens to compute first."""
        leads = self.leads
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self.running.values():
            # `is_generating`, written out, because this runs once per sequence and step.
            n_target = len(sequence.tokens)
            if sequence.n_computed == n_target - 1 and n_target > sequence.n_prompt:
                decodes.append(sequence)
            elif sequence.seq_id not in leads:
                prefills.append(sequence)
        return decodes, prefills

    def take_given_back(self) -> list[int]:
        """Returns the slots to tell the engine of; they are told once."""
        given_back, self.given_back = self.given_back, []
        return list(dict.fromkeys(given_back))

    # --- taking a slot

    def place(self, match: Match | None, *, is_copy_dear: bool = False) -> tuple[int, Match | None]:
        """Returns the slot to take, and the prefix to go on from there.

        Sequences whose ids follow one another are computed together; each gap between them costs
        another physical batch in every step, which reads all weights again. So a prefix is used
        where it is only if that is as good a place as any; otherwise it is copied. And so it is
        where another conversation begins alike: the one that was there goes on, too.

        Args:
            match: A prefix that was found.
            is_copy_dear: Whether copying it takes longer than a gap costs.
        """
        best = self._choose()
        if match is None or match.prefix.tier is Tier.HOST:
            return best, match
        held = match.prefix.seq_id
        if match.prefix.tier is Tier.RETAINED:
            can_move = self._prefixes.can_cut and not self._is_shared
            is_good = is_copy_dear or self._n_neighbours(held) >= self._n_neighbours(best)
            if not can_move or (match.is_whole and is_good):
                return held, match
        if match.n_tokens < self.n_copied_min:
            return best, None
        return best, match

    def _n_neighbours(self, seq_id: int) -> int:
        """Returns how many of the slots next to one are running."""
        return (seq_id - 1 in self.running) + (seq_id + 1 in self.running)

    def _choose(self) -> int:
        """Returns the slot to take if any will do; it is free, or retained.

        Of several as good the lowest free one, or the one that was not used for longest.
        """
        if self._free:
            if not self.retained:
                return self._free[0]  # as the running ones are the lowest, too
            return max(sorted(self._free), key=self._n_neighbours)
        return self._choose_retained()

    def _choose_retained(self) -> int:
        """Returns the retained slot to give up: beside running ones, not used for longest."""
        oldest_first = (prefix.seq_id for prefix in self._prefixes.retained())
        if self._is_shared:
            return next(oldest_first)
        return max(oldest_first, key=self._n_neighbours)

    def take(self, seq_id: int, match: Match | None) -> Prefix | None:
        """Takes a free slot, or a retained one.

        Returns:
            What a retained slot held, if that is lost now because it is no match, or is more.
        """
        if seq_id not in self.retained:
            self._free.remove(seq_id)
            heapify(self._free)
            return None
        self.n_retained_cells -= self.retained.pop(seq_id)
        if match is not None and match.prefix.seq_id == seq_id and match.is_whole:
            self._prefixes.drop(seq_id)
            return None
        return self._prefixes.evict(seq_id)

    # --- giving it back

    def evict_next(self) -> tuple[int, int, Prefix]:
        """Gives up a retained slot for its cells.

        Returns:
            The slot, which is free now, its cells, and what it held.
        """
        seq_id = self._choose_retained()
        n_cells = self.retained.pop(seq_id)
        self.n_retained_cells -= n_cells
        heappush(self._free, seq_id)
        return seq_id, n_cells, self._prefixes.evict(seq_id)

    def empty(self, seq_id: int) -> None:
        """Notes that a slot is free."""
        heappush(self._free, seq_id)
        self.leads.pop(seq_id, None)
        self._prefixes.drop(seq_id)

    def note(self, sequence: Sequence) -> None:
        """Lets others of its owner go on from what is computed of a sequence that runs."""
        self._prefixes.hold(
            sequence.seq_id,
            sequence.request.owner,
            sequence.tokens[: sequence.n_computed],
            is_running=True,
            n_cut_min=sequence.n_cut_min,
            blocks=sequence.blocks,
        )

    def retain(self, sequence: Sequence) -> bool:
        """Keeps an ended sequence's tokens in its slot, if they are worth it.

        Returns:
            Whether it does; then the slot is not free.
        """
        n_computed = sequence.n_computed
        # Dropped tokens after a stop are in the cells too, and no sequence knows them any more.
        is_known = BLOCK_SIZE <= n_computed <= len(sequence.tokens)
        if not (is_known and self._prefixes.is_on):
            return False
        self._prefixes.hold(
            sequence.seq_id,
            sequence.request.owner,
            sequence.tokens[:n_computed],
            is_running=False,
            n_cut_min=self._prefixes.windows.n_cut_min_of_slot(sequence.n_cut_min, n_computed),
            blocks=sequence.blocks,
        )
        self.retained[sequence.seq_id] = n_computed
        self.n_retained_cells += n_computed
        return True

    def forget_tenant(self, tenant: str) -> None:
        """Gives up the retained slots of a tenant; the engine is told with the next plan."""
        for prefix in list(self._prefixes.retained()):
            if tenant_of(prefix.tenant) == tenant:
                seq_id = prefix.seq_id
                self.n_retained_cells -= self.retained.pop(seq_id)
                self._prefixes.evict(seq_id)
                heappush(self._free, seq_id)
                self.given_back.append(seq_id)

    def forget_retained(self) -> list[int]:
        """Gives up all retained slots, and returns them."""
        seq_ids = list(self.retained)
        for seq_id in seq_ids:
            self._prefixes.drop(seq_id)
            heappush(self._free, seq_id)
        self.retained.clear()
        self.n_retained_cells = 0
        return seq_ids


class LastSlot:
    """Keeps the last free slot for tenants that come back at once, below their share.

    Otherwise the stream that takes it meanwhile has to be saved each time, and brought back: that
    takes longer than a short request, and all wait for it. It is kept from a tenant that has its
    share, and while no other waits: whose turn it is among those that wait the counters say. Now
    and then it has the slot all the same, so that each of its streams goes on.

    Args:
        counters: Say whose turn it is.
        n_slots: Slots of all.
    """

    def __init__(self, counters: VirtualCounters, n_slots: int) -> None:
        self._counters = counters
        self._n_slots = n_slots
        self._ended: dict[str, float] = {}  # when a tenant's last stream ended; in this order
        self._back: set[str] = set()  # who came back at once, the last time; runs, or is in _ended
        self._kept_from, self._kept_at = "", 0.0  # from whom it is kept, and since when

    def note_start(self, tenant: str, now: float) -> None:
        """Notes that a stream of a tenant has got a slot."""
        self._forget(now)
        if tenant in self._ended:
            self._back.add(tenant)
        if tenant == self._kept_from:
            self._kept_from = ""

    def note_end(self, tenant: str, now: float) -> None:
        """Notes that a stream of a tenant has given its slot back."""
        self._ended.pop(tenant, None)
        self._ended[tenant] = now
        self._forget(now)

    def is_kept_from(self, tenant: str, held: Mapping[str, int], now: float) -> bool:
        """Returns whether a tenant that waits has to leave the last free slot to others.

        Args:
            tenant: Waits for a slot.
            held: Slots by tenant, of those that have any.
            now: Monotonic time in seconds.
        """
        self._forget(now)
        counters, n_slots = self._counters, self._n_slots
        is_kept = (
            tenant in held
            and counters.n_waiting == 1
            and any(
                counters.would_take_back(other, tenant, held, n_slots)
                for other in self._ended
                if other in self._back
            )
        )
        if is_kept and tenant != self._kept_from:
            self._kept_from, self._kept_at = tenant, now
        elif not is_kept and tenant == self._kept_from:
            self._kept_from = ""
        return is_kept and now - self._kept_at < _KEPT_S

    def _forget(self, now: float) -> None:
        """Forgets those that have not been here for a while."""
        ended = self._ended
        while ended and now - ended[(first := next(iter(ended)))] > _AWAY_S:
            del ended[first]
            self._back.discard(first)


def _n_alike(first: bytes, second: bytes, n_most: int, n_guessed: int) -> int:
    """Returns how many tokens both begin with, in whole blocks.

    Args:
        first: Tokens, packed.
        second: Tokens, packed.
        n_most: Tokens to compare.
        n_guessed: So many are likely.
    """

    def is_alike(n_blocks: int) -> bool:
        n_bytes = n_blocks * BLOCK_SIZE * _TOKEN_BYTES
        return first[:n_bytes] == second[:n_bytes]

    low, high = 0, n_most // BLOCK_SIZE
    guessed = min(n_guessed // BLOCK_SIZE, high)
    if guessed and is_alike(guessed):
        low = guessed
        if low < high and not is_alike(low + 1):
            high = low
    while low < high:
        middle = (low + high + 1) // 2
        if is_alike(middle):
            low = middle
        else:
            high = middle - 1
    return low * BLOCK_SIZE
