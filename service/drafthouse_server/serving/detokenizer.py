"""Turns a stream of tokens into a stream of text.

Whole characters only, nothing past a stop text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Detokenizer", "Text"]


# Not frozen: one is made per message, and a frozen one takes three times as long.
@dataclass(slots=True)
class Text:
    """Text that a few tokens have added."""

    text: str
    """New text, whole characters; empty while a character or a possible stop text is incomplete."""
    n_tokens: int = 0
    """Tokens taken: all, or those up to and with the one that completed the stop text."""


class _StopSearch:
    """Looks for several texts at once in a text that comes in pieces, each character once.

    The automaton of Aho and Corasick ("Efficient string matching", 1975): a node is a beginning of
    some stop text, and the node after a character is the longest beginning that the text ends with.
    It is made once, in time linear in the stop texts.

    Args:
        stops: None of them empty.
    """

    __slots__ = ("_depths", "_fallbacks", "_first", "_next", "_node", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: dict[tuple[int, str], int] = {}
        self._depths = [0]
        self._fallbacks = [0]
        self._stops: dict[int, str] = {}
        self._node = 0
        for stop in stops:
            self._stops[self._add(stop)] = stop
        self._first = frozenset(stop[0] for stop in stops)
        self._link()

    def _add(self, stop: str) -> int:
        node = 0
        for char in stop:
            after = self._next.get((node, char))
            if after is None:
                after = self._next[node, char] = len(self._depths)
                self._depths.append(self._depths[node] + 1)
                self._fallbacks.append(0)
            node = after
        return node

    def _link(self) -> None:
        """Finds for each node the longest other one that it ends with, shorter nodes first."""
        for (node, char), after in sorted(self._next.items(), key=lambda x: self._depths[x[1]]):
            if node:
                fallback = self._fallbacks[after] = self._after(self._fallbacks[node], char)
                if fallback in self._stops:
                    self._stops.setdefault(after, self._stops[fallback])

    def _after(self, node: int, char: str) -> int:
        while (after := self._next.get((node, char))) is None:
            if not node:
                return 0
            node = self._fallbacks[node]
        return after

    @property
    def n_held(self) -> int:
        """Characters at the end of the text that some stop text begins with."""
        return self._depths[self._node]

    def find(self, text: str) -> tuple[str, int]:
        """Takes the next piece of the text.

        Returns:
            The stop text that is complete first, the longest of several, and how far the piece is
            taken with its end; an empty text where there is none.
        """
        node = self._node
        if not node and self._first.isdisjoint(text):
            return "", len(text)
        for i, char in enumerate(text, 1):
            node = self._after(node, char)
            if node in self._stops:
                return self._stops[node], i
        self._node = node
        return "", len(text)


class Detokenizer:
    """Decodes one sequence's output.

    The text does not depend on how the tokens were split into calls.

    Args:
        token_bytes: Returns the bytes of a token; no bytes for a control token.
        stops: Stop texts, none of them empty.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stops: Sequence[str] = ()) -> None:
        assert all(stops), "a stop text is never empty"
        self._token_bytes = token_bytes
        self._search = _StopSearch(stops) if stops else None
        self._held = ""
        self.matched_stop = ""
        """The stop text that ended the stream; empty while it goes on. It is in no `Text`."""
        # Keeps the bytes of an incomplete character; invalid bytes become U+FFFD.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Iterable[int]) -> Text:
        """Takes the next tokens and returns the text that is certain by now.

        After a stop text nothing more is taken.
        """
        if self._search is None:
            pieces = [self._token_bytes(token) for token in tokens]
            return Text(self._decoder.decode(b"".join(pieces)), len(pieces))
        texts: list[str] = []
        n_tokens = 0
        for token in tokens:
            if self.matched_stop:
                break
            n_tokens += 1
            texts.append(self._push(self._decoder.decode(self._token_bytes(token))))
        return Text("".join(texts), n_tokens)

    def finish(self, *, is_cut_off: bool = False) -> str:
        """Ends the stream and returns what was held back.

        An incomplete character becomes U+FFFD.

        Args:
            is_cut_off: Whether the output would have gone on: that U+FFFD then completes no stop
                text.
        """
        if self.matched_stop:
            return ""
        rest = self._decoder.decode(b"", final=True)
        text = self._held + rest if is_cut_off else self._push(rest) + self._held
        self._held = ""
        return text

    def _push(self, text: str) -> str:
        """Returns what of held and new text can no longer be part of a stop text."""
        if not text or self._search is None:
            return text
        stop, n_taken = self._search.find(text)
        text = self._held + text[:n_taken]
        if stop:
            self.matched_stop = stop
            self._held = ""
            return text[: len(text) - len(stop)]
        n_shown = len(text) - self._search.n_held
        self._held = text[n_shown:]
        return text[:n_shown]
