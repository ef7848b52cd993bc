"""What JSON texts are made of, as languages: strings, numbers, lists, and text inside a string."""

from __future__ import annotations

import functools
from typing import Final

from drafthouse_engine.errors import BadConstraint
from drafthouse_engine.gbnf import (
    EMPTY,
    GRAMMAR_BYTES_MAX,
    Alt,
    Chars,
    Node,
    Ref,
    Repeat,
    Rules,
    Seq,
    chars_of,
    complement,
    literal,
    optional,
)
from drafthouse_engine.regex import Regex

__all__ = [
    "CHAR",
    "COLON",
    "COMMA",
    "INTEGER",
    "NUMBER",
    "listed",
    "mapped",
    "other_than",
    "quoted",
    "separated",
    "words",
]

N_RULES_MAX: Final = GRAMMAR_BYTES_MAX // 16  # more, of names, never fit a grammar

_SPECIAL = chars_of([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F)])
_PLAIN = complement(_SPECIAL)
_ESCAPES: Final = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}
_ESCAPED: Final = {
    code: literal(_ESCAPES.get(code, f"\\u{code:04x}"))
    for low, high in _SPECIAL.ranges
    for code in range(low, high + 1)
}
_ALL_BUT_NUL: Final = [code for code in _ESCAPED if code]
_ANY_ESCAPED: Final = Alt(tuple(_ESCAPED[code] for code in _ALL_BUT_NUL))
_QUOTE = literal('"')
_SPACE = Alt(
    (EMPTY, literal(" "), Seq((literal("\n"), Repeat(chars_of([(9, 9), (32, 32)]), 0, 20))))
)


def mapped(node: Node) -> Node:
    """Returns how a language of texts is written inside a JSON string."""
    match node:
        case Chars(ranges):
            return _mapped_chars(ranges)
        case Seq(items):
            return Seq(tuple(mapped(item) for item in items))
        case Alt(items):
            return Alt(tuple(mapped(item) for item in items))
        case Repeat(item, n_min, n_max):
            return Repeat(mapped(item), n_min, n_max)
    return node


def _mapped_chars(ranges: tuple[tuple[int, int], ...]) -> Node:
    overlaps = [
        (max(a, c), min(b, d))
        for a, b in ranges
        for c, d in _PLAIN.ranges
        if max(a, c) <= min(b, d)
    ]
    found: list[Node] = [chars_of(overlaps)] if overlaps else []
    special = [code for code in _ESCAPED if any(a <= code <= b for a, b in ranges)]
    if special == _ALL_BUT_NUL:
        found.append(_ANY_ESCAPED)  # one node for all, so that it is written once
    else:
        found += [_ESCAPED[code] for code in special]
    if not found:
        raise BadConstraint("a set of characters has nothing that JSON can hold")
    return found[0] if len(found) == 1 else Alt(tuple(found))


CHAR: Final = _mapped_chars(((1, 0x10FFFF),))
"""One character of a string, NUL excepted, written in one way."""


def quoted(content: Node) -> Node:
    """Returns a string with that inside."""
    return Seq((_QUOTE, content, _QUOTE))


def listed(items: list[Node], opening: str, closing: str) -> Node:
    """Returns what stands between brackets, with white space inside them."""
    return Seq((literal(opening), _SPACE, *items, _SPACE, literal(closing)))


COMMA: Final = Seq((literal(","), _SPACE))
"""A comma and the white space behind it."""
COLON: Final = Seq((literal(":"), _SPACE))
"""A colon and the white space behind it."""
INTEGER: Final = Seq((optional(literal("-")), Regex("0|[1-9][0-9]{0,15}").parse()))
"""An integer of at most 16 digits."""
NUMBER: Final = Regex(r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][+\-]?[0-9]{1,2})?").parse()
"""A number of at most 16 digits on each side of the point."""


def words(text: str) -> tuple[Node, ...]:
    """Returns the words of a text, each as a language."""
    return tuple(literal(word) for word in text.split())


def separated(item: Node, n_min: int, n_max: int | None) -> Node:
    """Returns one item, and n more after commas; give a reference to an item that nests."""
    return Seq((item, Repeat(Seq((COMMA, item)), n_min, n_max)))


def other_than(names: list[str], rules: Rules) -> Node:
    """Returns the inside of a string that is none of the names.

    Each character is written in one way.

    Args:
        names: what it is not.
        rules: gets a rule for each beginning that names have, so that long names nest no tree.

    Raises:
        BadConstraint: there are too many beginnings.
    """
    root = _new_rule(rules)
    waiting = [(root, names)]
    while waiting:
        ref, rests = waiting.pop()
        firsts = sorted({rest[0] for rest in rests if rest})
        branches = [_begun_otherwise("".join(firsts))]
        if "" not in rests:
            branches.append(EMPTY)
        for first in firsts:
            inner = _new_rule(rules)
            branches.append(Seq((_mapped_chars(((ord(first), ord(first)),)), inner)))
            waiting.append((inner, [rest[1:] for rest in rests if rest[:1] == first]))
        rules[ref.name] = Alt(tuple(branches))
    return root


@functools.lru_cache(maxsize=1024)
def _begun_otherwise(firsts: str) -> Node:
    """The inside of a string that begins with none of the characters, and is not empty."""
    other = complement(chars_of([(0, 0), *((ord(c), ord(c)) for c in firsts)]))
    return Seq((_mapped_chars(other.ranges), Repeat(CHAR, 0, None)))


def _new_rule(rules: Rules) -> Ref:
    if len(rules) >= N_RULES_MAX:
        raise BadConstraint("the names of properties are too many or too long together")
    ref = Ref(f"o{len(rules)}")
    rules[ref.name] = EMPTY  # written soon
    return ref
