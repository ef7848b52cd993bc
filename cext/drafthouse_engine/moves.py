"""What a step does before its entries: sequences saved, preempted, freed and started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from drafthouse_engine._spec import Sampler

__all__ = ["Moved", "Moves", "Start"]


class Start(NamedTuple):
    """A sequence taken into use, idle or not, with tokens that are computed already.

    They are the first ones of a snapshot, of another sequence, or else of what this one holds; the
    rest of that is gone. A new sampler is fed them. A resumed one is not fed what it knows: the
    sequence's tokens up to the last one chosen are computed again by entries, of which the one with
    the last token is an output.
    """

    seq_id: int
    """The sequence, [0, n_seq_max)."""
    sampler: Sampler | None
    """Used once: the engine has it once the step is done, but not where the plan was refused. None:
    the snapshot's own, with `is_resumed`. With one, the snapshot's is not made."""
    n_kept: int = 0
    """Tokens that stay, [0, those held there]; 0 begins empty."""
    source: int | None = None
    """Another sequence whose first tokens are copied; it stays as it is."""
    snapshot: bytes | bytearray | memoryview | None = None
    """What `Moves.saves` or `Engine.save` gave."""
    is_resumed: bool = False
    """Whether the sampler was preempted, or is the snapshot's."""
    tag: int = 0
    """Opaque, [0, 2**64): whose sequence it is; 0 is nobody's. Its copies, its snapshots and its
    preempted sampler carry the tag; a start that would go on from another's is BadPlan."""


@dataclass(frozen=True, slots=True)
class Moves:
    """What a step does before its entries, in the order of these fields.

    Each is checked against what those before will have made of the sequences, and nothing is done
    if anything in the plan is wrong.
    """

    saves: Sequence[int] = ()
    """Sequences to be written as snapshots; they stay as they are. One that is preempted too is
    written with its sampler, all others without, for prefix reuse: see `Engine.save`."""
    swap_outs: Sequence[int] = ()
    """Sequences freed but for their samplers, which keep history and random state."""
    frees: Sequence[int] = ()
    """Sequences given back, as `Engine.seq_end` does; harmless when idle."""
    starts: Sequence[Start] = ()
    """Sequences taken into use, each once."""
    drafts_off: Sequence[int] = ()
    """Slots whose drafter is turned off; see `Engine.seq_drafts_off`."""
    drafts_on: Sequence[int] = ()
    """Slots whose drafter is turned on again; see `Engine.seq_drafts_on`."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What came of a step's `Moves`."""

    snapshots: Mapping[int, memoryview] = field(default_factory=dict)
    """By sequence; one that could not be written is missing. Each is read only, and has its memory
    until the last view of it is gone: the next snapshot is written there."""
    samplers: Mapping[int, Sampler] = field(default_factory=dict)
    """Preempted ones, by sequence, to be resumed by a `Start`; one that memory was lacking for is
    missing."""
    n_kept: Sequence[int] = ()
    """Tokens kept, one number per start; fewer than it says, 0, where they could not be: a
    recurrent target goes on only from all that a sequence or snapshot holds, and copies from no
    other; a snapshot may be damaged or foreign, or lack the sampler that is wanted. Then the
    sequence has begun, empty, and its entry of this step was not computed; with the snapshot's own
    sampler it stays idle, and its entry is DECODE_FAILED."""
