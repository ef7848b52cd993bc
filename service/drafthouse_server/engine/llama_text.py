"""A model's vocabulary, chat template and samplers: all that work on texts needs of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Protocol

from drafthouse_server.errors import FieldViolation, InvalidRequest
from drafthouse_server.step import SamplingOptions

# The fake engine, and all tests that use it, work without the extension.
with contextlib.suppress(ImportError):  # load_engine says so
    import drafthouse_engine

__all__ = ["LlamaText"]

_SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingOptions))


class _Template(Protocol):
    """`drafthouse_engine`'s chat template, as an open one offers itself."""

    def format(
        self, roles: Sequence[str], contents: Sequence[str], add_generation_prompt: bool
    ) -> str:
        """Returns messages in the template's format."""
        ...


class LlamaText:
    """Texts of one model: `TextModel` over `drafthouse_engine`.

    Args:
        model: With weights, or its vocabulary alone.
        template: Its chat template, which runs here; or why there is none, where no chats are
            formatted.

    Thread:
        Any, several at once; `format_chat` one at a time.
    """

    def __init__(
        self, model: drafthouse_engine.Model, template: _Template | str = "is not run here"
    ) -> None:
        self._model = model
        self._template = template
        self._eog = frozenset(model.eos_token_ids)
        self._token_bytes: dict[int, bytes] = {}

    @classmethod
    def open(cls, path: str) -> LlamaText:
        """Loads a model's vocabulary, and its template to be run in this process.

        Raises:
            drafthouse_engine.EngineError: it cannot be loaded.
        """
        model = drafthouse_engine.Model(path, vocab_only=True)
        try:
            return cls(model, model.open_template())
        except (drafthouse_engine.BadTemplate, drafthouse_engine.Unsupported) as error:
            return cls(model, error.message)  # it has texts all the same

    @property
    def n_vocab(self) -> int:
        """Token ids are [0, n_vocab)."""
        n: int = self._model.n_vocab
        return n

    def make_sampler(self, options: SamplingOptions) -> object:
        """Makes a sampler for one sequence and compiles its grammar.

        Raises:
            InvalidRequest: an option is out of its range, or the grammar cannot be parsed
                (INVALID_FIELD).
        """
        values = {name: getattr(options, name) for name in _SAMPLING_FIELDS}
        try:
            params = drafthouse_engine.SamplingParams(**values)
            return drafthouse_engine.Sampler(self._model, params)
        except drafthouse_engine.BadGrammar as error:
            raise _invalid("grammar", error) from error
        except drafthouse_engine.InvalidConfig as error:
            raise _invalid(error.field, error) from error
        except drafthouse_engine.InvalidArgument as error:
            raise _invalid("sampling", error) from error

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Returns the token ids of a text.

        Raises:
            InvalidRequest: the model's file has no tokenizer (INVALID_FIELD).
        """
        try:
            tokens: list[int] = self._model.tokenize(
                text, add_special=add_special, parse_special=parse_special
            ).tolist()
        except drafthouse_engine.Unsupported as error:
            raise _invalid("text", error) from error
        return tokens

    def token_bytes(self, token: int, *, special: bool) -> bytes:
        """Returns the bytes of one token; not always whole characters."""
        if special:
            return self._model.token_bytes(token, special=True)
        piece = self._token_bytes.get(token)
        if piece is None:
            piece = self._token_bytes[token] = self._model.token_bytes(token)
        return piece

    def is_eog(self, token: int) -> bool:
        """Returns whether the token ends a generation."""
        return token in self._eog

    def format_chat(self, messages: Sequence[tuple[str, str]]) -> str:
        """Returns the messages (role, content) in the model's chat format.

        Raises:
            InvalidRequest: the model has no template, or it fails on these messages
                (INVALID_FIELD).
        """
        if isinstance(self._template, str):
            raise InvalidRequest([FieldViolation("messages", self._template)])
        roles = [role for role, _ in messages]
        contents = [content for _, content in messages]
        try:
            return self._template.format(roles, contents, add_generation_prompt=True)
        except (drafthouse_engine.BadTemplate, drafthouse_engine.InvalidArgument) as error:
            raise _invalid("messages", error) from error


def _invalid(path: str, error: drafthouse_engine.EngineError) -> InvalidRequest:
    return InvalidRequest([FieldViolation(path, error.message)])
