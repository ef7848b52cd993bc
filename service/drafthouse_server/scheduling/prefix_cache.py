"""Which computed tokens may be used again: prefixes in slots and in host memory, by tenant.

A *prefix* is the computed tokens of a sequence. It lives in a slot while its sequence runs, in the
slot still after the sequence has ended (*retained*, until the slot or its cells are needed), or in
host memory as a snapshot. A new prompt goes on from the longest prefix that it shares with one.

Prefixes are found by hashes of their blocks: the hash of a block covers all tokens before it and
the tenant's name, so that no tenant can find, or be told of, what another has computed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from drafthouse_server.scheduling.cells import Windows
from drafthouse_server.scheduling.sequence import BLOCK_SIZE, Blocks
from drafthouse_server.step import SchedulerCounts, Snapshot
from drafthouse_server.tenancy.fairness import SharedBytes

__all__ = [
    "BLOCK_SIZE",
    "BlocksRemoved",
    "BlocksStored",
    "CacheEvent",
    "CacheReset",
    "Match",
    "NoPrefixes",
    "Prefix",
    "PrefixCache",
    "PrefixCounts",
    "Tier",
    "tenant_of",
]


class Tier(enum.IntEnum):
    """Where a prefix lives; the cheapest to use again first."""

    RETAINED = 0
    """In a slot whose sequence has ended."""
    RUNNING = 1
    """In the slot of a sequence that goes on; it can be copied, not taken over."""
    HOST = 2
    """In host memory, as a snapshot."""


@dataclass(slots=True, eq=False)
class Prefix:
    """Computed tokens of one tenant."""

    tenant: str
    """Tenant whose tokens they are."""
    tokens: tuple[int, ...]
    """At least one block of them."""
    tier: Tier
    """Where the tokens are: in a slot or in host memory."""
    seq_id: int = -1
    """Slot; -1 in host memory."""
    snapshot: Snapshot = b""
    """What the engine wrote; empty in a slot."""
    hashes: tuple[int, ...] = ()
    """Hashes of the whole blocks, in order."""
    n_cut_min: int = 0
    """Fewest of its tokens that can be used: less reaches back behind a sliding window."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a prompt shares with a prefix."""

    prefix: Prefix
    """The prefix."""
    n_tokens: int
    """First tokens that both have, at least one block."""

    @property
    def is_whole(self) -> bool:
        """Whether the prompt has all of the prefix, but for less than a block."""
        return len(self.prefix.tokens) - self.n_tokens < BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that no prefix held before: for routers that send a prompt where its prefix is."""

    tenant: str
    """Tenant whose blocks they are."""
    hashes: tuple[int, ...]
    """Hashes of the blocks, in order."""
    parent: int | None
    """Hash of the block before the first; None at the start of a prompt."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that no prefix holds any more."""

    tenant: str
    """Tenant whose blocks they were."""
    hashes: tuple[int, ...]
    """Hashes of the blocks, the last one of a prompt first."""


@dataclass(frozen=True, slots=True)
class CacheReset:
    """What was told before is void: what follows is all that there is."""


CacheEvent = BlocksStored | BlocksRemoved | CacheReset


@dataclass(slots=True)
class PrefixCounts:
    """How the cache did. Counts only grow."""

    n_lookups: int = 0
    """Prompts that got a slot."""
    n_hits: int = 0
    """Prompts that went on from a prefix."""
    n_prompt_tokens: int = 0
    """Tokens of the prompts that got a slot."""
    n_reused: int = 0
    """Prompt tokens that were not computed again."""
    n_evicted: int = 0
    """Prefixes that had to leave a slot or host memory."""


class PrefixCache:
    """Finds, keeps and gives up prefixes. It holds no cells itself: the engine's slots do.

    Args:
        can_cut: Whether a prefix can be used in part and copied from slot to slot. A recurrent
            target cannot: there a prefix is used whole, or not at all.
        windows: The target's sliding windows.
        n_host_bytes_max: Most bytes of snapshots in host memory; 0 is none.
        has_events: Whether `take_events` is of interest.
    """

    is_on = True
    """Whether anything is kept."""

    def __init__(
        self,
        *,
        can_cut: bool,
        windows: Windows | None = None,
        n_host_bytes_max: int = 0,
        has_events: bool = False,
    ) -> None:
        self.counts = PrefixCounts()
        self.windows = windows or Windows()
        """The target's sliding windows."""
        self._can_cut = can_cut
        self._n_host_bytes_max = n_host_bytes_max
        self._has_events = has_events
        self._events: list[CacheEvent] = []
        self._shares = SharedBytes()  # of host memory
        self._slots: dict[int, Prefix] = {}  # these two: the least recently used first
        self._hosted: dict[Prefix, None] = {}
        # By the hash of a block: those that hold it, and those whose last whole block it is.
        self._holders: dict[int, dict[Prefix, None]] = {}
        self._ends: dict[int, dict[Prefix, None]] = {}

    @property
    def can_cut(self) -> bool:
        """Whether a prefix can be used in part and copied from slot to slot."""
        return self._can_cut

    @property
    def can_copy_running(self) -> bool:
        """Whether what is computed of a prompt under way can be copied for as long as it runs."""
        return self._can_cut and not self.windows.n_cells

    @property
    def can_cut_host(self) -> bool:
        """Whether a prefix in host memory can be used in part, however long it is."""
        return self._can_cut and not self.windows.n_tokens

    @property
    def has_host(self) -> bool:
        """Whether prefixes may go to host memory."""
        return self._n_host_bytes_max > 0

    @property
    def has_events(self) -> bool:
        """Whether `take_events` is of interest."""
        return self._has_events

    def retained(self) -> Iterator[Prefix]:
        """Yields the prefixes of ended sequences in slots, the least recently used first."""
        return (prefix for prefix in self._slots.values() if prefix.tier is Tier.RETAINED)

    def find(
        self, tenant: str, tokens: Sequence[int], blocks: Blocks | None = None
    ) -> Match | None:
        """Returns the longest prefix that a prompt can go on from; None if there is none.

        One token of the prompt at least is left to be computed: the first output needs it. Of
        equally long ones that which is cheapest to use is returned.

        Args:
            tenant: Whose prompt it is; other tenants' prefixes are not found.
            tokens: The prompt.
            blocks: Hashes of its blocks, where some may be made already.
        """
        n_max = len(tokens) - 1
        hashes = self._known_hashes(blocks or Blocks(tenant, tokens), n_max)
        match = (
            self._find_part(tokens, hashes, n_max)
            if self._can_cut
            else self._find_whole(tokens, hashes, n_max)
        )
        # Sixty-four bits can collide; another prompt's state must never be taken for this one's.
        if match is None or match.prefix.tenant != tenant:
            return None
        n = match.n_tokens
        return match if match.prefix.tokens[:n] == tuple(tokens[:n]) else None

    def n_known(self, blocks: Blocks, n_prompt: int) -> int:
        """Returns how many first tokens of a prompt some prefix begins with, usable or not."""
        return len(self._known_hashes(blocks, n_prompt - 1)) * BLOCK_SIZE

    def _known_hashes(self, blocks: Blocks, n_max: int) -> list[int]:
        """Returns the hashes of the prompt's first blocks, as far as some prefix holds them."""
        n_blocks = max(0, n_max) // BLOCK_SIZE
        return [*takewhile(self._holders.__contains__, islice(blocks, n_blocks))]

    def _find_part(self, tokens: Sequence[int], hashes: list[int], n_max: int) -> Match | None:
        seen = set[Prefix]()  # not to be cut so short; then even less to what is shorter
        for n_blocks in range(len(hashes), 0, -1):
            holders = self._holders[hashes[n_blocks - 1]]
            if len(holders) == len(seen):
                continue
            start, end = n_blocks * BLOCK_SIZE, (n_blocks + 1) * BLOCK_SIZE
            rest = tokens[start : min(n_max, end)]
            new = [prefix for prefix in holders if prefix not in seen]
            matches = [Match(p, start + _n_common(p.tokens[start:end], rest)) for p in new]
            if usable := [match for match in matches if match.n_tokens >= match.prefix.n_cut_min]:
                return min(usable, key=lambda match: (-match.n_tokens, match.prefix.tier))
            seen.update(holders)
        return None

    def _find_whole(self, tokens: Sequence[int], hashes: list[int], n_max: int) -> Match | None:
        for n_blocks in range(len(hashes), 0, -1):
            start = n_blocks * BLOCK_SIZE
            whole = [
                Match(prefix, len(prefix.tokens))
                for prefix in self._ends.get(hashes[n_blocks - 1], ())
                if prefix.tier is not Tier.RUNNING
                and len(prefix.tokens) <= n_max
                and prefix.tokens[start:] == tuple(tokens[start : len(prefix.tokens)])
            ]
            if whole:
                return min(whole, key=lambda match: (-match.n_tokens, match.prefix.tier))
        return None

    def count(self, n_prompt: int, match: Match | None) -> None:
        """Counts a prompt that got its slot, and notes that the prefix it found is of use."""
        self.counts.n_lookups += 1
        self.counts.n_prompt_tokens += n_prompt
        if match is not None:
            self._touch(match.prefix)

    def count_hit(self, n_tokens: int) -> None:
        """Counts a prompt that went on from a prefix: so many tokens were not computed again."""
        self.counts.n_hits += 1
        self.counts.n_reused += n_tokens

    def hold(
        self,
        seq_id: int,
        tenant: str,
        tokens: Sequence[int],
        *,
        is_running: bool,
        n_cut_min: int = 0,
        blocks: Blocks | None = None,
    ) -> None:
        """Notes what a slot holds: computed tokens only. What was noted of it before is forgotten.

        Args:
            seq_id: The slot.
            tenant: Whose tokens they are.
            tokens: Those in the slot's cells; fewer than one block are not worth noting.
            is_running: Whether the sequence goes on. If not, the slot is retained.
            n_cut_min: Fewest of its tokens that can be kept, but 0: of a slot that came out of a
                snapshot.
            blocks: Hashes of their blocks, and of more, where some may be made already.
        """
        before = self._slots.get(seq_id)
        tier = Tier.RUNNING if is_running else Tier.RETAINED
        prefix = None
        if len(tokens) >= BLOCK_SIZE:
            prefix = self._make(tenant, tokens, tier, seq_id, blocks)
            prefix.n_cut_min = n_cut_min
            self._add(prefix)  # before the old one goes, so that shared blocks make no events
        if before is not None:
            del self._slots[seq_id]
            self._remove(before)
        if prefix is not None:
            self._slots[seq_id] = prefix

    def drop(self, seq_id: int) -> None:
        """Forgets what a slot holds: it is given back, or taken over. Harmless when unknown."""
        prefix = self._slots.pop(seq_id, None)
        if prefix is not None:
            self._remove(prefix)

    def evict(self, seq_id: int) -> Prefix:
        """Gives up a retained slot and returns what it held.

        Raises:
            KeyError: nothing is noted of the slot.
        """
        prefix = self._slots[seq_id]
        self.drop(seq_id)
        self.counts.n_evicted += 1
        return prefix

    def is_worth_storing(self, prefix: Prefix, n_bytes: float = 0.0) -> bool:
        """Returns whether a prefix about to leave its slot should go to host memory.

        Not where host memory has it already, is off, or is too small.

        Args:
            prefix: In a slot.
            n_bytes: Size of its snapshot, as far as that can be told.
        """
        n_max = self._n_host_bytes_max
        # What is shorter than a block cannot be found again.
        is_storable = bool(prefix.hashes) and 0 < n_max >= n_bytes
        return is_storable and self._covering(prefix) is None

    def n_hosted(self, prefix: Prefix) -> int:
        """Returns how many of a prefix's first tokens host memory has for who goes on from them."""
        table = self._holders if self.can_cut_host else self._ends
        for i in range(len(prefix.hashes), 0, -1):
            for other in table.get(prefix.hashes[i - 1], ()):
                n = i * BLOCK_SIZE if self.can_cut_host else len(other.tokens)
                if _is_hosted(prefix, n, other):
                    return n
        return 0

    def store(self, tenant: str, tokens: Sequence[int], snapshot: Snapshot) -> bool:
        """Keeps a snapshot in host memory; others make room for it.

        Those of the tenant that holds most for its weight, the least recently used first: none is
        lost to another tenant's while its own tenant holds no more than its share.

        Args:
            tenant: Whose tokens they are.
            tokens: Those that the snapshot holds.
            snapshot: What the engine wrote.

        Returns:
            Whether it is kept: not when it alone exceeds the limit, or its tenant's share where
            others hold theirs, or is there already.
        """
        if len(tokens) < BLOCK_SIZE or len(snapshot) > self._n_host_bytes_max:
            return False
        prefix = self._make(tenant, tokens, Tier.HOST)
        prefix.n_cut_min = self.windows.n_cut_min_of_snapshot(len(tokens))
        covering = self._covering(prefix)
        if covering is not None:
            self._touch(covering)
            return False
        prefix.snapshot = snapshot
        covered = self._covered(prefix)
        victims = self._victims(prefix, covered)
        if victims is None:
            return False
        self._add(prefix)
        for other in (*covered, *victims):
            self._forget_hosted(other)
        self.counts.n_evicted += len(victims)
        self._hosted[prefix] = None
        self._shares.add(tenant_of(tenant), len(snapshot))
        return True

    def _victims(self, prefix: Prefix, covered: list[Prefix]) -> list[Prefix] | None:
        """Returns the snapshots that have to leave for another, besides those that it covers.

        None where that would take what others have of their shares.
        """
        tenant, n_bytes = tenant_of(prefix.tenant), len(prefix.snapshot)
        victims: list[Prefix] = []
        given = {tenant: sum(len(shorter.snapshot) for shorter in covered)}
        n_over = self._shares.total - given[tenant] + n_bytes - self._n_host_bytes_max
        lines: dict[str, Iterator[Prefix]] = {}
        while n_over > 0:
            giver = self._shares.giver(tenant, n_bytes, given)
            victim = next(lines.setdefault(giver, self._hosted_of(giver, covered)), None)
            if victim is None:
                return None
            victims.append(victim)
            given[giver] = given.get(giver, 0) + len(victim.snapshot)
            n_over -= len(victim.snapshot)
        return victims

    def _hosted_of(self, tenant: str, but: Sequence[Prefix] = ()) -> Iterator[Prefix]:
        """Yields a tenant's snapshots, the least recently used first."""
        return (p for p in self._hosted if tenant_of(p.tenant) == tenant and p not in but)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Notes a tenant's share of host memory relative to others' weights, > 0."""
        self._shares.set_weight(tenant, weight)

    def forget_tenant(self, tenant: str) -> None:
        """Gives up a tenant's snapshots. What it has in slots goes with its slots."""
        for prefix in list(self._hosted_of(tenant)):
            self._forget_hosted(prefix)
            self.counts.n_evicted += 1

    def tell_counts(self, counts: SchedulerCounts) -> None:
        """Puts in what is counted here."""
        found = self.counts
        counts.n_prefix_lookups = found.n_lookups
        counts.n_prefix_hits = found.n_hits
        counts.n_prefix_tokens = found.n_prompt_tokens
        counts.n_reused = found.n_reused
        counts.n_prefix_evicted = found.n_evicted
        counts.n_prefix_bytes = self._shares.total

    def take_events(self) -> list[CacheEvent]:
        """Returns what was stored and removed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def tell(self, *, is_told: bool) -> None:
        """Begins to note events, with all that is held now, each time anew; or noting them ends."""
        self._has_events = is_told
        self._events = []
        if not is_told:
            return
        self._events.append(CacheReset())
        told: set[int] = set()
        for prefix in (*self._slots.values(), *self._hosted):
            n_known = sum(block_hash in told for block_hash in prefix.hashes)
            if n_known < len(prefix.hashes):
                self._events.append(_stored(prefix, n_known))
                told.update(prefix.hashes)

    def make(
        self, seq_id: int, tenant: str, tokens: Sequence[int], blocks: Blocks | None = None
    ) -> Prefix:
        """Returns what a slot holds as a prefix, at least one block; it is not noted."""
        return self._make(tenant, tokens, Tier.RUNNING, seq_id, blocks)

    def _make(
        self,
        tenant: str,
        tokens: Sequence[int],
        tier: Tier,
        seq_id: int = -1,
        blocks: Blocks | None = None,
    ) -> Prefix:
        hashes = (blocks or Blocks(tenant, tokens)).first(len(tokens) // BLOCK_SIZE)
        return Prefix(tenant, tuple(tokens), tier, seq_id, hashes=hashes)

    def _touch(self, prefix: Prefix) -> None:
        """Makes a prefix the most recently used one."""
        if prefix.tier is Tier.HOST:
            if prefix in self._hosted:
                self._hosted[prefix] = self._hosted.pop(prefix)
        elif self._slots.get(prefix.seq_id) is prefix:
            self._slots[prefix.seq_id] = self._slots.pop(prefix.seq_id)

    def _covering(self, prefix: Prefix) -> Prefix | None:
        """Returns a prefix in host memory that makes this one needless there."""
        table = self._holders if self._can_cut else self._ends
        n = len(prefix.tokens)
        for other in table.get(prefix.hashes[-1], ()):
            n_held = len(other.tokens)
            is_enough = n_held >= n >= other.n_cut_min if self._can_cut else n_held == n
            if is_enough and _is_hosted(prefix, n, other):
                return other
        return None

    def _covered(self, prefix: Prefix) -> list[Prefix]:
        """Returns the prefixes in host memory that this one makes needless."""
        if not self._can_cut:
            return []
        return [
            other
            for block_hash in prefix.hashes
            for other in self._ends.get(block_hash, ())
            if other in self._hosted
            and len(other.tokens) >= prefix.n_cut_min
            and _is_hosted(prefix, len(other.tokens), other)
        ]

    def _forget_hosted(self, prefix: Prefix) -> None:
        del self._hosted[prefix]
        self._shares.add(tenant_of(prefix.tenant), -len(prefix.snapshot))
        self._remove(prefix)

    def _add(self, prefix: Prefix) -> None:
        n_known = len(prefix.hashes)
        for i, block_hash in enumerate(prefix.hashes):
            holders = self._holders.get(block_hash)
            if holders is None:
                self._holders[block_hash] = {prefix: None}
                n_known = min(n_known, i)
            else:
                holders[prefix] = None
        self._ends.setdefault(prefix.hashes[-1], {})[prefix] = None
        if self._has_events and n_known < len(prefix.hashes):
            self._events.append(_stored(prefix, n_known))

    def _remove(self, prefix: Prefix) -> None:
        removed = [
            block_hash
            for block_hash in reversed(prefix.hashes)
            if _discard(self._holders, block_hash, prefix)
        ]
        _discard(self._ends, prefix.hashes[-1], prefix)
        if self._has_events and removed:
            self._events.append(BlocksRemoved(prefix.tenant, tuple(removed)))


class NoPrefixes(PrefixCache):
    """A cache that keeps nothing and finds nothing."""

    is_on = False

    def __init__(self) -> None:
        super().__init__(can_cut=False)

    def find(
        self, tenant: str, tokens: Sequence[int], blocks: Blocks | None = None
    ) -> Match | None:
        """Returns None."""
        return None

    def count(self, n_prompt: int, match: Match | None) -> None:
        """Counts nothing: nothing was looked up."""

    def hold(
        self,
        seq_id: int,
        tenant: str,
        tokens: Sequence[int],
        *,
        is_running: bool,
        n_cut_min: int = 0,
        blocks: Blocks | None = None,
    ) -> None:
        """Notes nothing."""

    def tell(self, *, is_told: bool) -> None:
        """Tells nothing."""


def tenant_of(owner: str) -> str:
    """Returns the tenant of an owner (`Request.owner`), which may be an end user of it."""
    return owner.partition("\0")[0]


def _stored(prefix: Prefix, n_known: int) -> BlocksStored:
    """Returns the event of a prefix whose first blocks are known already."""
    return BlocksStored(
        prefix.tenant,
        prefix.hashes[n_known:],
        prefix.hashes[n_known - 1] if n_known else None,
    )


def _n_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns how many tokens both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _is_hosted(prefix: Prefix, n_tokens: int, other: Prefix) -> bool:
    """Returns whether another prefix has the first tokens of this one, in host memory."""
    is_found = other.tier is Tier.HOST and other.tenant == prefix.tenant
    # Asked last: they may be many, and are compared for each block of what slots hold alike.
    return is_found and other.tokens[:n_tokens] == prefix.tokens[:n_tokens]


def _discard(table: dict[int, dict[Prefix, None]], block_hash: int, prefix: Prefix) -> bool:
    """Takes a prefix out of a table, and returns whether it was the last one of its hash."""
    holders = table[block_hash]
    del holders[prefix]
    if not holders:
        del table[block_hash]
    return not holders
