"""The parts of a step, one call at a time: draft, decode, process, sample, accept."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.proofs.engine_at_random.ledger import Ledger, Wrong, agreed
from tests.proofs.engine_at_random.request import Request
from tests.proofs.engine_at_random.settings import NEEDS_PROCESS

from drafthouse_engine import NoRoom, SamplingFailed, Unsupported
from drafthouse_engine.errors import BY_STATUS

__all__ = ["drive_by_hand"]


@dataclass
class _Piece:
    """Tokens of one sequence in a decode."""

    request: Request
    first: int
    """Index of its first token in the batch."""
    tokens: list[int]
    is_draft: bool
    """Whether these are the last chosen token and a draft behind it."""
    is_output: bool


def drive_by_hand(chance: random.Random, ledger: Ledger) -> None:
    """Has some sequences go on by one round: pieces of prompts, and drafts that are verified.

    Raises:
        Wrong: the engine does something else.
    """
    live = list(ledger.live.values())
    chance.shuffle(live)
    chosen = sorted(live[: chance.choice((1, 2, 4))], key=_slot_of)
    drafts = _drawn_drafts(chance, ledger, chosen)
    pieces = _drawn_pieces(chance, ledger, chosen, drafts)
    decoded = {_slot_of(piece.request) for piece in pieces}
    for request in chosen:
        if _slot_of(request) in drafts and _slot_of(request) not in decoded:
            _drop_draft(ledger, request)
    if not pieces or not _decode(ledger, pieces, drafts):
        return
    if ledger.limits.draft_type in NEEDS_PROCESS or chance.random() < 0.5:
        ledger.engine.process()
    ledger.counts["rounds by hand"] += 1
    for piece in pieces:
        _verify(ledger, piece, drafts)


def _slot_of(request: Request) -> int:
    assert request.slot is not None
    return request.slot


def _drop_draft(ledger: Ledger, request: Request) -> None:
    ledger.engine.rollback(_slot_of(request), request.n_past)


def _drawn_drafts(
    chance: random.Random, ledger: Ledger, chosen: list[Request]
) -> dict[int, list[int]]:
    """Has the drafter draft for some; drops some of it."""
    limits, asked = ledger.limits, []
    for request in chosen:
        n_most = min(limits.n_draft_max, limits.n_ctx_seq - request.n_past - 1)
        if request.is_generating and n_most > 0 and chance.random() < 0.8:
            n_draft = chance.randrange(1, n_most + 1)
            asked.append((_slot_of(request), request.n_past, request.output[-1], n_draft))
    if not asked:
        return {}
    ledger.say(f"draft {asked}")
    found = ledger.engine.draft_many(asked)
    drafts = {row[0]: draft for row, draft in zip(asked, found, strict=True)}
    ledger.counts["drafted by hand"] += sum(map(len, found))
    for slot in list(drafts):
        if chance.random() < 0.1:
            ledger.say(f"drop the draft of {slot}")
            _drop_draft(ledger, ledger.live[slot])
            del drafts[slot]
    return drafts


def _drawn_pieces(
    chance: random.Random, ledger: Ledger, chosen: list[Request], drafts: dict[int, list[int]]
) -> list[_Piece]:
    """Draws what is decoded: as much as a batch takes."""
    limits = ledger.limits
    pieces: list[_Piece] = []
    n_room, n_outputs = limits.n_batch, limits.n_outputs_max
    if limits.kv_unified:
        n_room = min(n_room, limits.n_ctx - ledger.n_cells())
    n_first = 0
    for request in chosen:
        is_draft = request.is_generating
        rest = request.tokens[request.n_past :]
        if is_draft:
            rest += drafts.get(_slot_of(request), [])
            n = min(len(rest), n_room)
        else:
            n = min(chance.choice((len(rest), chance.randrange(1, len(rest) + 1))), n_room)
        is_output = is_draft or n == len(rest)
        n_needed = n if is_draft else int(is_output)
        if n < 1 or n_needed > n_outputs:
            continue
        pieces.append(_Piece(request, n_first, rest[:n], is_draft, is_output))
        n_first, n_room, n_outputs = n_first + n, n_room - n, n_outputs - n_needed
    return pieces


def _decode(ledger: Ledger, pieces: list[_Piece], drafts: dict[int, list[int]]) -> bool:
    """Decodes; returns whether it was done. Where it was not, drafts are dropped."""
    tokens, positions, slots, outputs = [], [], [], []
    for piece in pieces:
        for i, token in enumerate(piece.tokens):
            is_last = i == len(piece.tokens) - 1
            tokens.append(token)
            positions.append(piece.request.n_past + i)
            slots.append(_slot_of(piece.request))
            outputs.append(piece.is_draft or (piece.is_output and is_last))
    ledger.say(f"decode {tokens} at {positions} of {slots}, outputs {list(map(int, outputs))}")
    try:
        ledger.engine.decode(tokens, positions, slots, outputs)
    except (NoRoom, Unsupported) as error:
        if isinstance(error, NoRoom) and not ledger.limits.kv_unified:
            raise Wrong(f"no room in cells of its own: {error}") from error
        ledger.counts[f"{type(error).__name__} by hand"] += 1
        for piece in pieces:
            if _slot_of(piece.request) in drafts:
                _drop_draft(ledger, piece.request)
        return False
    return True


def _verify(ledger: Ledger, piece: _Piece, drafts: dict[int, list[int]]) -> None:
    """Chooses tokens as long as they are the draft's, and ends the round of one sequence."""
    request, slot = piece.request, _slot_of(piece.request)
    chosen = list[int]()
    try:
        while piece.is_output and not _is_over(ledger, piece, chosen):
            offset = len(chosen) if piece.is_draft else len(piece.tokens) - 1
            chosen.append(ledger.engine.sample(slot, piece.first + offset))
    except SamplingFailed as error:
        is_alike = ledger.judge(request, chosen)
        if is_alike:
            agreed("why none was chosen", type(error), BY_STATUS.get(request.answer.status))
        ledger.fail(request, request.answer.status, is_alike=is_alike)
        return
    if piece.is_draft and slot in drafts:
        ledger.engine.accept(slot, len(chosen) - 1)
        ledger.counts["accepted by hand"] += len(chosen) - 1
    request.n_past += len(chosen) if piece.is_draft else len(piece.tokens)
    if not ledger.judge(request, chosen):
        ledger.drop(request)
        return
    agreed("n_past after a round", ledger.engine.seq_n_past(slot), request.n_past)


def _is_over(ledger: Ledger, piece: _Piece, chosen: list[int]) -> bool:
    """Returns whether the round of a sequence has its last token."""
    if not piece.is_draft or not chosen:
        return bool(chosen)
    draft, n = piece.tokens[1:], len(chosen)
    is_wrong = n > len(draft) or chosen[-1] != draft[n - 1]
    return is_wrong or ledger.engine.target.is_eog(chosen[-1])
