"""What clients may ask for: typed parameters, and the rules of their fields. Plain values.

A front (gRPC, HTTP) makes these values of what it received, and `RequestRules` checks them, all
violations at once. Fields are named by their path in the protos; another front maps the paths.
"""

from __future__ import annotations

import itertools
import math
from collections import abc
from dataclasses import dataclass, field

from drafthouse_server import template_kwargs
from drafthouse_server.errors import FieldViolation, InvalidRequest
from drafthouse_server.step import EngineLimits, ModelCard, SamplingOptions

__all__ = [
    "KNOBS",
    "MODE_OFF",
    "N_VIOLATIONS_MAX",
    "PROMPT_TOKENS",
    "TEMPLATE_KWARGS",
    "Bound",
    "ChatMessage",
    "Generation",
    "GenerationRequest",
    "Knob",
    "Prompt",
    "Range",
    "RequestRules",
    "Violations",
    "field_bounds",
    "located",
]

_BYTES_PER_TOKEN_MAX = 32
"""A text with more bytes per token of context than this is refused before it is tokenised."""

_N_MODEL_BYTES_MAX = 256
_N_END_USER_BYTES_MAX = 64
_N_MESSAGE_BYTES = 16
"""On the wire of a chat message, without its texts: tags and lengths."""
_N_GRAMMAR_BYTES_MAX = 65536
_N_LOGIT_BIAS_MAX = 1024
_N_BREAKERS_MAX, _N_BREAKER_BYTES_MAX = 32, 64
_N_STOPS_MAX, _N_STOP_BYTES_MAX, _N_STOP_TOKENS_MAX = 16, 256, 64
_N_SPARE = 64
"""Elements beyond those allowed of which a list is still read: `Bound.n_spare`."""
_TEMPERATURE_LEAST = 1e-5
"""A temperature below this one, as of vLLM, is 0: divided by much less, logits are infinite."""
_LOGIT_BIAS_FORBIDS = -100.0
_DRY_MULTIPLIER_DEFAULT = 0.8

N_VIOLATIONS_MAX = 16
"""Fields of one request that are told to be wrong; beyond them none is looked for."""

PROMPT_TOKENS = "prompt.tokens.ids"
"""Where a request's own token ids stand."""
TEMPLATE_KWARGS = "prompt.chat.chat_template_kwargs"
"""Where the arguments of a chat's template stand."""

MODE_OFF = "off"
"""Value of `GenerationRequest.mode` that means: no drafts."""


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a field may have."""

    low: float
    """Smallest one."""
    high: float = math.inf
    """Largest one; infinity itself is never allowed."""
    is_open: bool = False
    """Whether `low` itself is not allowed."""

    def __contains__(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        return self.low <= value <= self.high and not (self.is_open and value == self.low)

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{'>' if self.is_open else '>='} {self.low:g}"
        return f"in {'(' if self.is_open else '['}{self.low:.10g}, {self.high:.10g}]"


@dataclass(frozen=True, slots=True)
class Knob:
    """A sampling option that is a number."""

    path: str
    """Path of the field in a request."""
    name: str
    """Name of the option in `SamplingOptions`, and in the engine."""
    rule: Range
    """The numbers that it may have."""


KNOBS = (
    Knob("sampling.temperature", "temperature", Range(0, 10)),
    Knob("sampling.top_k", "top_k", Range(0)),
    Knob("sampling.top_p", "top_p", Range(0, 1, is_open=True)),
    Knob("sampling.min_p", "min_p", Range(0, 1)),
    Knob("sampling.typical_p", "typical_p", Range(0, 1, is_open=True)),
    Knob("sampling.top_n_sigma", "top_n_sigma", Range(0, is_open=True)),
    Knob("sampling.seed", "seed", Range(0, 4294967294)),
    Knob("sampling.penalties.last_tokens", "penalty_last_n", Range(-1, 65536)),
    Knob("sampling.penalties.repeat", "penalty_repeat", Range(0.001, 10)),
    Knob("sampling.penalties.frequency", "penalty_frequency", Range(-10, 10)),
    Knob("sampling.penalties.presence", "penalty_presence", Range(-10, 10)),
    Knob("sampling.dry.multiplier", "dry_multiplier", Range(0, 100)),
    Knob("sampling.dry.base", "dry_base", Range(1, 10)),
    Knob("sampling.dry.allowed_tokens", "dry_allowed_length", Range(0, 1024)),
    Knob("sampling.dry.last_tokens", "dry_penalty_last_n", Range(-1, 65536)),
    Knob("sampling.xtc.probability", "xtc_probability", Range(0, 1)),
    Knob("sampling.xtc.threshold", "xtc_threshold", Range(0, 1)),
)
"""All of them; each optional."""

_PATHS = {knob.name: knob.path for knob in KNOBS} | {
    "grammar": "sampling.grammar",
    "logit_bias": "sampling.logit_bias",
    "dry_breakers": "sampling.dry.breakers",
    "ignore_eos": "stop.ignore_end_token",
    "logprobs": "output.log_probabilities",
    "text": "prompt.text",
    "messages": "prompt.chat",
    "chat_template_kwargs": TEMPLATE_KWARGS,
}
"""Where a request says what the engine calls by these names."""


def _path_of(name: str) -> str:
    """Returns where a request says what the engine calls by a name."""
    return f"prompt.chat.{name}" if name.startswith("messages[") else _PATHS.get(name, name)


@dataclass(frozen=True, slots=True)
class Bound:
    """How much a field may hold: what can be said of it before it is read."""

    n_max: int = 1
    """Elements of a list."""
    n_bytes_max: int | None = None
    """Bytes of a text, or of each in a list of texts; None where it is no text."""
    n_bytes_min: int = 0
    """Minimum that an error names beside the maximum."""
    n_bytes_in_all: int | None = None
    """Bytes on the wire of the field, with all elements; None: so many as those may have."""
    n_spare: int = 0
    """More elements that are read: the rules refuse them, with all else that is wrong."""

    @property
    def n_read(self) -> int:
        """Elements of a list that are read."""
        return self.n_max + self.n_spare


def field_bounds(n_context: int, n_messages_max: int) -> abc.Mapping[str, Bound]:
    """Returns the bounds of the lists and texts of every request, by their paths.

    Args:
        n_context: Most tokens of one request, prompt and output together.
        n_messages_max: Most messages of a chat.
    """
    n_text = _BYTES_PER_TOKEN_MAX * n_context
    n_messages = min(n_messages_max, n_context)
    n_bytes_of_chat = n_text + _N_MESSAGE_BYTES * (n_messages + _N_SPARE)
    return {
        "model": Bound(n_bytes_max=_N_MODEL_BYTES_MAX),
        "key_id": Bound(n_bytes_max=_N_MODEL_BYTES_MAX),
        "page_token": Bound(n_bytes_max=_N_MODEL_BYTES_MAX),
        "service": Bound(n_bytes_max=_N_MODEL_BYTES_MAX),
        "end_user": Bound(n_bytes_max=_N_END_USER_BYTES_MAX),
        "text": Bound(n_bytes_max=n_text),
        "token_ids": Bound(n_context),
        "prompt.text": Bound(n_bytes_max=n_text),
        PROMPT_TOKENS: Bound(n_context),
        "prompt.chat.messages": Bound(n_messages, n_bytes_in_all=n_bytes_of_chat, n_spare=_N_SPARE),
        "prompt.chat.messages.role": Bound(n_bytes_max=n_text),
        "prompt.chat.messages.content": Bound(n_bytes_max=n_text),
        TEMPLATE_KWARGS: Bound(n_bytes_max=template_kwargs.N_BYTES_MAX),
        "sampling.logit_bias": Bound(_N_LOGIT_BIAS_MAX, n_spare=_N_SPARE),
        "sampling.dry.breakers": Bound(_N_BREAKERS_MAX, _N_BREAKER_BYTES_MAX, 1, n_spare=_N_SPARE),
        "sampling.grammar": Bound(n_bytes_max=_N_GRAMMAR_BYTES_MAX),
        "stop.sequences": Bound(_N_STOPS_MAX, _N_STOP_BYTES_MAX, 1, n_spare=_N_SPARE),
        "stop.token_ids": Bound(_N_STOP_TOKENS_MAX, n_spare=_N_SPARE),
    }


def located(error: InvalidRequest) -> InvalidRequest:
    """Returns an error of the engine, which knows its own names alone, with paths of a request."""
    return InvalidRequest(
        [
            FieldViolation(_path_of(violation.field), violation.description)
            for violation in error.violations
        ]
    )


class Violations:
    """Collects the fields of a request that break their rules: clients learn of them at once.

    Of `N_VIOLATIONS_MAX` at most: a request of a thousand wrong fields costs no more.
    """

    def __init__(self) -> None:
        self._violations: list[FieldViolation] = []

    @property
    def is_full(self) -> bool:
        """Whether no more of them are noted, so that no more need be looked for."""
        return len(self._violations) >= N_VIOLATIONS_MAX

    def refuse(self, path: str, description: str) -> None:
        """Notes a violation."""
        if not self.is_full:
            self._violations.append(FieldViolation(path, description))

    def check(self, path: str, value: float, rule: Range) -> bool:
        """Returns whether a number keeps its rule, and notes it otherwise."""
        if value in rule:
            return True
        self.refuse(path, f"must be {rule}, is {_told(value, rule)}")
        return False

    def check_count(self, path: str, n: int, n_max: int) -> None:
        """Checks the length of a list."""
        if n > n_max:
            self.refuse(path, f"must have at most {n_max} entries, has {n}")

    def check_bytes(self, path: str, text: str, n_max: int, n_min: int = 0) -> None:
        """Checks the length of a text in UTF-8."""
        n = len(text.encode())
        if not n_min <= n <= n_max:
            allowed = f"{n_min} to {n_max}" if n_min else f"at most {n_max}"
            self.refuse(path, f"must have {allowed} bytes, has {n}")

    def check_no_nul(self, path: str, text: str) -> None:
        """Checks a text that the engine is given: there it would end at a NUL character."""
        before, nul, _ = text.partition("\0")
        if nul:
            at = len(before.encode())
            self.refuse(path, f"must not have a NUL character, has one at byte {at}")

    def check_tokens(self, path: str, token_ids: abc.Sequence[int], n_vocab: int) -> None:
        """Checks token ids."""
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < n_vocab):
            return
        for i, token in enumerate(token_ids):
            if not 0 <= token < n_vocab:
                self.refuse(f"{path}[{i}]", f"must be in [0, {n_vocab}), is {token}")
                if self.is_full:
                    return

    def close(self) -> None:
        """Ends the check.

        Raises:
            InvalidRequest: a field breaks its rule (INVALID_FIELD).
        """
        if self._violations:
            raise InvalidRequest(self._violations)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat."""

    role: str
    """Speaker, such as "system", "user" or "assistant"."""
    content: str
    """Text of the message."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to go on from: exactly one of the three."""

    text: str | None = None
    """A text, to be tokenised."""
    tokens: abc.Sequence[int] | None = None
    """Token ids."""
    messages: abc.Collection[ChatMessage] | None = None
    """A chat, to be formatted by the model's template."""
    chat_template_kwargs: str = ""
    """Arguments of the template, a JSON object; a text worker reads it. Empty: none."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A generation as a client asks for it; nothing is checked."""

    prompt: Prompt
    """Prompt to continue."""
    knobs: abc.Mapping[str, float] = field(default_factory=dict)
    """Sampling options that were given, by their name in `KNOBS`."""
    has_dry: bool = False
    """Whether anything of DRY was given: then it is on."""
    dry_breakers: abc.Sequence[str] = ()
    """Texts at which DRY stops looking back; empty is the engine's default."""
    logit_bias: abc.Collection[tuple[int, float]] = ()
    """Token ids and what is added to their logits; -100 forbids."""
    grammar: str = ""
    """GBNF that the output has to follow; empty is none."""
    ignore_eos: bool = False
    """Whether the model's end token ends nothing."""
    has_logprobs: bool = False
    """Whether log-probabilities are wanted."""
    has_progress: bool = False
    """Whether the client wants to know how much of the prompt is computed."""
    stops: abc.Sequence[str] = ()
    """Texts that end it."""
    stop_token_ids: abc.Sequence[int] = ()
    """Tokens that end it."""
    n_output_max: int | None = None
    """Most tokens to generate; None is until the context is full."""
    mode: str | None = None
    """How to draft: as the server does, or `MODE_OFF`; None leaves it to the server."""
    n_draft: int | None = None
    """Most draft tokens; None leaves it to the server."""
    priority: int = 0
    """Among the tenant's own."""
    end_user: str = ""
    """For whom the tenant asks; empty where it does not say."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation that was checked."""

    sampling: SamplingOptions
    """How tokens are chosen."""
    stops: tuple[str, ...]
    """Texts that end it."""
    stop_token_ids: frozenset[int]
    """Tokens that end it."""
    n_output_max: int | None
    """Most tokens to generate; None is until the context is full."""
    mode: str
    """How tokens are drafted, or `MODE_OFF`."""
    n_draft: int | None
    """K; None is the server's default."""
    priority: int
    """Among the tenant's own."""
    has_progress: bool
    """Whether it wants to know how much of the prompt is computed."""


class RequestRules:
    """The rules of all fields, for one model.

    Args:
        card: The model.
        limits: What its engine can carry.
        mode: How the server drafts, by the name that clients know; `MODE_OFF` if it does not.
        n_draft_default: K when a request does not say.
        n_messages_max: Most messages of a chat.
    """

    def __init__(
        self,
        card: ModelCard,
        limits: EngineLimits,
        mode: str,
        n_draft_default: int,
        n_messages_max: int = 1024,
    ) -> None:
        self._card = card
        self._limits = limits
        self._mode = mode
        self._n_draft_default = n_draft_default
        self._n_context = min(limits.n_ctx_seq, limits.n_ctx)
        # Each takes a token at least.
        self._n_messages_max = min(n_messages_max, self._n_context)

    def check_model_name(self, model: str) -> None:
        """Checks the name of a model, whether or not there is one.

        Raises:
            InvalidRequest: no model has such a name (INVALID_FIELD).
        """
        violations = Violations()
        violations.check_bytes("model", model, _N_MODEL_BYTES_MAX)
        violations.close()

    def check_end_user(self, end_user: str) -> None:
        """Checks the name of an end user.

        Raises:
            InvalidRequest: it is too long (INVALID_FIELD).
        """
        violations = Violations()
        violations.check_bytes("end_user", end_user, _N_END_USER_BYTES_MAX)
        violations.close()

    def check_prompt(self, prompt: Prompt) -> None:
        """Checks a prompt as far as this goes without tokenising it.

        Raises:
            InvalidRequest: names all fields that break their rules (INVALID_FIELD).
        """
        violations = Violations()
        self._check_prompt(violations, prompt)
        violations.close()

    def check_tokens(self, path: str, tokens: abc.Sequence[int]) -> None:
        """Checks token ids.

        Raises:
            InvalidRequest: names those that are none of the vocabulary's (INVALID_FIELD).
        """
        violations = Violations()
        violations.check_tokens(path, tokens, self._card.n_vocab)
        violations.close()

    @property
    def n_text_bytes_max(self) -> int:
        """Most bytes of a text, of a chat, and of the text that token ids are turned into."""
        return _BYTES_PER_TOKEN_MAX * self._n_context

    def check_text(self, path: str, text: str) -> None:
        """Checks the length of a text; it may be empty.

        Raises:
            InvalidRequest: it is longer than any prompt may be (INVALID_FIELD).
        """
        violations = Violations()
        self._check_text(violations, path, [text])
        violations.close()

    def check_token_ids(self, tokens: abc.Sequence[int]) -> None:
        """Checks the token ids of a request for their text, their number first.

        Raises:
            InvalidRequest: there are more than the context has, or some are none of the
                vocabulary's, which it names (INVALID_FIELD).
        """
        violations = Violations()
        violations.check_count("token_ids", len(tokens), self._n_context)
        violations.close()
        self.check_tokens("token_ids", tokens)

    def check(self, request: GenerationRequest) -> Generation:
        """Checks every field of a request but the number of its tokens.

        Raises:
            InvalidRequest: names all fields that break their rules (INVALID_FIELD).
        """
        violations = Violations()
        self._check_prompt(violations, request.prompt)
        sampling = self._check_sampling(violations, request)
        mode, n_draft = self._check_speculation(violations, request)
        self._check_stop(violations, request)
        violations.check("priority", request.priority, Range(-100, 100))
        if request.n_output_max is not None:
            violations.check("max_output_tokens", request.n_output_max, Range(1))
        violations.close()
        return Generation(
            sampling=sampling,
            stops=tuple(request.stops),
            stop_token_ids=frozenset(request.stop_token_ids),
            n_output_max=request.n_output_max,
            mode=mode,
            n_draft=n_draft,
            priority=request.priority,
            has_progress=request.has_progress,
        )

    def _check_prompt(self, violations: Violations, prompt: Prompt) -> None:
        if prompt.tokens is not None:
            if not prompt.tokens:
                violations.refuse(PROMPT_TOKENS, "must not be empty")
            violations.check_tokens(PROMPT_TOKENS, prompt.tokens, self._card.n_vocab)
        elif prompt.text is not None:
            self._check_text(violations, "prompt.text", [prompt.text])
            if not prompt.text:
                violations.refuse("prompt.text", "must not be empty")
        elif prompt.messages is not None:
            self._check_chat(violations, prompt.messages)
            n_max = template_kwargs.N_BYTES_MAX
            violations.check_bytes(TEMPLATE_KWARGS, prompt.chat_template_kwargs, n_max)
        else:
            violations.refuse("prompt", "is required: text, tokens or chat")

    def _check_chat(self, violations: Violations, messages: abc.Collection[ChatMessage]) -> None:
        if not self._card.has_chat_template:
            violations.refuse("prompt.chat", "this model has no chat template")
        if not messages:
            violations.refuse("prompt.chat.messages", "must not be empty")
        # Of more than are allowed, none is read.
        violations.check_count("prompt.chat.messages", len(messages), self._n_messages_max)
        if len(messages) > self._n_messages_max:
            return
        for i, message in enumerate(messages):
            if violations.is_full:
                return
            _check_message(violations, f"prompt.chat.messages[{i}]", message)
        texts = [text for message in messages for text in (message.role, message.content)]
        self._check_text(violations, "prompt.chat", texts)

    def _check_text(self, violations: Violations, path: str, texts: abc.Sequence[str]) -> None:
        n_bytes_max = self.n_text_bytes_max
        n_bytes = sum(len(text.encode()) for text in texts)
        if n_bytes > n_bytes_max:
            violations.refuse(path, f"must have at most {n_bytes_max} bytes, has {n_bytes}")

    def _check_sampling(
        self, violations: Violations, request: GenerationRequest
    ) -> SamplingOptions:
        options: dict[str, object] = {}
        for knob in KNOBS:
            value = request.knobs.get(knob.name)
            if value is not None:
                violations.check(knob.path, value, knob.rule)
                options[knob.name] = value
        if request.knobs.get("temperature", 1.0) < _TEMPERATURE_LEAST:
            options["temperature"] = 0.0
        if request.has_dry:
            options.setdefault("dry_multiplier", _DRY_MULTIPLIER_DEFAULT)
            options["dry_breakers"] = _check_breakers(violations, request.dry_breakers)
        violations.check_bytes("sampling.grammar", request.grammar, _N_GRAMMAR_BYTES_MAX)
        violations.check_no_nul("sampling.grammar", request.grammar)
        return SamplingOptions(
            **options,  # type: ignore[arg-type]  # by the names of KNOBS, which a test compares
            logit_bias=self._check_logit_bias(violations, request.logit_bias),
            grammar=request.grammar,
            ignore_eos=request.ignore_eos,
            logprobs=request.has_logprobs,
        )

    def _check_logit_bias(
        self, violations: Violations, biases: abc.Collection[tuple[int, float]]
    ) -> tuple[tuple[int, float], ...]:
        violations.check_count("sampling.logit_bias", len(biases), _N_LOGIT_BIAS_MAX)
        pairs = []
        for i, (token, bias) in enumerate(itertools.islice(biases, _N_LOGIT_BIAS_MAX)):
            if violations.is_full:
                break
            path = f"sampling.logit_bias[{i}]"
            violations.check(f"{path}.token_id", token, Range(0, self._card.n_vocab - 1))
            violations.check(f"{path}.bias", bias, Range(-100, 100))
            pairs.append((token, -math.inf if bias == _LOGIT_BIAS_FORBIDS else bias))
        return tuple(pairs)

    def _check_speculation(
        self, violations: Violations, request: GenerationRequest
    ) -> tuple[str, int | None]:
        """Returns the mode and K; None is the server's default."""
        mode, n_draft = request.mode, request.n_draft
        if mode not in (None, MODE_OFF, self._mode):
            offered = " or ".join(dict.fromkeys((self._mode, MODE_OFF)))
            violations.refuse("speculation.mode", f"must be {offered} on this server, is {mode}")
        if mode == MODE_OFF:  # whatever else is said of drafts
            n_draft = 0
        if n_draft is not None:
            rule = Range(0, self._limits.n_draft_max)
            violations.check("speculation.max_draft_tokens", n_draft, rule)
        is_off = (self._n_draft_default if n_draft is None else n_draft) == 0
        return MODE_OFF if is_off else self._mode, n_draft

    def _check_stop(self, violations: Violations, request: GenerationRequest) -> None:
        if request.ignore_eos and request.grammar:
            rule = "must not be set with a grammar, whose end allows the end token alone"
            violations.refuse("stop.ignore_end_token", rule)
        violations.check_count("stop.sequences", len(request.stops), _N_STOPS_MAX)
        for i, text in enumerate(request.stops[:_N_STOPS_MAX]):
            violations.check_bytes(f"stop.sequences[{i}]", text, _N_STOP_BYTES_MAX, n_min=1)
        tokens = request.stop_token_ids
        violations.check_count("stop.token_ids", len(tokens), _N_STOP_TOKENS_MAX)
        if len(tokens) <= _N_STOP_TOKENS_MAX:
            violations.check_tokens("stop.token_ids", tokens, self._card.n_vocab)


def _check_breakers(violations: Violations, breakers: abc.Sequence[str]) -> tuple[str, ...] | None:
    violations.check_count("sampling.dry.breakers", len(breakers), _N_BREAKERS_MAX)
    for i, breaker in enumerate(breakers[:_N_BREAKERS_MAX]):
        path = f"sampling.dry.breakers[{i}]"
        violations.check_bytes(path, breaker, _N_BREAKER_BYTES_MAX, n_min=1)
        violations.check_no_nul(path, breaker)
    return tuple(breakers) or None


def _check_message(violations: Violations, path: str, message: ChatMessage) -> None:
    if not message.role:
        violations.refuse(f"{path}.role", "must not be empty")
    violations.check_no_nul(f"{path}.role", message.role)
    violations.check_no_nul(f"{path}.content", message.content)


def _told(value: float, rule: Range) -> str:
    """Returns a number that breaks a rule: an integer whole, others so that the breach shows."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.9g}" if float(f"{value:g}") in rule else f"{value:g}"
