"""What a text worker is asked for and what it answers, and both as bytes: plain values alone."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from drafthouse_server.errors import FieldViolation, InvalidRequest
from drafthouse_server.step import SamplingOptions

__all__ = [
    "TextAnswer",
    "TextJob",
    "TextModel",
    "grammar_bytes",
    "perform",
    "read_answer",
    "read_job",
    "write_answer",
    "write_job",
]

_N_HEAD = 4
_IDS = "i"
assert array(_IDS).itemsize == 4, "token ids have 32 bits"

_N_HELD_OF_TOKEN = 48
"""Bytes of a token id that waits: a number of 32, and a place in two lists."""
_N_ELEMENT_BYTES = 8
_N_GRAMMAR_BYTES_MAX = 16 << 20
"""More than a grammar within its bounds takes."""
_SYMBOL = re.compile(
    r""""(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|\{[^}]*\}?|\#[^\n]*|.""", re.DOTALL
)
"""A literal, a class, a repetition, a comment, or any other character of a grammar."""


class TextModel(Protocol):
    """What of a model is needed to work on texts: its vocabulary and its chat template."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Returns the token ids of a text."""
        ...

    def tokenize_chat(
        self, messages: Sequence[tuple[str, str]], chat_template_kwargs: str = ""
    ) -> list[int]:
        """Returns the token ids of messages (role, content) in the model's chat format.

        Ready for the answer. Control tokens that are spelled in contents are text. The arguments of
        the template are a JSON object, or empty.
        """
        ...

    def token_bytes(self, token: int, *, special: bool) -> bytes:
        """Returns the bytes of one token; not always whole characters."""
        ...

    def is_eog(self, token: int) -> bool:
        """Returns whether the token ends a generation."""
        ...

    def make_sampler(self, options: SamplingOptions) -> object:
        """Makes a sampler for one sequence and compiles its grammar."""
        ...


@dataclass(frozen=True, slots=True)
class TextJob:
    """What a text worker is asked for: at most one of text, messages and tokens; and sampling."""

    text: str | None = None
    """To be tokenised."""
    messages: Sequence[tuple[str, str]] | None = None
    """A chat (role, content), to be formatted by the model's template and tokenised."""
    chat_template_kwargs: str = ""
    """With `messages`: arguments of the template, a JSON object; empty is none."""
    tokens: Sequence[int] | None = None
    """Ids of the vocabulary, to be written as text."""
    sampling: SamplingOptions | None = None
    """To be checked: its grammar is compiled, and its DRY breakers are looked up."""
    add_special: bool = True
    """With `text`: add the tokens that begin (and end) a text, where the model wants them."""
    parse_special: bool = False
    """With `text`: read the spelling of control tokens as these tokens."""
    keep_special: bool = False
    """With `tokens`: spell control tokens out; else they are left out."""
    n_bytes_max: int = 1 << 20
    """With `tokens`: maximum bytes of the text."""

    @property
    def n_bytes(self) -> int:
        """Size of all that it carries, in bytes."""
        n = len(self.text.encode()) if self.text is not None else 0
        n += sum(len(part.encode()) for pair in self.messages or () for part in pair)
        n += len(self.chat_template_kwargs.encode())
        n += 4 * len(self.tokens or ())
        if self.sampling is not None:
            breakers = self.sampling.dry_breakers or ()
            n += len(self.sampling.grammar.encode()) + sum(len(text.encode()) for text in breakers)
        return n

    @property
    def path(self) -> str:
        """The field, in the engine's names, that is most likely at fault if nothing says it."""
        if self.messages is not None:
            return "messages"
        if self.text is not None or self.sampling is None:
            return "text" if self.tokens is None else "token_ids"
        return "grammar" if self.sampling.grammar else "dry_breakers"


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """What a text worker has made of a job."""

    tokens: list[int] | None = None
    """Tokens of a text or a chat."""
    text: str = ""
    """Text of token ids; bytes that are no whole character are U+FFFD."""
    cpu_s: float = 0.0
    """Processor time that it took, seconds."""
    problems: tuple[FieldViolation, ...] = ()
    """Why the job could not be done; fields have the engine's names."""
    is_last: bool = False
    """Whether the worker ends after it, since the job has left it no memory."""
    n_grammar_bytes: int = 0
    """Bytes of the job's grammar once it is compiled."""

    @property
    def n_held_bytes(self) -> int:
        """What is held of it while its sequence lives: its tokens, and the compiled grammar."""
        return _N_HELD_OF_TOKEN * len(self.tokens or ()) + self.n_grammar_bytes


def perform(job: TextJob, model: TextModel) -> TextAnswer:
    """Does a job, or says why it cannot be done."""
    try:
        return _perform(job, model)
    except InvalidRequest as error:
        return TextAnswer(problems=error.violations)


def _perform(job: TextJob, model: TextModel) -> TextAnswer:
    tokens = None
    if job.messages is not None:
        tokens = _tokenize_chat(job.messages, job.chat_template_kwargs, model)
    elif job.text is not None:
        tokens = model.tokenize(
            job.text, add_special=job.add_special, parse_special=job.parse_special
        )
    text = _spell(job, job.tokens, model) if job.tokens is not None else ""
    n_grammar_bytes = 0
    if job.sampling is not None:
        model.make_sampler(job.sampling)
        n_grammar_bytes = grammar_bytes(job.sampling.grammar)
    return TextAnswer(tokens, text, n_grammar_bytes=n_grammar_bytes)


def grammar_bytes(text: str) -> int:
    """Returns what a grammar takes when it is compiled, rather too many bytes.

    As the engine bounds its elements: llama.cpp writes every repetition out.
    """
    n_elements, n_symbol = 0, 1
    for match in _SYMBOL.finditer(text):
        symbol = match[0]
        if symbol[0] in '"[':
            n_symbol = max(1, len(symbol) - 2)
            n_elements += n_symbol
        elif symbol[0] == "{":
            n_elements += n_symbol * max(map(int, re.findall(r"[0-9]+", symbol)), default=1)
        elif symbol[0] != "#":
            n_symbol = n_symbol if symbol == " " else 1
            n_elements += 1
    return min(_N_ELEMENT_BYTES * n_elements, _N_GRAMMAR_BYTES_MAX)


def _tokenize_chat(
    messages: Sequence[tuple[str, str]], chat_template_kwargs: str, model: TextModel
) -> list[int]:
    tokens = model.tokenize_chat(messages, chat_template_kwargs)
    # Template and tokenizer may both have written the start token.
    starts_twice = len(tokens) > 1 and tokens[0] == tokens[1]
    if starts_twice and (
        model.is_eog(tokens[0]) or not model.token_bytes(tokens[0], special=False)
    ):
        return tokens[1:]
    return tokens


def _spell(job: TextJob, tokens: Sequence[int], model: TextModel) -> str:
    """Returns the text of tokens; one that would be too long is refused before it is made."""
    pieces: list[bytes] = []
    n_bytes = 0
    for token in tokens:
        piece = model.token_bytes(token, special=job.keep_special)
        pieces.append(piece)
        n_bytes += len(piece)
        if n_bytes > job.n_bytes_max:
            problem = f"must make at most {job.n_bytes_max} bytes of text; ask for fewer at a time"
            raise InvalidRequest([FieldViolation("token_ids", problem)])
    return b"".join(pieces).decode("utf-8", errors="replace")


def write_job(job: TextJob, cpu_s: float) -> bytes:
    """Returns a job as bytes.

    Args:
        job: What is asked for.
        cpu_s: Processor time that it may take, seconds.
    """
    head: dict[str, Any] = {"cpu_s": cpu_s}
    parts: list[bytes] = []
    if job.messages is not None:
        parts = [part.encode() for pair in job.messages for part in pair]
        head["messages"] = list(map(len, parts))
        head["chat_template_kwargs"] = job.chat_template_kwargs
    elif job.text is not None:
        parts = [job.text.encode()]
        head["text"] = [job.add_special, job.parse_special]
    elif job.tokens is not None:
        parts = [_write_ids(job.tokens)]
        head["tokens"] = [job.keep_special, job.n_bytes_max]
    if job.sampling is not None:
        head["sampling"] = {
            field.name: getattr(job.sampling, field.name)
            for field in dataclasses.fields(SamplingOptions)
        }
    return _write(head, parts)


def read_job(content: bytes) -> tuple[TextJob, float]:
    """Returns what `write_job` was given."""
    head, body = _read(content)
    sampling = _read_sampling(head["sampling"]) if "sampling" in head else None
    job = TextJob(sampling=sampling)
    if "messages" in head:
        ends = itertools.accumulate(head["messages"])
        starts = [0, *itertools.accumulate(head["messages"])]
        texts = [str(body[i:j], "utf-8") for i, j in zip(starts, ends, strict=False)]
        pairs = list(zip(texts[::2], texts[1::2], strict=True))
        job = TextJob(
            messages=pairs, chat_template_kwargs=head["chat_template_kwargs"], sampling=sampling
        )
    elif "text" in head:
        add_special, parse_special = head["text"]
        job = TextJob(
            text=str(body, "utf-8"),
            sampling=sampling,
            add_special=add_special,
            parse_special=parse_special,
        )
    elif "tokens" in head:
        keep_special, n_bytes_max = head["tokens"]
        job = TextJob(tokens=_read_ids(body), keep_special=keep_special, n_bytes_max=n_bytes_max)
    return job, float(head["cpu_s"])


def _read_sampling(values: Mapping[str, Any]) -> SamplingOptions:
    given = dict(values)
    given["logit_bias"] = tuple((token, bias) for token, bias in given["logit_bias"])
    if given["dry_breakers"] is not None:
        given["dry_breakers"] = tuple(given["dry_breakers"])
    return SamplingOptions(**given)


def write_answer(answer: TextAnswer) -> bytes:
    """Returns an answer as bytes."""
    head: dict[str, Any] = {"cpu_s": answer.cpu_s}
    if answer.problems:
        head["problems"] = [[problem.field, problem.description] for problem in answer.problems]
    if answer.is_last:
        head["is_last"] = True
    if answer.n_grammar_bytes:
        head["n_grammar_bytes"] = answer.n_grammar_bytes
    if answer.tokens is not None:
        return _write(head | {"has_tokens": True}, [_write_ids(answer.tokens)])
    return _write(head, [answer.text.encode()])


def read_answer(content: bytes, n_vocab: int = 1 << 31) -> TextAnswer:
    """Returns what `write_answer` was given.

    Args:
        content: The bytes.
        n_vocab: Token ids are [0, n_vocab): a worker that its texts have broken may say others.

    Raises:
        ValueError: it is no answer, or one with other ids.
    """
    try:
        head, body = _read(content)
        has_tokens = bool(head.get("has_tokens"))
        if has_tokens and len(body) and np.frombuffer(body, np.uint32).max() >= n_vocab:
            raise ValueError("ids of no vocabulary")
        cpu_s = float(head["cpu_s"])
        if not 0 <= cpu_s < math.inf:
            raise ValueError("a time that is none")
        return TextAnswer(
            tokens=_read_ids(body) if has_tokens else None,
            text="" if has_tokens else str(body, "utf-8"),
            cpu_s=cpu_s,
            problems=tuple(
                FieldViolation(str(field), str(about)) for field, about in head.get("problems", ())
            ),
            is_last=bool(head.get("is_last")),
            n_grammar_bytes=min(max(0, int(head.get("n_grammar_bytes", 0))), _N_GRAMMAR_BYTES_MAX),
        )
    except (KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError("not an answer") from error


def _write(head: Mapping[str, Any], parts: Sequence[bytes]) -> bytes:
    encoded = json.dumps(head).encode()
    return b"".join([len(encoded).to_bytes(_N_HEAD, sys.byteorder), encoded, *parts])


def _read(content: bytes) -> tuple[dict[str, Any], memoryview]:
    view = memoryview(content)
    n = _N_HEAD + int.from_bytes(view[:_N_HEAD], sys.byteorder)
    return json.loads(bytes(view[_N_HEAD:n])), view[n:]


def _write_ids(tokens: Sequence[int]) -> bytes:
    return array(_IDS, tokens).tobytes()


def _read_ids(body: memoryview) -> list[int]:
    ids = array(_IDS)
    ids.frombytes(body)
    return ids.tolist()
