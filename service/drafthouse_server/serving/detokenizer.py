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
    """What a few tokens added."""

    text: str
    """New text, whole characters; empty while a character or a possible stop text is incomplete."""
    matched_stop: str = ""
    """The stop text that ended the stream; empty while it goes on. It is not part of the text."""
    n_tokens: int = 0
    """Tokens taken: all, or those up to and with the one that completed the stop text."""


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
        self._stops = tuple(stops)
        self._n_held_max = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""
        self._matched_stop = ""
        # Keeps the bytes of an incomplete character; invalid bytes become U+FFFD.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def matched_stop(self) -> str:
        """The stop text that ended the stream; empty while it goes on."""
        return self._matched_stop

    def feed(self, tokens: Iterable[int]) -> Text:
        """Takes the next tokens and returns the text that is certain by now.

        After a stop text nothing more is taken.
        """
        if not self._stops:
            pieces = [self._token_bytes(token) for token in tokens]
            return Text(self._decoder.decode(b"".join(pieces)), n_tokens=len(pieces))
        texts: list[str] = []
        n_tokens = 0
        for token in tokens:
            if self._matched_stop:
                break
            n_tokens += 1
            texts.append(self._push(self._decoder.decode(self._token_bytes(token))))
        return Text("".join(texts), self._matched_stop, n_tokens)

    def finish(self) -> str:
        """Ends the stream and returns what was held back.

        An incomplete character becomes U+FFFD.
        """
        if self._matched_stop:
            return ""
        text = self._push(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _push(self, text: str) -> str:
        """Returns what of held and new text can no longer be part of a stop text."""
        if not text:
            return ""
        text = self._held + text
        stop, start = self._find_stop(text)
        if stop:
            self._matched_stop = stop
            self._held = ""
            return text[:start]
        n_held = self._count_held(text)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def _find_stop(self, text: str) -> tuple[str, int]:
        """Returns the stop text that is complete first (the longest of several) and its start."""
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if not found:
            return "", 0
        _, start, stop = min(found)
        return stop, start

    def _count_held(self, text: str) -> int:
        """Returns the length of the longest end of the text that some stop text starts with."""
        for n_held in range(min(self._n_held_max, len(text)), 0, -1):
            end = text[-n_held:]
            if any(stop.startswith(end) for stop in self._stops):
                return n_held
        return 0
