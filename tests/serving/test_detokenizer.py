"""Tokens to text: whole characters, stop texts held back, the same however tokens are split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse_server.serving.detokenizer import Detokenizer


def one_byte(token: int) -> bytes:
    """Tokens below 256 are bytes; others are control tokens, which are not rendered."""
    return bytes([token]) if token < 256 else b""


def make(*stops: str) -> Detokenizer:
    return Detokenizer(one_byte, stops)


def test_a_character_is_written_when_it_is_whole() -> None:
    detokenizer = make()
    smile = "😀".encode()
    assert [detokenizer.feed([byte]).text for byte in smile] == ["", "", "", "😀"]
    assert detokenizer.finish() == ""


def test_an_incomplete_character_becomes_a_replacement_at_the_end_only() -> None:
    detokenizer = make()
    assert detokenizer.feed(b"a" + "é".encode()[:1]).text == "a"
    assert detokenizer.finish() == "\ufffd"


def test_what_replaces_a_character_that_was_cut_off_completes_no_stop() -> None:
    for is_cut_off, text, matched in ((False, "", "a\ufffd"), (True, "a\ufffd", "")):
        detokenizer = make("a\ufffd")
        assert detokenizer.feed(b"a" + "é".encode()[:1]).text == ""
        assert detokenizer.finish(is_cut_off=is_cut_off) == text
        assert detokenizer.matched_stop == matched


def test_invalid_bytes_become_replacements_and_the_stream_goes_on() -> None:
    detokenizer = make()
    assert detokenizer.feed(b"a\xff\xfeb").text == "a\ufffd\ufffdb"
    assert detokenizer.feed(b"\xc3(").text == "\ufffd("


def test_control_tokens_are_not_rendered() -> None:
    text = make().feed([104, 300, 105])
    assert (text.text, text.n_tokens) == ("hi", 3)


def test_a_stop_text_across_tokens_is_never_seen() -> None:
    detokenizer = make("###")
    assert detokenizer.feed(b"ab#").text == "ab"
    assert detokenizer.feed(b"#").text == ""
    end = detokenizer.feed(b"#tail")
    assert (end.text, end.n_tokens) == ("", 1)
    assert detokenizer.matched_stop == "###"
    assert detokenizer.finish() == ""


def test_nothing_is_taken_after_a_stop() -> None:
    detokenizer = make("x")
    assert detokenizer.feed(b"axb").text == "a"
    after = detokenizer.feed(b"more")
    assert (after.text, after.n_tokens, detokenizer.matched_stop) == ("", 0, "x")


def test_what_was_held_back_is_written_when_it_was_no_stop() -> None:
    detokenizer = make("aab")
    assert detokenizer.feed(b"aa").text == ""
    assert detokenizer.feed(b"a").text == "a"
    assert detokenizer.feed(b"c").text == "aac"
    assert detokenizer.feed(b"a").text == ""
    assert detokenizer.finish() == "a"


@pytest.mark.parametrize(
    ("stops", "output", "text", "matched"),
    [
        (("bc", "abcd"), b"xabcde", "xa", "bc"),  # complete first
        (("bc", "abc"), b"xabcde", "x", "abc"),  # complete together: the longer
        (("é",), "caféx".encode(), "caf", "é"),
        (("\n\n", "END"), b"a\nb\n\nEND", "a\nb", "\n\n"),
    ],
)
def test_the_stop_that_is_complete_first_ends_the_text(
    stops: tuple[str, ...], output: bytes, text: str, matched: str
) -> None:
    detokenizer = make(*stops)
    assert (detokenizer.feed(output).text, detokenizer.matched_stop) == (text, matched)


def expected(output: bytes, stops: list[str]) -> str:
    """What a reader who sees the whole output would cut out of it."""
    text = output.decode("utf-8", "replace")
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


@given(
    output=st.one_of(st.text("ab€").map(str.encode), st.binary(max_size=20)),
    stops=st.lists(st.text("ab€", min_size=1, max_size=4), max_size=4),
    data=st.data(),
)
def test_any_split_gives_the_same_text(
    output: bytes, stops: list[str], data: st.DataObject
) -> None:
    detokenizer = make(*stops)
    written, rest = "", output
    while rest:
        n = data.draw(st.integers(1, len(rest)))
        written += detokenizer.feed(rest[:n]).text
        assert not any(stop in written for stop in stops)
        rest = rest[n:]
    assert written + detokenizer.finish() == expected(output, stops)


class Plain:
    """The search as it would be written first: every stop text is looked for after every token."""

    def __init__(self, stops: list[str]) -> None:
        self.stops = stops
        self.held = self.matched = ""

    def push(self, text: str) -> str:
        text = self.held + text
        ends = [(i + len(s), i, s) for s in self.stops if (i := text.find(s)) >= 0]
        if ends:
            _, start, self.matched = min(ends)
            self.held = ""
            return text[:start]
        lengths = range(len(text) + 1)
        n = max(n for n in lengths if any(s.startswith(text[len(text) - n :]) for s in self.stops))
        self.held = text[len(text) - n :]
        return text[: len(text) - n]


@given(
    pieces=st.lists(st.text("abc", max_size=8), max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=16),
)
def test_each_piece_gives_what_the_plain_search_gives(pieces: list[str], stops: list[str]) -> None:
    detokenizer, plain = Detokenizer(lambda i: pieces[i].encode(), stops), Plain(stops)
    for i, piece in enumerate(pieces):
        assert detokenizer.feed([i]).text == plain.push(piece)
        assert detokenizer.matched_stop == plain.matched
        if plain.matched:
            break
    assert detokenizer.finish() == plain.held


class Counting(dict[tuple[int, str], int]):
    """Counts how often it is asked."""

    n = 0

    def get(self, key: object, default: object = None) -> object:  # type: ignore[override]  # counts look-ups
        self.n += 1
        return super().get(key, default)  # type: ignore[call-overload]  # counts look-ups


@pytest.mark.parametrize("text", ["a" * 120, "ab" * 60, "x" * 120])
def test_a_token_is_looked_at_once_however_many_stops_there_are(text: str) -> None:
    """Twice a character at most, on the whole; before, 16 times its length for each."""
    stops = ["a" * 200 + "b" * i + "c" for i in range(16)]
    detokenizer = make(*stops)
    search = detokenizer._search
    assert search is not None
    search._next = counting = Counting(search._next)
    for _ in range(50):
        detokenizer.feed(text.encode())
    assert counting.n <= 2 * 50 * len(text)
