"""Drafts out of what was said before: by a sequence itself, or by its tenant's earlier ones. Pure.

Edits of code, summaries and answers with quotations repeat what they were given. Where the last
tokens of a sequence have stood before, what followed them then is a draft that costs no drafter.
`NgramDrafter` proposes such drafts to the engine, which verifies them in place of its drafter's
(`PlanEntry.given`); no token changes.

- A proposal is made in every step, used or not, and compared with the tokens that came. So how
  often proposals are right is known without trying, for each sequence and kind of proposal.
- It is used where that is at least as often as the drafter's drafts of the same sequence are right.
- Where steps have a cost model, sequences whose proposals are nearly certain may get longer drafts
  than the policy has chosen, if the step is then predicted to yield more tokens per second.

What a tenant's sequences said is found by that tenant only: what is drafted shows in how long a
step takes, and nobody shall learn from that what others were told.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from drafthouse_server.step import EngineLimits, PlanEntry, ResultEntry, SamplingOptions

__all__ = ["NgramDrafter", "NgramIndex", "NgramPool", "NgramTrack", "Quotable"]

N_INDEXED_MAX = 256
"""Most tokens of prompts that are indexed in one step: it bounds what a long prompt costs it."""

N_CHUNK = 64
"""Tokens of the pool that are indexed in one step, and forgotten together."""

_N_CHUNKS_DUE_MAX = 4096
"""Chunks that may wait to be indexed; the oldest are given up."""
_N_TENANTS_MAX = 256
"""Tenants with a pool; the one that added nothing for longest is forgotten."""
_FADING = 0.98
"""What is left of a record after each step."""
_WEIGHT = 4.0
"""Of a record's prior, in tokens."""
_RIGHT_PRIOR = 0.5
"""Share of proposed tokens that are right, before any was seen."""
_RIGHT_PRIOR_DRAFTER = 0.7
"""The same, of the drafter's."""
_NEARLY_CERTAIN = 0.85
"""Share from which a proposal may be longer than the policy's K."""
_MARGIN = 0.03
"""By how much longer drafts must promise more tokens per second."""


class Quotable(Protocol):
    """What must be known of a sequence."""

    tokens: list[int]
    """Prompt and output; it only ever grows."""
    ngram_memory: NgramTrack | None
    """What the drafter remembers of it; nobody else's business."""

    @property
    def tenant(self) -> str:
        """Name of the tenant."""
        ...

    @property
    def sampling(self) -> SamplingOptions:
        """What the sampler was made from."""
        ...

    @property
    def n_draft(self) -> int | None:
        """K asked for; None leaves it to the policy."""
        ...

    @property
    def n_prompt(self) -> int:
        """Length of the prompt."""
        ...

    @property
    def n_computed(self) -> int:
        """Tokens in the KV cache."""
        ...

    @property
    def n_output_left(self) -> int:
        """Tokens that may still be generated."""
        ...

    @property
    def n_no_room(self) -> int:
        """Steps in a row that found no cell."""
        ...


class _Record:
    """How often one kind of draft is right, token by token, up to the first that is not."""

    __slots__ = ("_n_right", "_n_wrong", "_prior")

    def __init__(self, prior: float) -> None:
        self._n_right = 0.0
        self._n_wrong = 0.0
        self._prior = prior

    def add(self, n_right: int, is_wrong: bool) -> None:
        """Learns of one draft: how many tokens were right before one was wrong, if any was."""
        self._n_right = self._n_right * _FADING + n_right
        self._n_wrong = self._n_wrong * _FADING + is_wrong

    @property
    def share(self) -> float:
        """Share of right tokens, [0, 1]."""
        n_seen = self._n_right + self._n_wrong
        return (self._n_right + _WEIGHT * self._prior) / (n_seen + _WEIGHT)

    def n_expected(self, n_draft: int) -> float:
        """Returns the tokens to be accepted of a draft of so many."""
        share = self.share
        return share * (1 - share**n_draft) / (1 - share) if share < 1 else float(n_draft)


class NgramIndex:
    """Where the last tokens of a growing list have stood before. O(1) for each new token.

    Args:
        tokens: The list; whoever owns it only ever appends.
        sizes: Lengths of the n-grams looked for, the longest first.
    """

    __slots__ = ("_found", "_n_indexed", "_sizes", "_tables", "_tokens")

    def __init__(self, tokens: list[int], sizes: tuple[int, ...]) -> None:
        self._tokens = tokens
        self._sizes = sizes
        self._tables: list[dict[tuple[int, ...], int]] = [{} for _ in sizes]
        self._n_indexed = 0
        self._found = [-1] * len(sizes)  # ends of the earlier n-grams like the last one

    @property
    def n_behind(self) -> int:
        """Tokens that are not indexed yet."""
        return len(self._tokens) - self._n_indexed

    def extend(self, n_most: int) -> None:
        """Indexes up to so many of the tokens that are not indexed yet."""
        tokens, first = self._tokens, self._n_indexed + 1
        end = min(len(tokens), self._n_indexed + n_most)
        if end < first:
            return
        for place, size in enumerate(self._sizes):
            table, found = self._tables[place], -1
            for stop in range(max(first, size), end + 1):
                key = tuple(tokens[stop - size : stop])
                found = table.get(key, -1)
                table[key] = stop
            self._found[place] = found
        self._n_indexed = end

    def find(self) -> tuple[int, int]:
        """Returns where the last tokens stood last before, and the place of their size in `sizes`.

        The first is the end of that occurrence: what followed begins there. -1 if nowhere, or
        while not all is indexed.
        """
        if self._n_indexed == len(self._tokens):
            for place, end in enumerate(self._found):
                if end >= 0:
                    return end, place
        return -1, len(self._sizes)

    def follow(self, end: int, n: int) -> list[int]:
        """Returns n tokens: what followed an occurrence, over and over where it overlaps itself."""
        tokens = self._tokens
        draft = tokens[end : end + n]
        period = len(tokens) - end
        while len(draft) < n:
            draft.append(draft[-period])
        return draft


class _Passage(NamedTuple):
    """Where an n-gram stood in what a tenant's sequence said."""

    text: Sequence[int]
    """All that it said."""
    end: int
    """End of the n-gram in it."""


class _Shelf:
    """One tenant's texts, indexed by chunks, the oldest first."""

    __slots__ = ("chunks", "n_tokens", "tables")

    def __init__(self, n_sizes: int) -> None:
        self.chunks: deque[tuple[Sequence[int], int, int]] = deque()
        self.n_tokens = 0
        self.tables: list[dict[tuple[int, ...], _Passage]] = [{} for _ in range(n_sizes)]


class NgramPool:
    """What sequences said that have ended, by tenant. No tenant finds another's.

    Args:
        n_tokens_max: Most tokens kept of one tenant.
        sizes: Lengths of the n-grams looked for, the longest first.
    """

    def __init__(self, n_tokens_max: int, sizes: tuple[int, ...]) -> None:
        self._n_tokens_max = n_tokens_max
        self._sizes = sizes
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()
        self._due: deque[tuple[str, Sequence[int], int, int]] = deque(maxlen=_N_CHUNKS_DUE_MAX)

    @property
    def n_due(self) -> int:
        """Chunks that are not indexed yet."""
        return len(self._due)

    def n_tokens(self, tenant: str) -> int:
        """Returns the tokens kept of a tenant, <= n_tokens_max."""
        shelf = self._shelves.get(tenant)
        return shelf.n_tokens if shelf else 0

    def add(self, tenant: str, text: Sequence[int]) -> None:
        """Takes what a sequence said, or the end of it; `index` makes it findable."""
        first = max(0, len(text) - self._n_tokens_max)
        for start in range(first, len(text), N_CHUNK):
            self._due.append((tenant, text, start, min(start + N_CHUNK, len(text))))

    def index(self) -> None:
        """Indexes one chunk of what waits for it, and forgets as much of the oldest."""
        if not self._due:
            return
        tenant, text, start, end = self._due.popleft()
        shelf = self._shelves.get(tenant)
        if shelf is None:
            if len(self._shelves) >= _N_TENANTS_MAX:
                self._shelves.popitem(last=False)
            shelf = self._shelves[tenant] = _Shelf(len(self._sizes))
        self._shelves.move_to_end(tenant)
        shelf.n_tokens += end - start
        while shelf.n_tokens > self._n_tokens_max and shelf.chunks:
            self._forget(shelf)
        if shelf.n_tokens > self._n_tokens_max:
            start += shelf.n_tokens - self._n_tokens_max
            shelf.n_tokens = self._n_tokens_max
        shelf.chunks.append((text, start, end))
        for size, table in zip(self._sizes, shelf.tables, strict=True):
            for stop in range(max(start, size), end):
                table[tuple(text[stop - size : stop])] = _Passage(text, stop)

    def _forget(self, shelf: _Shelf) -> None:
        """Drops a tenant's oldest chunk."""
        text, start, end = shelf.chunks.popleft()
        shelf.n_tokens -= end - start
        for size, table in zip(self._sizes, shelf.tables, strict=True):
            for stop in range(max(start, size), end):
                key = tuple(text[stop - size : stop])
                passage = table.get(key)
                if passage is not None and passage.text is text and passage.end == stop:
                    del table[key]

    def find(self, tenant: str, tokens: list[int], n_sizes: int) -> tuple[_Passage, int] | None:
        """Returns where a tenant's texts had the last tokens, and the place of their size.

        Args:
            tenant: Whose texts.
            tokens: Those of a sequence.
            n_sizes: How many of the sizes to look for, from the longest on.
        """
        shelf = self._shelves.get(tenant)
        if shelf is None:
            return None
        for place in range(n_sizes):
            size = self._sizes[place]
            passage = shelf.tables[place].get(tuple(tokens[-size:]))
            if passage is not None:
                return passage, place
        return None


class NgramTrack:
    """What is remembered of one sequence. Made by `NgramDrafter`."""

    __slots__ = ("drafter", "index", "proposal", "record", "records", "uses_pool")

    def __init__(self, index: NgramIndex, n_kinds: int, *, uses_pool: bool) -> None:
        self.index = index
        """Of its own tokens."""
        self.records = [_Record(_RIGHT_PRIOR) for _ in range(n_kinds)]
        """How often proposals are right, by kind."""
        self.drafter = _Record(_RIGHT_PRIOR_DRAFTER)
        """How often the drafter's drafts are."""
        self.proposal: list[int] = []
        """Of this step; empty without one."""
        self.record = self.records[0]
        """Of the proposal's kind."""
        self.uses_pool = uses_pool
        """Whether it may draft from its tenant's earlier sequences."""

    @property
    def is_better(self) -> bool:
        """Whether the proposal is to be expected at least as good as the drafter's draft."""
        return bool(self.proposal) and self.record.share >= self.drafter.share

    def n_expected(self, entry: PlanEntry) -> float:
        """Returns the tokens to be accepted of an entry's draft."""
        record = self.record if entry.given else self.drafter
        return record.n_expected(len(entry.given) or entry.n_draft)


class NgramDrafter:
    """Proposes drafts, and learns which of them are right.

    Args:
        n_min: Tokens that must have stood before: the shorter of two lengths that are looked for;
            the longer is twice that. >= 1.
        n_pool_max: Most tokens of ended sequences to draft from, of each tenant; 0 is none.
        can_lengthen: Whether drafts may be longer than the policy has chosen.
    """

    def __init__(self, n_min: int = 3, n_pool_max: int = 0, *, can_lengthen: bool = False) -> None:
        self._sizes = (2 * n_min, n_min)
        self._pool = NgramPool(n_pool_max, self._sizes) if n_pool_max else None
        self._can_lengthen = can_lengthen

    def fill(
        self,
        sequences: Sequence[Quotable],
        entries: list[PlanEntry],
        limits: EngineLimits,
        n_room: int,
        seconds: Callable[[list[PlanEntry]], float] | None = None,
    ) -> list[PlanEntry]:
        """Puts proposals into the entries of those that generate.

        Args:
            sequences: They.
            entries: Theirs, in the same order, with the policy's K; they may be changed.
            limits: What the engine can carry.
            n_room: Most draft tokens of all together.
            seconds: Predicts what a step with such entries takes; None: nobody knows yet.

        Returns:
            The entries to use instead; those that stay are the same objects.
        """
        self._propose(sequences, limits)
        for sequence, entry in zip(sequences, entries, strict=True):
            track = sequence.ngram_memory
            assert track is not None, "made by _propose"
            # A much shorter draft is worth less than the drafter's, however certain it is.
            if entry.n_draft and track.is_better and 2 * len(track.proposal) >= entry.n_draft:
                entry.given = track.proposal[: entry.n_draft]
        if self._can_lengthen and seconds is not None:
            return self._lengthened(sequences, entries, limits, n_room, seconds)
        return entries

    def _propose(self, sequences: Sequence[Quotable], limits: EngineLimits) -> None:
        """Makes a proposal for each sequence, as long as a draft can be."""
        n_left, pool = N_INDEXED_MAX, self._pool
        if pool is not None:
            pool.index()
        n_kinds = 4 if pool else 2
        for sequence in sequences:
            track = sequence.ngram_memory
            if track is None:
                index = NgramIndex(sequence.tokens, self._sizes)
                track = NgramTrack(index, n_kinds, uses_pool=_may_use_pool(sequence))
                sequence.ngram_memory = track
            index = track.index
            n_behind = index.n_behind
            # What one step adds is always indexed; what a prompt added, as there is time.
            if n_behind > limits.n_draft_max + 1:
                n_behind = min(n_behind, n_left)
                n_left -= n_behind
            index.extend(n_behind)
            track.proposal = self._find(sequence, track, limits.n_draft_max)

    def _find(self, sequence: Quotable, track: NgramTrack, n_draft: int) -> list[int]:
        """Returns a proposal, and notes its kind; the longest match, its own text first."""
        end, place = track.index.find()
        if self._pool is not None and track.uses_pool and place > 0:
            found = self._pool.find(sequence.tenant, sequence.tokens, place)
            if found is not None:
                passage, place = found
                track.record = track.records[len(self._sizes) + place]
                return list(passage.text[passage.end : passage.end + n_draft])
        if end < 0:
            return []
        track.record = track.records[place]
        return track.index.follow(end, n_draft)

    def _lengthened(
        self,
        sequences: Sequence[Quotable],
        entries: list[PlanEntry],
        limits: EngineLimits,
        n_room: int,
        seconds: Callable[[list[PlanEntry]], float],
    ) -> list[PlanEntry]:
        """Returns entries whose nearly certain drafts are longer, if the step is better for it."""
        tracks = [sequence.ngram_memory for sequence in sequences]
        longer, n_drafts, n_more = [], 0, 0.0
        for sequence, track, entry in zip(sequences, tracks, entries, strict=True):
            assert track is not None, "made by _propose"
            found = entry
            if sequence.n_draft is None and track.is_better:
                found = _stretched(sequence, track, entry, limits)
            longer.append(found)
            n_drafts += found.n_draft
            if found is not entry:
                n_more += track.n_expected(found) - track.n_expected(entry)
        if not n_more or n_drafts > n_room:
            return entries
        n_expected = len(entries) + sum(
            [t.n_expected(e) for t, e in zip(tracks, entries, strict=True) if t is not None]
        )
        rate = n_expected / seconds(entries)
        is_better = (n_expected + n_more) / seconds(longer) > rate * (1 + _MARGIN)
        return longer if is_better else entries

    def observe(self, sequence: Quotable, entry: ResultEntry) -> None:
        """Learns what became of a step's proposal, used or not, and of the drafter's draft."""
        track = sequence.ngram_memory
        if track is None:
            return
        proposal = track.proposal
        if proposal:
            n_right = 0
            n_seen = min(len(proposal), len(entry.tokens))
            while n_right < n_seen and proposal[n_right] == entry.tokens[n_right]:
                n_right += 1
            track.record.add(n_right, n_right < n_seen)
            track.proposal = []
        if entry.n_drafted and not entry.is_given:
            track.drafter.add(entry.n_accepted, entry.n_accepted < entry.n_drafted)

    def forget(self, sequence: Quotable, *, is_finished: bool) -> None:
        """Takes leave of a sequence that has ended.

        Args:
            sequence: It.
            is_finished: Whether it said all that it was to say: its tenant's others may draft
                from it.
        """
        sequence.ngram_memory = None
        if self._pool is not None and is_finished:
            self._pool.add(sequence.tenant, sequence.tokens[sequence.n_prompt :])


def _may_use_pool(sequence: Quotable) -> bool:
    """Returns whether a sequence may draft from others of its tenant.

    Not where a seed was asked for: what it draws shall not depend on who else was here, and where
    the drafter's drafts are verified by rejection, what is drafted decides which number is drawn.
    """
    return sequence.sampling.temperature <= 0 or sequence.sampling.seed is None


def _stretched(
    sequence: Quotable, track: NgramTrack, entry: PlanEntry, limits: EngineLimits
) -> PlanEntry:
    """Returns an entry with as much of the proposal as is of use; the same if that is no more."""
    if track.record.share < _NEARLY_CERTAIN or sequence.n_no_room:
        return entry
    n_cells_left = limits.n_ctx_seq - sequence.n_computed - 1
    n_draft = min(len(track.proposal), sequence.n_output_left - 1, n_cells_left)
    if n_draft <= entry.n_draft:
        return entry
    return PlanEntry(
        entry.seq_id, entry.n_past, entry.tokens, n_draft, True, track.proposal[:n_draft]
    )
