"""Drafts out of what was said before: by a sequence itself, or by its tenant's earlier ones. Pure.

Edits of code, summaries and answers with quotations repeat what they were given. Where the last
tokens of a sequence have stood before, what followed them then is a draft that costs no drafter.
`NgramDrafter` proposes such drafts to the engine, which verifies them in place of its drafter's
(`PlanEntry.external`); no token changes.

- A proposal is made in every step, used or not, and compared with the tokens that came. So how
  often proposals are right is known without trying, for each sequence and kind of proposal.
- It is used where that is at least as often as the drafter's drafts of the same sequence are right.
- Where steps have a cost model, sequences whose proposals are nearly certain may get longer drafts
  than the policy has chosen, if the step is then predicted to yield more tokens per second.

What a tenant's sequences said is found by that tenant only: what is drafted shows in how long a
step takes, and nobody shall learn from that what others were told.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, Protocol

from drafthouse_server.drafting.policy import Asked
from drafthouse_server.step import EngineLimits, PlanEntry, ResultEntry

__all__ = ["NgramDrafter", "NgramIndex", "NgramPool", "NgramTrack", "Searchable"]

N_INDEXED_MAX = 512
"""Most tokens of prompts that are indexed in one step: it bounds what a long prompt costs it."""

N_CHUNK = 64
"""Tokens of the pool that are indexed in one step, and forgotten together."""

_N_LAG = 16
"""Tokens that a sequence has added before they are indexed: a few at once take less time."""

_N_CHUNKS_DUE_MAX = 4096
"""Chunks that may wait to be indexed; the oldest are given up."""
_N_SHELVES_MAX = 256
"""Tenants, and end users of them, with a pool: of the tenant with most the one that added nothing
for longest is forgotten."""
_FADING = 0.98
"""What is left of a record after each step."""
_WEIGHT = 4.0
"""Weight of a record's prior, in tokens. It fades like all that is seen."""
_RIGHT_PRIOR = 0.5
"""Share of proposed tokens that are right, before any was seen."""
_RIGHT_PRIOR_DRAFTER = 0.7
"""Share of the drafter's tokens that are right, before any was seen."""
_NEARLY_CERTAIN = 0.85
"""Share from which a proposal may be longer than the policy's K."""
_MARGIN = 0.03
"""By how much longer drafts must promise more tokens per second."""


class Searchable(Protocol):
    """What must be known of a sequence."""

    tokens: list[int]
    """Prompt and output; it only ever grows."""
    ngram_memory: Any  # NgramTrack | None
    """What the drafter remembers of the sequence; no other code reads it."""

    @property
    def request(self) -> Asked:
        """What was asked for."""
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

    __slots__ = ("_n_right", "_n_seen", "share")

    def __init__(self, prior: float) -> None:
        self._n_right = _WEIGHT * prior
        self._n_seen = _WEIGHT
        self.share = prior
        """Share of right tokens, [0, 1]."""

    def add(self, n_right: int, is_wrong: bool) -> None:
        """Learns of one draft: how many tokens were right before one was wrong, if any was."""
        self._n_right = self._n_right * _FADING + n_right
        self._n_seen = self._n_seen * _FADING + n_right + is_wrong
        self.share = self._n_right / self._n_seen

    def n_expected(self, n_draft: int) -> float:
        """Returns the tokens to be accepted of a draft of so many."""
        share = self.share
        return share * (1 - share**n_draft) / (1 - share) if share < 1 else float(n_draft)


class NgramIndex:
    """Where each n-gram of a growing list of tokens stood last.

    Args:
        tokens: The list; whoever owns it only ever appends.
        size: Length of the n-grams, >= 1.
    """

    __slots__ = ("_size", "_table", "n_indexed", "tokens")

    def __init__(self, tokens: list[int], size: int) -> None:
        self.tokens = tokens
        """The list."""
        self._size = size
        self._table: dict[tuple[int, ...], int] = {}
        self.n_indexed = 0
        """Tokens that are indexed; the last one never is."""

    def index(self, n_most: int) -> None:
        """Indexes up to so many more tokens. O(1) for each.

        The last token waits for the next one, so that nothing is found at its own place.
        """
        first = max(self.n_indexed, self._size - 1)
        self.n_indexed = min(self.n_indexed + n_most, len(self.tokens) - 1)
        ends = range(first + 1, max(first, self.n_indexed) + 1)
        self._table.update(zip(_ngrams(self.tokens, ends, self._size), ends, strict=True))

    def find(self) -> int:
        """Returns the end of the last earlier place of the last tokens; -1 if none is known."""
        return self._table.get(tuple(self.tokens[-self._size :]), -1)


def _ngrams(tokens: Sequence[int], ends: range, size: int) -> Iterator[tuple[int, ...]]:
    """Returns the n-grams with these ends, which follow one another."""
    first, n = ends.start - size, len(ends)
    return zip(*[tokens[first + i : first + i + n] for i in range(size)], strict=True)


class _Shelf:
    """One tenant's texts, indexed by chunks, the oldest first."""

    __slots__ = ("chunks", "n_tokens", "table")

    def __init__(self) -> None:
        self.chunks: deque[tuple[list[int], int, int]] = deque()
        self.n_tokens = 0
        self.table: dict[tuple[int, ...], tuple[list[int], int]] = {}


class NgramPool:
    """What sequences said that have ended, by tenant. No tenant finds another's.

    Args:
        n_tokens_max: Most tokens kept of one tenant.
        size: Length of the n-grams that are looked for.
    """

    def __init__(self, n_tokens_max: int, size: int) -> None:
        self._n_tokens_max = n_tokens_max
        self._size = size
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()
        self._due: deque[tuple[str, list[int], int, int]] = deque(maxlen=_N_CHUNKS_DUE_MAX)

    def n_tokens(self, tenant: str) -> int:
        """Returns the tokens kept of a tenant, <= n_tokens_max."""
        shelf = self._shelves.get(tenant)
        return shelf.n_tokens if shelf else 0

    def add(self, tenant: str, text: list[int]) -> None:
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
            if len(self._shelves) >= _N_SHELVES_MAX:
                del self._shelves[self._next_to_go()]
            shelf = self._shelves[tenant] = _Shelf()
        self._shelves.move_to_end(tenant)
        shelf.n_tokens += end - start
        while shelf.chunks and shelf.n_tokens > self._n_tokens_max:
            self._forget(shelf)
        shelf.chunks.append((text, start, end))
        ends = self._ends(start, end)
        places = zip(repeat(text, len(ends)), ends, strict=True)
        shelf.table.update(zip(_ngrams(text, ends, self._size), places, strict=True))

    def forget(self, tenant: str) -> None:
        """Forgets all of a tenant and of its end users (`Request.owner`)."""

        def is_other(owner: str) -> bool:
            return _tenant_of(owner) != tenant

        self._shelves = OrderedDict((o, s) for o, s in self._shelves.items() if is_other(o))
        self._due = deque((d for d in self._due if is_other(d[0])), maxlen=_N_CHUNKS_DUE_MAX)

    def _next_to_go(self) -> str:
        """Returns whose shelf another one takes the place of.

        End users have names of their tenant's choice: however many, they cost no other tenant its.
        """
        n_shelves = Counter(map(_tenant_of, self._shelves))
        most = max(n_shelves, key=n_shelves.__getitem__)
        return next(owner for owner in self._shelves if _tenant_of(owner) == most)

    def _ends(self, start: int, end: int) -> range:
        """Returns the ends of the n-grams of a chunk; the text's last one has nothing after it."""
        return range(max(start, self._size), max(end, self._size))

    def _forget(self, shelf: _Shelf) -> None:
        """Drops a tenant's oldest chunk."""
        text, start, end = shelf.chunks.popleft()
        shelf.n_tokens -= end - start
        ends = self._ends(start, end)
        for key, stop in zip(_ngrams(text, ends, self._size), ends, strict=True):
            # It may stand for a younger text by now.
            found = shelf.table.get(key)
            if found is not None and found[0] is text and found[1] == stop:
                del shelf.table[key]

    def find(self, tenant: str, tokens: list[int]) -> tuple[list[int], int] | None:
        """Returns a text of the tenant that has the last tokens of a list, and where they end."""
        shelf = self._shelves.get(tenant)
        return shelf.table.get(tuple(tokens[-self._size :])) if shelf else None


def _tenant_of(owner: str) -> str:
    """Returns the tenant of an owner (`Request.owner`), which may be an end user of it."""
    return owner.partition("\0")[0]


class NgramTrack:
    """What is remembered of one sequence. Made by `NgramDrafter`."""

    __slots__ = (
        "cursor",
        "drafter",
        "index",
        "is_better",
        "n_matched",
        "proposal",
        "record",
        "records",
        "text",
        "uses_pool",
    )

    def __init__(self, index: NgramIndex, *, uses_pool: bool) -> None:
        self.index = index
        """N-grams of the sequence's own tokens."""
        self.uses_pool = uses_pool
        """Whether the sequence may draft from its tenant's earlier ones."""
        self.records = [_Record(_RIGHT_PRIOR) for _ in range(4)]
        """How often proposals are right: own text or the pool's, each with few or many tokens
        that match."""
        self.drafter = _Record(_RIGHT_PRIOR_DRAFTER)
        """How often the drafter's drafts are right."""
        self.text: list[int] | None = None
        """What the sequence seems to repeat; None: nothing."""
        self.cursor = 0
        """Position in `text`."""
        self.n_matched = 0
        """Tokens of `text` that the sequence has repeated so far, as far as they were counted."""
        self.proposal: list[int] = []
        """Proposal of this step; empty without one. One token longer than a draft can be."""
        self.record = self.records[0]
        """Record of the proposal's kind."""
        self.is_better = False
        """Whether a proposal is to be expected at least as good as the drafter's draft."""

    def n_expected(self, entry: PlanEntry) -> float:
        """Returns the tokens to be accepted of an entry's draft."""
        record = self.record if entry.external else self.drafter
        return record.n_expected(entry.n_verified)

    def drafts_on(self, text: list[int], cursor: int, n_most: int) -> None:
        """Follows a text from a place on whose tokens before it are the sequence's last."""
        tokens, n = self.index.tokens, 0
        n_most = min(n_most, cursor, len(tokens))
        while n < n_most and text[cursor - 1 - n] == tokens[-1 - n]:
            n += 1
        if text is tokens or n > self.n_matched:
            self.text, self.cursor, self.n_matched = text, cursor, n

    def propose(self, n: int, n_long: int) -> None:
        """Makes the proposal: the next n tokens of the text that it follows."""
        text, cursor = self.text, self.cursor
        assert text is not None, "asked by the caller"
        proposal = text[cursor : cursor + n]
        is_own = text is self.index.tokens
        if is_own and len(proposal) < n:
            period = len(text) - cursor  # it overlaps itself: over and over
            while len(proposal) < n:
                proposal.append(proposal[-period])
        self.proposal = proposal
        self.record = self.records[(0 if is_own else 2) + (self.n_matched >= n_long)]
        self.is_better = self.record.share >= self.drafter.share


class NgramDrafter:
    """Proposes drafts, and learns which of them are right.

    Args:
        n_min: Tokens that must have stood before, >= 1. Proposals after twice as many, or more,
            have a record of their own.
        n_pool_max: Most tokens of ended sequences to draft from, of each tenant; 0 is none.
        can_lengthen: Whether drafts may be longer than the policy has chosen.
    """

    is_on = True
    """Whether it proposes anything."""

    def __init__(self, n_min: int = 3, n_pool_max: int = 0, *, can_lengthen: bool = False) -> None:
        self._n_min = n_min
        self._n_long = 2 * n_min
        self._n_pool_max = n_pool_max
        self._can_lengthen = can_lengthen
        self.reset()

    def reset(self) -> None:
        """Forgets all tenants' ended sequences; those that run have to be given new memories."""
        n_pool_max = self._n_pool_max
        self._pool = NgramPool(n_pool_max, self._n_min) if n_pool_max else None

    def fill(
        self,
        sequences: Sequence[Searchable],
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
            seconds: Predicts what a step with such entries takes; None: it is not known yet.

        Returns:
            The entries to use instead; those that stay are the same objects.
        """
        if self._pool is not None:
            self._pool.index()
        n_left, n_most, n_long = N_INDEXED_MAX, limits.n_draft_max + 1, self._n_long
        for sequence, entry in zip(sequences, entries, strict=True):
            track: NgramTrack = sequence.ngram_memory or self._track(sequence)
            index = track.index
            n_behind = len(index.tokens) - index.n_indexed
            if n_behind > _N_LAG and n_left > 0:
                index.index(n_left)
                n_left -= n_behind
            if track.text is None:
                self._look_up(sequence, track)
                if track.text is None:
                    continue
            track.propose(n_most, n_long)
            n_draft = entry.n_draft
            # A much shorter draft is worth less than the drafter's, however certain it is.
            if n_draft and track.is_better and 2 * len(track.proposal) >= n_draft:
                entry.external = track.proposal[:n_draft]
        if self._can_lengthen and seconds is not None:
            return self._lengthened(sequences, entries, limits, n_room, seconds)
        return entries

    def _track(self, sequence: Searchable) -> NgramTrack:
        """Returns the memory of a new sequence."""
        index = NgramIndex(sequence.tokens, self._n_min)
        track = NgramTrack(index, uses_pool=self._pool is not None and _may_use_pool(sequence))
        sequence.ngram_memory = track
        return track

    def _look_up(self, sequence: Searchable, track: NgramTrack) -> None:
        """Finds a text that a sequence may be repeating: its own, or one that matches longer."""
        end = track.index.find()
        if end >= 0:
            track.drafts_on(track.index.tokens, end, self._n_long)
        if self._pool is not None and track.uses_pool and track.n_matched < self._n_long:
            found = self._pool.find(sequence.request.owner, track.index.tokens)
            if found is not None:
                track.drafts_on(*found, self._n_long)

    def _lengthened(
        self,
        sequences: Sequence[Searchable],
        entries: list[PlanEntry],
        limits: EngineLimits,
        n_room: int,
        seconds: Callable[[list[PlanEntry]], float],
    ) -> list[PlanEntry]:
        """Returns entries whose nearly certain drafts are longer, if the step is better for it."""
        longer = [
            _stretched(sequence, entry, limits)
            for sequence, entry in zip(sequences, entries, strict=True)
        ]
        if all(map(_is_same, longer, entries)) or sum([e.n_draft for e in longer]) > n_room:
            return entries
        rate = _n_expected(sequences, entries) / seconds(entries)
        is_better = _n_expected(sequences, longer) / seconds(longer) > rate * (1 + _MARGIN)
        return longer if is_better else entries

    def observe(self, sequence: Searchable, entry: ResultEntry) -> None:
        """Learns what became of a step's proposal, used or not, and of the drafter's draft."""
        track: NgramTrack | None = sequence.ngram_memory
        if track is None:
            return
        if entry.n_drafted and not entry.is_external:
            track.drafter.add(entry.n_accepted, entry.n_accepted < entry.n_drafted)
        proposal = track.proposal
        if not proposal:
            return
        tokens, n = entry.tokens, len(entry.tokens)
        if proposal[:n] == tokens:
            track.record.add(n, False)
            track.cursor += n
            track.n_matched += n
            if track.cursor >= len(track.text or ()) and track.text is not sequence.tokens:
                track.text = None  # the end of what an earlier one said
                track.n_matched = 0
        else:
            n_right = _n_common(proposal, tokens)
            track.record.add(n_right, n_right < len(proposal))
            track.text = None
            track.n_matched = 0
        track.proposal = []

    def forget_tenant(self, tenant: str) -> None:
        """Forgets what the ended sequences of a tenant said. None of it may run."""
        if self._pool is not None:
            self._pool.forget(tenant)

    def forget(self, sequence: Searchable, *, is_finished: bool) -> None:
        """Forgets a finished sequence; its output may go to its tenant's pool.

        Args:
            sequence: The one that has ended.
            is_finished: Whether it said all that it was to say: its tenant's others may draft
                from it.
        """
        sequence.ngram_memory = None
        if self._pool is not None and is_finished:
            self._pool.add(sequence.request.owner, sequence.tokens[sequence.n_prompt :])


def _may_use_pool(sequence: Searchable) -> bool:
    """Returns whether a sequence may draft from others of its tenant.

    Not where a seed was asked for: what it draws shall not depend on who else was here, and where
    a batch's width changes how a device rounds, its drafts might.
    """
    sampling = sequence.request.sampling
    return sampling.temperature <= 0 or sampling.seed is None


def _n_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many tokens two lists begin with alike."""
    n = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        n += 1
    return n


def _is_same(one: PlanEntry, other: PlanEntry) -> bool:
    return one is other


def _n_expected(sequences: Sequence[Searchable], entries: list[PlanEntry]) -> float:
    """Returns the tokens that a step is expected to yield."""
    n_expected = 0.0
    for sequence, entry in zip(sequences, entries, strict=True):
        track = sequence.ngram_memory
        assert track is not None, "made by fill"
        n_expected += 1 + track.n_expected(entry)
    return n_expected


def _stretched(sequence: Searchable, entry: PlanEntry, limits: EngineLimits) -> PlanEntry:
    """Returns an entry with as much of the proposal as is of use; the same if that is no more."""
    track = sequence.ngram_memory
    assert track is not None, "made by fill"
    is_wanted = bool(track.proposal) and track.is_better and sequence.request.n_draft is None
    if not is_wanted or track.record.share < _NEARLY_CERTAIN or sequence.n_no_room:
        return entry
    n_useful = min(sequence.n_output_left, limits.n_ctx_seq - sequence.n_computed) - 1
    n_draft = min(len(track.proposal), limits.n_draft_max, n_useful)
    if n_draft <= entry.n_draft:
        return entry
    given = track.proposal[:n_draft]
    return PlanEntry(entry.seq_id, entry.n_past, entry.tokens, n_draft, True, given)
