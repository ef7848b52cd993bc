"""The model of the fake engine: a hash of the whole history, and what a slot holds of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from drafthouse_server.step import SamplingOptions

__all__ = [
    "BOS",
    "EOS",
    "IM_END",
    "N_VOCAB",
    "SPECIALS",
    "FakeSampler",
    "Slot",
    "extend_hash",
    "read_snapshot",
    "split_specials",
    "write_snapshot",
]

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIALS = {BOS: "<|bos|>", EOS: "<|eos|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
N_VOCAB = 256 + len(SPECIALS)
_PRINTABLE = range(32, 127)
_HASH_START = 0xCBF29CE484222325
_HASH_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1
_SNAPSHOT_MAGIC = b"fake snapshot 2 "


def extend_hash(digest: int, token: int) -> int:
    """Returns the hash of a history that is longer by one token (FNV-1a, 64 bit)."""
    return ((digest ^ (token + 1)) * _HASH_PRIME) & _MASK


def _mix(digest: int) -> int:
    """Spreads a hash over all bits (the end of splitmix64)."""
    digest = ((digest ^ (digest >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    digest = ((digest ^ (digest >> 27)) * 0x94D049BB133111EB) & _MASK
    return digest ^ (digest >> 31)


@dataclass(slots=True)
class FakeSampler:
    """Chooses the next token: greedy by the history alone, else by history, seed and turn.

    It keeps its own record of the sequence, as real samplers do for penalties and grammars. One
    that is fed a token twice, or not at all, chooses other tokens than it should.
    """

    options: SamplingOptions
    """Options that it was made from."""
    seen: list[int] = field(default_factory=list)
    """Tokens that it was fed or has chosen: all that are known of its sequence."""
    digest: int = _HASH_START
    """Hash of `seen`."""
    n_chosen: int = 0
    """How many of `seen` it chose; at a temperature above 0 each choice draws once."""
    is_owned: bool = False
    """Whether an engine has taken it."""
    tag: int = 0
    """Whose sequence it is of; 0 until an engine has taken it."""

    def see(self, token: int) -> None:
        """Adds a token to the record."""
        self.seen.append(token)
        self.digest = extend_hash(self.digest, token)

    def choose(self, digest: int, eog_period: int) -> int:
        """Returns the token after a history and adds it to the record.

        Args:
            digest: Hash of the history in the cache.
            eog_period: One token in so many ends the generation; 0 is never.
        """
        if digest != self.digest:
            digest = extend_hash(digest, self.digest)
        if self.options.temperature > 0:
            digest = extend_hash(digest, (self.options.seed or 0) + 1000)
            digest = extend_hash(digest, self.n_chosen)
        digest = _mix(digest)
        is_end = eog_period and digest % eog_period == 0 and not self.options.ignore_eos
        token = EOS if is_end else _PRINTABLE[(digest >> 8) % len(_PRINTABLE)]
        self.see(token)
        self.n_chosen += 1
        return token

    def copy(self, *, is_owned: bool) -> FakeSampler:
        """Returns a sampler in the same state, with a record of its own."""
        return dataclasses.replace(self, seen=[*self.seen], is_owned=is_owned)


@dataclass(slots=True)
class Slot:
    """What the engine knows of one sequence."""

    sampler: FakeSampler
    """Chooses its tokens."""
    tokens: list[int] = field(default_factory=list)
    """Tokens in the cache."""
    digest: int = _HASH_START
    """Hash of `tokens`."""
    n_drafts: int = 0
    """Place in the acceptance pattern."""
    is_cold: bool = False
    """Whether its draft state was lost or turned off."""
    is_warming_up: bool = False
    """Whether it is fed to the drafter again, and drafts after its next step."""
    n_cut_min: int = 0
    """Fewest of its tokens that can be kept, but 0: what came before has left the window."""
    has_sampler: bool = True
    """Whether `sampler` is its own; false of a snapshot for prefix reuse."""

    @property
    def tag(self) -> int:
        """Whose sequence it is."""
        return self.sampler.tag

    @property
    def n_past(self) -> int:
        """Tokens in the cache."""
        return len(self.tokens)

    def compute(self, tokens: Sequence[int]) -> None:
        """Puts tokens into the cache; the sampler is fed those that it does not know yet."""
        for token in tokens:
            if len(self.tokens) >= len(self.sampler.seen):
                self.sampler.see(token)
            self.tokens.append(token)
            self.digest = extend_hash(self.digest, token)


def write_snapshot(slot: Slot, *, has_sampler: bool) -> bytes:
    """Returns a slot as bytes, with its sampler or without: what `read_snapshot` reads."""
    sampler = slot.sampler if has_sampler else FakeSampler(SamplingOptions(), tag=slot.tag)
    options = dataclasses.asdict(sampler.options)
    state = [slot.tokens, sampler.seen, sampler.n_chosen, options, sampler.tag, has_sampler]
    text = json.dumps(state).encode()
    return _SNAPSHOT_MAGIC + b"%08x" % zlib.crc32(text) + text


def read_snapshot(snapshot: bytes) -> Slot | None:
    """Returns the slot that was saved; None for bytes that are not ours, or damaged."""
    head, text = snapshot[: len(_SNAPSHOT_MAGIC) + 8], snapshot[len(_SNAPSHOT_MAGIC) + 8 :]
    if head != _SNAPSHOT_MAGIC + b"%08x" % zlib.crc32(text):
        return None
    tokens, seen, n_chosen, options, tag, has_sampler = json.loads(text)
    for name, value in options.items():
        if isinstance(value, list):
            options[name] = tuple(tuple(v) if isinstance(v, list) else v for v in value)
    sampler = FakeSampler(SamplingOptions(**options), n_chosen=n_chosen, tag=tag)
    for token in seen:
        sampler.see(token)
    slot = Slot(sampler, has_sampler=has_sampler)
    slot.compute(tokens)
    return slot


def split_specials(text: str) -> list[int]:
    """Returns the tokens of a text in which names of control tokens stand for them."""
    for token, name in SPECIALS.items():
        before, found, after = text.partition(name)
        if found:
            return list(itertools.chain(split_specials(before), [token], split_specials(after)))
    return list(text.encode())
