"""A model's vocabulary, chat template and samplers: all that work on texts needs of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from drafthouse_server import template_kwargs
from drafthouse_server.errors import FieldViolation, InvalidRequest
from drafthouse_server.step import SamplingOptions

# The fake engine, and all tests that use it, work without the extension.
with contextlib.suppress(ImportError):  # load_engine says so
    import drafthouse_engine
    from drafthouse_engine._spec import ChatTemplate

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["LlamaText"]

_SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingOptions))


_Spans = list[tuple[int, int]]


class _Template(Protocol):
    """`drafthouse_engine`'s chat template, as an open one offers itself."""

    def format_marked(
        self, roles: Sequence[str], contents: Sequence[str], add_generation_prompt: bool
    ) -> tuple[bytes, npt.NDArray[np.int64]]:
        """Returns messages in the template's format, and the spans that they brought."""
        ...


_N_TEMPLATES = 8
"""Templates with arguments that are kept open."""
_TOO_LARGE = "the chat template takes more memory than a text worker has"


class LlamaText:
    """Texts of one model: `TextModel` over `drafthouse_engine`.

    Args:
        model: With weights, or its vocabulary alone.
        template: Its chat template, which runs here; or why there is none, where no chats are
            formatted.
        chat_template_kwargs: The template's arguments where a chat does not set them, a JSON
            object; empty is none.

    Thread:
        Any, several at once; `tokenize_chat` one at a time.
    """

    def __init__(
        self,
        model: drafthouse_engine.Model,
        template: _Template | str = "is not run here",
        chat_template_kwargs: str = "",
    ) -> None:
        self._model = model
        self._template = template
        self._defaults = template_kwargs.read(chat_template_kwargs)
        self._templates: dict[str, _Template] = {}
        """Those that were opened behind assignments of arguments, the oldest first."""
        self._eog = frozenset(model.eos_token_ids)
        self._token_bytes: dict[int, bytes] = {}

    @classmethod
    def open(
        cls,
        path: str,
        bound: Callable[[], object] = lambda: None,
        chat_template_kwargs: str = "",
    ) -> LlamaText:
        """Loads a model's vocabulary, and its template to be run in this process.

        Args:
            path: The file.
            bound: Called before the template, which is a program and runs once when it is opened.
            chat_template_kwargs: See the class.

        Raises:
            drafthouse_engine.EngineError: it cannot be loaded.
        """
        model = drafthouse_engine.Model(path, vocab_only=True)
        bound()
        try:
            return cls(model, model.open_template(), chat_template_kwargs)
        except (drafthouse_engine.BadTemplate, drafthouse_engine.Unsupported) as error:
            return cls(model, error.message)  # it has texts all the same
        except (drafthouse_engine.OutOfMemory, MemoryError):
            return cls(model, _TOO_LARGE)

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
            is_seeded = options.seed is not None
            params = drafthouse_engine.SamplingParams(**values, match_only=is_seeded)
            return drafthouse_engine.Sampler(self._model, params)
        except drafthouse_engine.BadGrammar as error:
            raise _invalid("grammar", error) from error
        except drafthouse_engine.InvalidConfig as error:
            problem = error.message.removeprefix(f"SamplingParams.{error.field} ")
            raise InvalidRequest([FieldViolation(error.field, problem)]) from error
        except drafthouse_engine.Unsupported as error:
            raise _invalid("dry_breakers", error) from error
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

    def tokenize_chat(
        self, messages: Sequence[tuple[str, str]], chat_template_kwargs: str = ""
    ) -> list[int]:
        """Returns the token ids of messages (role, content) in the model's chat format.

        Ready for the answer. Control tokens that are spelled in contents are text, and so are those
        in roles that are no words (letters, digits, _ and -). All else is as if the whole text were
        tokenised.

        Args:
            messages: Oldest first.
            chat_template_kwargs: Arguments of the template, a JSON object; empty is none. What they
                do not set, those of the class do.

        Raises:
            InvalidRequest: the model has no template or no tokenizer, the template fails on these
                messages, or it brings contents with control tokens so far out of shape that nobody
                can tell them from its own; or the arguments are none (INVALID_FIELD).
        """
        template = self._with_arguments(chat_template_kwargs)
        text, spans = self._format(messages, template)
        spelled = [i for i, (_, content) in enumerate(messages) if self._has_control(content)]
        if spelled and not self._are_apart(messages, template, text, spans):
            raise InvalidRequest(
                [
                    FieldViolation(
                        f"messages[{i}].content",
                        "must not spell control tokens: this model's chat template changes contents"
                        " so that they would be taken for its own",
                    )
                    for i in spelled
                ]
            )
        try:
            tokens: list[int] = self._model.tokenize_plain(text, spans, add_special=True).tolist()
        except drafthouse_engine.Unsupported as error:
            raise _invalid("messages", error) from error
        return tokens

    def chat_problem(self) -> str:
        """Returns why a chat of one user's message is refused; empty where no template does so."""
        if not self._model.chat_template:
            return ""
        try:
            self.tokenize_chat([("user", "Hello")])
        except InvalidRequest as error:
            return error.violations[0].description
        except (drafthouse_engine.OutOfMemory, MemoryError):
            return _TOO_LARGE
        return ""

    def _with_arguments(self, chat_template_kwargs: str) -> _Template:
        """Returns the template with what a chat sets of its arguments, and with the defaults.

        Raises:
            InvalidRequest: there is no template, or these are no arguments (INVALID_FIELD).
        """
        if isinstance(self._template, str):
            raise InvalidRequest([FieldViolation("messages", self._template)])
        try:
            given = template_kwargs.read(chat_template_kwargs)
            if any(map(self._has_control, template_kwargs.texts_of(given))):
                raise ValueError("must not spell control tokens")
        except ValueError as error:
            raise InvalidRequest([FieldViolation("chat_template_kwargs", str(error))]) from error
        arguments = {**self._defaults, **given}
        if not arguments:
            return self._template
        assignments = template_kwargs.assignments(arguments)
        if assignments not in self._templates:
            while len(self._templates) >= _N_TEMPLATES:
                del self._templates[next(iter(self._templates))]
            self._templates[assignments] = self._open_after(assignments)
        return self._templates[assignments]

    def _open_after(self, assignments: str) -> _Template:
        """Opens the template once more, behind assignments of its arguments.

        Raises:
            InvalidRequest: it cannot be parsed there (INVALID_FIELD).
        """
        model = self._model
        bos, eos = self._spelling(model.token_bos), self._spelling(model.token_eos)
        source = assignments + model.chat_template
        try:
            ends = model.tokenize("x", add_special=True)[-1:].tolist() == [model.token_eos]
            return ChatTemplate(source, bos, eos, model.add_bos, ends)
        except (drafthouse_engine.BadTemplate, drafthouse_engine.Unsupported) as error:
            raise _invalid("chat_template_kwargs", error) from error

    def _spelling(self, token: int) -> str:
        """Returns how a template is told a token; empty where there is none."""
        if token < 0:
            return ""
        spelled = self._model.token_bytes(token, special=True)
        return spelled.decode("utf-8", "replace").partition("\0")[0]

    def _format(
        self, messages: Sequence[tuple[str, str]], template: _Template
    ) -> tuple[bytes, _Spans]:
        """Returns a chat in the model's format as UTF-8, and the spans that messages brought.

        Raises:
            MemoryError: the template takes more than there is.
            InvalidRequest: the template fails on these messages (INVALID_FIELD).
        """
        roles = [role for role, _ in messages]
        contents = [content for _, content in messages]
        try:
            text, spans = template.format_marked(roles, contents, add_generation_prompt=True)
        except (drafthouse_engine.BadTemplate, drafthouse_engine.InvalidArgument) as error:
            if error.message.endswith(": std::bad_alloc"):  # so the interpreter of templates says
                raise MemoryError from error
            raise _invalid("messages", error) from error
        return _repaired(text, [(int(begin), int(end)) for begin, end in spans])

    def _has_control(self, content: str) -> bool:
        return len(self._model.find_control(content)) > 0

    def _are_apart(
        self,
        messages: Sequence[tuple[str, str]],
        template: _Template,
        text: bytes,
        spans: _Spans,
    ) -> bool:
        """Returns whether no control token in a content shows outside the spans.

        They are replaced by letters: that must change nothing there.
        """
        neutral = [(role, self._without_control(content)) for role, content in messages]
        try:
            other_text, other_spans = self._format(neutral, template)
        except InvalidRequest:
            return False
        return _outside(text, spans) == _outside(other_text, other_spans)

    def _without_control(self, content: str) -> str:
        """Returns a content with letters in place of control tokens, as long as before."""
        spelled = bytearray(content.encode())
        for begin, end in self._model.find_control(content):
            spelled[begin:end] = b"x" * (end - begin)
        return spelled.decode()


def _repaired(text: bytes, spans: _Spans) -> tuple[bytes, _Spans]:
    """Returns a text as valid UTF-8, and its spans: a template may cut characters in two."""
    try:
        text.decode()
    except UnicodeDecodeError:
        pieces: list[bytes] = []
        moved: _Spans = []
        at = n = 0
        for begin, end in [*spans, (len(text), len(text))]:
            for is_input, piece in ((False, text[at:begin]), (True, text[begin:end])):
                pieces.append(piece.decode("utf-8", "replace").encode())
                if is_input and pieces[-1]:
                    moved.append((n, n + len(pieces[-1])))
                n += len(pieces[-1])
            at = end
        return b"".join(pieces), moved
    return text, spans


def _outside(text: bytes, spans: _Spans) -> list[bytes]:
    """Returns the pieces of a text that are in none of its spans."""
    begins = [0, *(end for _, end in spans)]
    ends = [*(begin for begin, _ in spans), len(text)]
    return [text[begin:end] for begin, end in zip(begins, ends, strict=True)]


def _invalid(path: str, error: drafthouse_engine.EngineError) -> InvalidRequest:
    return InvalidRequest([FieldViolation(path, error.message)])
