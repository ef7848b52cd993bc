r"""Regular expressions as grammars.

The whole text matches, as with `re.fullmatch`. Understood are literals, `.`, classes with ranges,
negation and `\d \w \s \D \W \S` (ASCII, as with `re.ASCII`), the escapes of `re`, groups,
named groups and `(?:…)`, alternation, the quantifiers `* + ? {m} {m,} {,n} {m,n}` (lazy ones are
read as greedy: the language is the same), and `^`, `\A`, `$`, `\Z` at the ends. All else is
refused: back-references, look-around, inner anchors, `\b`, flags, possessive quantifiers. Lone
surrogates are no characters: no class matches them.

The pattern of a JSON schema (`is_ecma`) is one of ECMA-262's, and is often read as one of Python's,
whose classes are Unicode's there: a character is allowed where it is under both readings, and what
only Python has, or the two read differently, is refused (`\A`, `\Z`, `\a`, `\U`, `{,n}`, a `]` that
begins a class). A named group is `(?<name>…)` there, too.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Final

from drafthouse_engine.errors import BadConstraint
from drafthouse_engine.fields import has_text_problem
from drafthouse_engine.gbnf import (
    EMPTY,
    REPEAT_MAX,
    Alt,
    Chars,
    Node,
    Repeat,
    Seq,
    chars_of,
    complement,
    to_gbnf,
)

__all__ = ["Regex", "regex_grammar"]

N_CHARS_MAX: Final = 8192
DEPTH_MAX: Final = 64

_DIGIT = chars_of([(0x30, 0x39)])
_WORD = chars_of([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_SPACE = chars_of([(0x09, 0x0D), (0x20, 0x20)])
_CLASSES: Final = {
    "d": _DIGIT,
    "w": _WORD,
    "s": _SPACE,
    "D": complement(_DIGIT),
    "W": complement(_WORD),
    "S": complement(_SPACE),
}
# White space, digits and word characters of ECMA-262 or of Python, or of both.
_WIDE_SPACE = chars_of(
    [
        *_SPACE.ranges,
        *((c, c) for c in (0x85, 0xA0, 0x1680, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000, 0xFEFF)),
        *((0x1C, 0x1F), (0x2000, 0x200A)),
    ]
)
_DIGIT_ZEROS: Final = (  # of Unicode 17's decimal digits (Nd); nine more follow each
    "30 660 6F0 7C0 966 9E6 A66 AE6 B66 BE6 C66 CE6 D66 DE6 E50 ED0 F20 1040 1090 17E0 1810 "
    "1946 19D0 1A80 1A90 1B50 1BB0 1C40 1C50 A620 A8D0 A900 A9D0 A9F0 AA50 ABF0 FF10 104A0 "
    "10D30 10D40 11066 110F0 11136 111D0 112F0 11450 114D0 11650 116C0 116D0 116DA 11730 "
    "118E0 11950 11BF0 11C50 11D50 11DA0 11DE0 11F50 16130 16A60 16AC0 16B50 1CCF0 1D7CE "
    "1D7D8 1D7E2 1D7EC 1D7F6 1E140 1E2F0 1E4F0 1E5F1 1E950 1FBF0"
)
_WIDE_DIGIT = chars_of((int(c, 16), int(c, 16) + 9) for c in _DIGIT_ZEROS.split())
_NO_WORDS: Final = (  # ASCII, Latin-1, punctuation, currencies, symbols, pictures; not all
    "0-2F 3A-40 5B-5E 60-60 7B-A9 AB-B1 B4-B4 B6-B8 BB-BB BF-BF D7-D7 F7-F7 2000-206F "
    "20A0-20CF 2190-245F 2500-2775 2794-2BFF 3000-3004 1F300-1FAFF"
)
_NO_WORD = chars_of(
    (int(low, 16), int(high, 16)) for low, _, high in (r.partition("-") for r in _NO_WORDS.split())
)
_NARROW_CLASSES: Final = _CLASSES | {
    "D": complement(_WIDE_DIGIT),
    "W": _NO_WORD,
    "S": complement(_WIDE_SPACE),
}
_WIDE_CLASSES: Final = _CLASSES | {"d": _WIDE_DIGIT, "w": complement(_NO_WORD), "s": _WIDE_SPACE}
_CONTROLS: Final = {"a": 7, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "0": 0}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_DOT = complement(chars_of([(10, 10)]))
_ECMA_DOT = complement(chars_of([(10, 10), (13, 13), (0x2028, 0x2029)]))


def regex_grammar(pattern: str) -> str:
    """Returns the grammar (GBNF) of the texts that a regular expression matches as a whole.

    Args:
        pattern: at most 8,192 characters; see the module for what is understood.

    Raises:
        BadConstraint: the pattern is wrong, too large or too ambiguous, or has a construct that
            no grammar here can say; `where` is its index.

    Thread:
        Any; takes milliseconds, so call it where requests are read, not between two steps.
    """
    try:
        return to_gbnf(Regex(pattern).parse(), where=0)
    except RecursionError:
        raise BadConstraint("the pattern nests too deep", where=0) from None


class Regex:
    r"""One pattern, read from left to right.

    Args:
        pattern: at most 8,192 characters.
        is_ecma: whether the pattern is a JSON schema's, which must hold as ECMA-262 reads it, too.

    Raises:
        BadConstraint: the pattern is too long.
    """

    def __init__(self, pattern: str, *, is_ecma: bool = False) -> None:
        if not isinstance(pattern, str):
            raise TypeError(f"pattern must be str, not {type(pattern).__name__}")
        if len(pattern) > N_CHARS_MAX or has_text_problem(pattern):
            raise BadConstraint(
                f"a pattern is at most {N_CHARS_MAX} characters without NUL and lone surrogates"
            )
        self._pattern = pattern
        self._dot = _ECMA_DOT if is_ecma else _DOT
        self._classes = _NARROW_CLASSES if is_ecma else _CLASSES
        self._negated_classes = _WIDE_CLASSES if is_ecma else _CLASSES
        self._is_ecma = is_ecma
        self._i = 0
        self._depth = 0
        self.is_anchored_start = False
        """Whether it begins with `^` or `\\A`."""
        self.is_anchored_end = False
        """Whether it ends with `$` or `\\Z`."""

    def parse(self) -> Node:
        """Returns the language of the pattern, without its anchors at the ends.

        Raises:
            BadConstraint: the pattern is wrong or not understood.
        """
        for anchor in ("^",) if self._is_ecma else ("^", "\\A"):
            if self._pattern.startswith(anchor):
                self._i = len(anchor)
                self.is_anchored_start = True
        node = self._alternatives()
        if self._i < len(self._pattern):
            raise self._error("unbalanced )")
        return node

    def _error(self, what: str, at: int | None = None) -> BadConstraint:
        where = self._i if at is None else at
        return BadConstraint(f"{what} at index {where} of the pattern", where=where)

    def _peek(self) -> str:
        return self._pattern[self._i : self._i + 1]

    def _take(self, text: str) -> bool:
        if not self._pattern.startswith(text, self._i):
            return False
        self._i += len(text)
        return True

    def _alternatives(self) -> Node:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else Alt(tuple(branches))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            if self._take_end_anchor():
                break
            items.append(self._quantified(self._atom()))
        return Seq(tuple(items)) if items else EMPTY

    def _take_end_anchor(self) -> bool:
        for anchor in ("$",) if self._is_ecma else ("$", "\\Z"):
            if self._pattern.startswith(anchor, self._i):
                if self._i + len(anchor) != len(self._pattern):
                    raise self._error(f"the anchor {anchor} inside the pattern")
                self._i = len(self._pattern)
                self.is_anchored_end = True
                return True
        return False

    def _atom(self) -> Node:
        c = self._peek()
        at = self._i
        if c in "*+?" or self._is_counted():
            raise self._error(f"nothing to repeat with {c}", at)
        self._i += 1
        if c == "(":
            return self._group(at)
        if c == "[":
            return self._class(at)
        if c == ".":
            return self._dot
        if c == "\\":
            return self._escape(at)
        if c == "^":
            raise self._error("the anchor ^ inside the pattern", at)
        return chars_of([(ord(c), ord(c))])

    def _group(self, at: int) -> Node:
        if self._take("?") and not self._take(":"):
            self._group_name(at)
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._error(f"groups more than {DEPTH_MAX} deep", at)
        node = self._alternatives()
        self._depth -= 1
        if not self._take(")"):
            raise self._error("a group without its end", at)
        return node

    def _group_name(self, at: int) -> None:
        is_named = self._take("P<") or (self._is_ecma and self._take("<"))
        end = self._pattern.find(">", self._i)
        if not is_named or end < 0 or not self._pattern[self._i : end].isidentifier():
            kind = self._pattern[at : at + 4]
            raise self._error(f"the group {kind}… (look-around, flags, back-references)", at)
        self._i = end + 1

    def _escape(self, at: int) -> Node:
        c = self._peek()
        if c in self._classes:
            self._i += 1
            return self._classes[c]
        code = self._escape_code(at)
        return chars_of([(code, code)])

    def _escape_code(self, at: int) -> int:
        """The character of an escape, behind its backslash."""
        c = self._peek()
        self._i += 1
        if self._is_ecma and c in ("a", "U"):
            raise self._error(f"the escape \\{c}, which is Python's alone,", at)
        if c in _HEX_DIGITS:
            return self._hex(_HEX_DIGITS[c], at)
        if c == "0" and self._peek() in string.octdigits and self._peek():
            raise self._error("an octal escape", at)
        if c in _CONTROLS:
            return _CONTROLS[c]
        if not c or (c.isascii() and c.isalnum()):
            raise self._error(f"the escape \\{c}", at)
        return ord(c)

    def _hex(self, n_digits: int, at: int) -> int:
        digits = self._pattern[self._i : self._i + n_digits]
        self._i += n_digits
        is_hex = len(digits) == n_digits and set(digits) <= set(string.hexdigits)
        code = int(digits, 16) if is_hex else -1
        if not 0 <= code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self._error("a wrong hexadecimal escape", at)
        return code

    def _class(self, at: int) -> Node:
        is_negated = self._take("^")
        if self._is_ecma and self._peek() == "]":
            raise self._error("a class that begins with ], which is \\] there,", at)
        classes = self._negated_classes if is_negated else self._classes
        ranges: list[tuple[int, int]] = []
        is_first = True
        while is_first or self._peek() != "]":
            if not self._peek():
                raise self._error("a class without its end", at)
            ranges += self._class_item(at, classes)
            is_first = False
        self._i += 1
        chars = complement(chars_of(ranges))
        chars = chars if is_negated else complement(chars)  # without surrogates
        if not chars.ranges:
            raise self._error("a class that no character matches", at)
        return chars

    def _class_item(self, at: int, classes: Mapping[str, Chars]) -> tuple[tuple[int, int], ...]:
        low = self._class_char(classes)
        is_range = self._peek() == "-" and self._pattern[self._i + 1 : self._i + 2] not in ("", "]")
        if not is_range:
            return low.ranges
        self._i += 1
        high = self._class_char(classes)
        first, last = low.ranges[0][0], high.ranges[-1][1]
        if not _is_single(low) or not _is_single(high) or first > last:
            raise self._error("a wrong range in the class", at)
        return ((first, last),)

    def _class_char(self, classes: Mapping[str, Chars]) -> Chars:
        c, at = self._peek(), self._i
        self._i += 1
        if c != "\\":
            return chars_of([(ord(c), ord(c))])
        if self._peek() in classes:
            self._i += 1
            return classes[self._pattern[self._i - 1]]
        if self._take("b"):
            return chars_of([(8, 8)])
        code = self._escape_code(at)
        return chars_of([(code, code)])

    def _quantified(self, node: Node) -> Node:
        at = self._i
        bounds = self._quantifier()
        if bounds is None:
            return node
        if self._take("+"):
            raise self._error("a possessive quantifier", at)
        self._take("?")
        if (self._peek() in ("*", "+", "?") and self._peek()) or self._is_counted():
            raise self._error("a quantifier of a quantifier")
        return Repeat(node, *bounds)

    def _quantifier(self) -> tuple[int, int | None] | None:
        for text, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(text):
                return bounds
        return self._counted() if self._is_counted() else None

    def _is_counted(self) -> bool:
        """Whether `{m,n}` stands here; other braces are literal, as in `re`."""
        end = self._pattern.find("}", self._i)
        inner = self._pattern[self._i + 1 : end] if self._peek() == "{" and end > 0 else ""
        low, comma, high = inner.partition(",")
        digits = set(string.digits)
        return bool(low or comma) and set(low) <= digits and set(high) <= digits

    def _counted(self) -> tuple[int, int | None]:
        at = self._i
        end = self._pattern.find("}", at)
        low, comma, high = self._pattern[at + 1 : end].partition(",")
        self._i = end + 1
        if any(len(n) > 4 or int(n or 0) > REPEAT_MAX for n in (low, high)):
            raise self._error(f"a repetition of more than {REPEAT_MAX:,} times", at)
        if self._is_ecma and not low:
            raise self._error("a repetition without its least count, as in {0,n},", at)
        n_min = int(low or 0)
        n_max = int(high) if high else None if comma else n_min
        if n_max is not None and n_max < n_min:
            raise self._error("a repetition whose bounds are reversed", at)
        return n_min, n_max


def _is_single(chars: Chars) -> bool:
    return len(chars.ranges) == 1 and chars.ranges[0][0] == chars.ranges[0][1]
