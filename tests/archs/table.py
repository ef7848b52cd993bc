"""The page of `make archs`, and the list of proven architectures that the engine ships."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

from tests.archs import embed
from tests.archs.cells import CELLS, DRAFTS, EAGLE3, MTP, SMALL, small
from tests.archs.driver import N_CTX_LONG
from tests.archs.judge import TIE, Verdict
from tests.archs.texts import N_LEAD
from tests.archs.tipped import N_AFTER

__all__ = ["Row", "is_wrong", "page", "proven", "proven_module", "summary"]

MARKS = {"equal": "=", "tie": "~", "differs": "≠", "died": "†", "refused": "r", "unknown": "?"}
N_PROMPTS = 8
TYPES = (*DRAFTS, MTP, EAGLE3)
"""Draft types, in the order of their columns."""
REUSING = ("slots", "host")
"""Cells in which a model that is computed at all must go on from what it has computed."""


@dataclasses.dataclass
class Row:
    """What one model gave."""

    arch: str
    """Its architecture."""
    peer: str
    """What became of llama-server; empty where it answers."""
    n_peer_equal: int
    """How many of eight prompts llama-server itself answers at once as alone."""
    history: float
    """How far one other early token of the prompt moves a logit; 0 where nothing was computed."""
    cells: dict[str, dict[str, Verdict]]
    """Verdicts by draft type and cell."""
    digest: str = ""
    """Of the model's file."""
    embeddings: dict[str, dict[str, Verdict]] = dataclasses.field(default_factory=dict)
    """Verdicts on its embeddings by pooling and cell; none where it was not asked for any."""
    moved: float = 0.0
    """How far another first token moves an embedding at least, as a part of its length."""

    @property
    def verdicts(self) -> Iterator[tuple[str, str, Verdict]]:
        """Yields draft type, cell and verdict."""
        for draft_type, cells in self.cells.items():
            for name in CELLS:
                yield draft_type, name, cells[name]

    @property
    def embedded(self) -> Iterator[Verdict]:
        """Yields the verdicts on embeddings."""
        for cells in self.embeddings.values():
            yield from cells.values()


def is_wrong(row: Row) -> bool:
    """Tells whether a cell differs without a tie, has ended our process, or has reused nothing."""
    cells = [*(cell for _, _, cell in row.verdicts), *row.embedded]
    return bool(_idle(row)) or any(cell.kind in ("differs", "died") for cell in cells)


def _idle(row: Row) -> list[str]:
    """Returns the cells that should have reused something without drafts, and have not."""
    cells = row.cells["none"]
    answered = ("equal", "tie", "differs")
    return [name for name in REUSING if cells[name].kind in answered and not cells[name].n_reused]


def proven(rows: Mapping[str, Row]) -> list[str]:
    """Returns the architectures of which every model gives the right tokens in every cell.

    A cell may be refused where only the model as its own draft is; none may end our process.
    """
    archs = {row.arch for row in rows.values()}
    return sorted(archs - {row.arch for row in rows.values() if not _is_proven(row)})


def _is_proven(row: Row) -> bool:
    return all(
        cell.kind in ("equal", "tie")
        or (cell.kind == "refused" and draft_type.removeprefix(SMALL) == "simple")
        for draft_type, _, cell in row.verdicts
    )


def summary(row: Row) -> str:
    """Returns one line about a model."""
    of_types = []
    for draft_type, cells in row.cells.items():
        n_drafted = sum(cell.n_drafted for cell in cells.values())
        n_accepted = sum(cell.n_accepted for cell in cells.values())
        gap = max(cell.gap for cell in cells.values())
        drafts = f" {n_accepted}/{n_drafted}" if n_drafted else ""
        apart = f" gap {gap:.2g}" if gap else ""
        of_types.append(f"{draft_type} {_marks(cells)}{drafts}{apart}")
    peer = row.peer or f"peer {row.n_peer_equal}/{N_PROMPTS}"
    idle = [f"nothing reused: {', '.join(_idle(row))}"] if _idle(row) else []
    return " | ".join([peer, *of_types, *_summary_of_embeddings(row), *idle])


def _summary_of_embeddings(row: Row) -> Iterator[str]:
    for pooling, cells in row.embeddings.items():
        gap = max(cell.gap for cell in cells.values())
        yield f"embeddings {pooling} {_row_marks(cells)}" + (f" gap {gap:.2g}" if gap else "")


def _row_marks(cells: Mapping[str, Verdict]) -> str:
    return "".join(MARKS[cells[name].kind] for name in embed.CELLS)


def _marks(cells: Mapping[str, Verdict]) -> str:
    return "".join(MARKS[cells[name].kind] for name in CELLS)


_LEGEND = (
    f"Each of the columns none to EAGLE-3 has {len(CELLS)} cells, in this order:"
    f" {', '.join(CELLS)}.",
    "Marks: `=` every answer equals llama-server's; `~` some part from it where two tokens tie",
    "(below, with the difference of their logits); `r` refused (below, with the sentence); `≠`",
    "differs; `†` our process has ended (below); `?` llama-server gives no answer to compare with.",
    "In all cells but `saved` the n-gram drafter is not llama.cpp's: the driver looks up what",
    "followed the last token before, or else how the prompt began, and gives the step that as a",
    "draft, since llama.cpp's own drafts hardly a token for random weights. The EAGLE-3 drafter is",
    "random and knows by heart which token the model gives after which (`models/archs_eagle3.py`);",
    "that of a `tiny-…` is trained. MTP `–`: the model has no such heads. EAGLE-3 `–`: llama.cpp",
    "does not show the layers of the architecture, so that nothing can be drafted from them, and",
    "the engine refuses such a drafter in a sentence. Behind these, in the same order, the same",
    "with small caches for windows (`swa_full` off), which have fewer cells than the",
    f"{N_LEAD} tokens that stand before each prompt there, in slots of {N_CTX_LONG}; `–`: no layer",
    "has a window, or one as long as the slot. Behind the marks:",
    "accepted and drafted tokens; tokens that were not computed again, without drafts, which may",
    "not be 0 in `slots` or `host`; how far a logit moves when an early token of the prompt is",
    "another (what a cache that lost it would do); and how many of eight prompts llama-server",
    "itself answers at once as alone.",
)

_MISSING = """\
No program writes these yet, and nothing is said of them: rwkv6, rwkv6qwen2, rwkv7, arwkv7
(upstream's own test hangs with them), plm (upstream: wrong shapes), chameleon, gptj and clip
(upstream: no usable graph), granite-switch (an adapter is missing), deepseek2-ocr, bitnet, the
encoders and embedders but those above (nomic-bert-moe, jina-bert-v3, llama-embed, t5encoder,
gemma-embedding2), t5 (encoder and decoder), wavtokenizer-dec, clef, gemma4-assistant (refused: it
computes nothing without its target), eagle3 and dflash (draft models; the one drafts above, the
other in tests/cext). MTP blocks are written for every architecture whose graph has them; files of
bailingmoe2, dots3note, exaone-moe, exaone4 and glm4 keep such blocks, which llama.cpp does not
load."""


def page(rows: Mapping[str, Row], head: str) -> str:
    """Returns the page.

    Args:
        rows: By the model's name.
        head: Date, version, machine and command.
    """
    found = [cell for row in rows.values() for _, _, cell in row.verdicts]
    found += [cell for row in rows.values() for cell in row.embedded]
    counts = ", ".join(
        f"{sum(cell.kind == kind for cell in found)} {kind}"
        for kind in MARKS
        if any(cell.kind == kind for cell in found)
    )
    ended = list(_sentences(rows, "died"))
    if ended:
        ended[:0] = ["| models | draft type | how |", "|---|---|---|"]
    lines = [
        head,
        f"{len(rows)} models of {len({row.arch for row in rows.values()})} architectures,"
        f" {len(found)} cells: {counts}.",
        "",
        *_LEGEND,
        "",
        "| model | none | n-gram | itself | MTP | EAGLE-3 | small windows: the same"
        " | accepted/drafted: n-gram, itself, MTP, EAGLE-3 | reused | history | peer |",
        "|---|---|---|---|---|---|---|---|---:|---:|---:|",
        *(_line(name, row) for name, row in sorted(rows.items())),
        "",
        "## Ties and differences",
        "",
        "The difference is that of the two candidates' logits after the same tokens, computed at"
        f" once. Above {TIE} the two do not tie; what did is an expert or a token before, as"
        " llama-server shows, which gives the same answer in another way that rounds otherwise. Or"
        " as our own engine shows, token by token: without flash attention it gives llama-server's"
        f" answer, and its logits with and without differ by at most {TIE} at all places but that"
        f" one: of the text, of {N_AFTER} tokens behind it, and of all that read backwards"
        " (`tests/archs/tipped.py`). So looks one choice that a rounding tips, of experts or of the"
        " tokens that an indexer picks; a fault of attention would show at more places. Long texts"
        " have more such choices: there the same is asked of the model with all of its experts in"
        " use, which chooses none, at every place. Where neither of our ways gives llama-server's"
        " answer, ours must be the one that our engine gives afresh, and with all experts in use"
        " llama-server's must be ours.",
        "",
        "| model | draft type: cells | answers | difference of the logits, at most | where they do"
        " not tie |",
        "|---|---|---:|---:|---|",
        *_apart(rows),
        "",
        *_embeddings(rows),
        "## Proven",
        "",
        "Every model of these gives the right tokens in every cell; recurrent ones refuse to draft"
        " for themselves. A model of another architecture is decoded in a process of its own before"
        " the server listens (`probe`).",
        "",
        f"{', '.join(f'`{name}`' for name in proven(rows))}.",
        "",
        "## Refused",
        "",
        "| models | draft type | sentence |",
        "|---|---|---|",
        *_sentences(rows, "refused"),
        "",
        *(["## Our process has ended", "", *ended, ""] if ended else []),
        "## Missing",
        "",
        _MISSING,
        "",
    ]
    return "\n".join(lines)


def _line(name: str, row: Row) -> str:
    marks = " | ".join(
        f"`{_marks(row.cells[kind])}`" if kind in row.cells else "–" for kind in TYPES
    )
    windows = " ".join(f"`{_marks(row.cells[small(k)])}`" for k in TYPES if small(k) in row.cells)
    drafts = ", ".join(
        f"{sum(c.n_accepted for c in cells.values())}/{sum(c.n_drafted for c in cells.values())}"
        if (cells := row.cells.get(kind))
        else "–"
        for kind in TYPES[1:]
    )
    n_reused = str(sum(cell.n_reused for cell in row.cells["none"].values()))
    if _idle(row):
        n_reused += f" (none: {', '.join(_idle(row))})"
    peer = f"– ({row.peer})" if row.peer else f"{row.n_peer_equal}/{N_PROMPTS}"
    return (
        f"| {name} | {marks} | {windows or '–'} | {drafts} | {n_reused} | {row.history:.2g}"
        f" | {peer} |"
    )


def _embeddings(rows: Mapping[str, Row]) -> Iterator[str]:
    asked = {name: row for name, row in sorted(rows.items()) if row.embeddings}
    if not asked:
        return
    yield from (
        "## Embeddings",
        "",
        "Encoders, which generate nothing, and some models that do, beside llama-server's"
        " `/embedding`: the same prompts, by pooling; rows are not scaled. The cells are, in this"
        f" order: {', '.join(embed.CELLS)}; the last is compared with llama-server's alone, too;"
        " plain is without flash attention on both sides, whose kernels round otherwise. `=` is"
        f" equal to the last bit, `~` differs by at most {embed.TIE} of the row's length. Then the"
        " greatest difference, how far another first token moves a row at least, and for which"
        " poolings llama-server itself gives the same bits at once as alone.",
        "",
        f"| model | {' | '.join(embed.POOLINGS)} | difference, at most | moved, at least | peer |",
        f"|---|{'---|' * len(embed.POOLINGS)}---:|---:|---|",
    )
    for name, row in asked.items():
        marks = " | ".join(f"`{_row_marks(row.embeddings[key])}`" for key in embed.POOLINGS)
        gap = max(cell.gap for cell in row.embedded)
        same = [key for key, cells in row.embeddings.items() if cells[embed.AT_ONCE].is_peer_same]
        yield f"| {name} | {marks} | {gap:.2g} | {row.moved:.2g} | {', '.join(same) or 'none'} |"
    yield ""
    said = [
        f"{name}, {key}: {next(iter(cells.values())).reason}."
        for name, row in asked.items()
        for key, cells in row.embeddings.items()
        if next(iter(cells.values())).reason
    ]
    if said:
        yield from (*said, "")


def _apart(rows: Mapping[str, Row]) -> Iterator[str]:
    for name, row in sorted(rows.items()):
        apart = [(kind, cell, v) for kind, cell, v in row.verdicts if v.n_apart]
        if not apart:
            continue
        where = "; ".join(
            f"{draft_type}: {', '.join(cell for kind, cell, _ in apart if kind == draft_type)}"
            for draft_type in row.cells
            if any(kind == draft_type for kind, _, _ in apart)
        )
        n_apart, n = (sum(getattr(v, key) for _, _, v in apart) for key in ("n_apart", "n"))
        ways = "; ".join(dict.fromkeys(v.reason for *_, v in apart if v.reason))
        gap = max(v.gap for *_, v in apart)
        yield f"| {name} | {where} | {n_apart} of {n} | {gap:.2g} | {ways} |"


_FILE = re.compile(r"(?<=')[^']*\.gguf(?=')")


def _sentences(rows: Mapping[str, Row], kind: str) -> Iterator[str]:
    """Yields the reasons of a kind of verdict, each with its models."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, row in sorted(rows.items()):
        said = {
            (draft_type, _FILE.sub("…", cell.reason))
            for draft_type, _, cell in row.verdicts
            if cell.kind == kind
        }
        for key in sorted(said):
            names.setdefault(key, []).append(name)
    for (draft_type, reason), who in names.items():
        sentence = reason.replace("|", "\\|")
        yield f"| {', '.join(who)} | {draft_type} | {sentence} |"


def proven_module(names: Iterable[str], version: str) -> str:
    """Returns the text of the engine's module `proven`.

    Args:
        names: Of the architectures.
        version: Of llama.cpp.
    """
    lines = [
        f'"""The architectures that `make archs` has proven with llama.cpp {version}; it wrote this'
        ' file."""',
        "",
        "from __future__ import annotations",
        "",
        "from typing import Final",
        "",
        '__all__ = ["PROVEN"]',
        "",
        "PROVEN: Final = frozenset(",
        "    {",
        *(f'        "{name}",' for name in names),
        "    }",
        ")",
        '"""Architectures, by `general.architecture` of a GGUF file, whose models give'
        " llama-server's tokens:",
        'alone, in a crowd, from reused prefixes, preempted, saved, and with drafts."""',
        "",
    ]
    return "\n".join(lines)
