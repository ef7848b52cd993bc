"""A choice among texts, as a grammar."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final

from drafthouse_engine.errors import BadConstraint
from drafthouse_engine.fields import has_text_problem
from drafthouse_engine.gbnf import Alt, Node, Seq, literal, to_gbnf

__all__ = ["choice_grammar"]

N_TEXTS_MAX: Final = 4096
DEPTH_MAX: Final = 32
N_WAYS_MAX: Final = 1024  # of one rule (spec/grammar.cpp)


def choice_grammar(texts: Iterable[str]) -> str:
    """Returns the grammar (GBNF) of some texts: one of them is generated, as a whole.

    Args:
        texts: at least one, at most 4,096; common beginnings cost once. Behind one beginning they
            go on with at most 1,024 different characters.

    Raises:
        BadConstraint: there are none or too many, one cannot be generated, or all are too long;
            `where` is the index of the text.

    Thread:
        Any; takes milliseconds.
    """
    listed = [texts] if isinstance(texts, str) else list(texts)
    if not 1 <= len(listed) <= N_TEXTS_MAX:
        raise BadConstraint(f"a choice has 1 to {N_TEXTS_MAX} texts, not {len(listed)}")
    for i, text in enumerate(listed):
        if not isinstance(text, str) or has_text_problem(text):
            raise BadConstraint(f"choice {i} is not text that can be generated", where=i)
    return to_gbnf(_tree(sorted(set(listed)), 0))


def _tree(texts: list[str], depth: int) -> Node:
    """The texts by their common beginnings; sorted, each once."""
    shared = _common_start(texts[0], texts[-1])  # sorted: all others lie between
    if len(texts) == 1 or depth >= DEPTH_MAX:
        return Alt(tuple(literal(text) for text in texts))
    rest = [text[len(shared) :] for text in texts]
    groups = [list(group) for _, group in groupby(rest, lambda text: text[:1])]
    if len(groups) > N_WAYS_MAX:
        n = f"{len(groups)} different characters follow one beginning"
        raise BadConstraint(f"{n}; at most {N_WAYS_MAX} can")
    branches = [_tree(group, depth + 1) for group in groups]
    return Seq((literal(shared), Alt(tuple(branches))))


def _common_start(a: str, b: str) -> str:
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:n]
