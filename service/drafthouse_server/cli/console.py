"""The commands that talk to a server: generate, chat, models."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import drafthouse
from drafthouse_server.cli.connection import add_connection, connected, exit_code, explain, tell
from drafthouse_server.cli.terminal import Terminal, format_table
from drafthouse_server.errors import ConfigError
from drafthouse_server.host.amounts import format_bytes, format_count
from drafthouse_server.host.ctrl_c import stopping_at_ctrl_c

__all__ = ["Figures", "add_chat", "add_generate", "add_models"]

_DEFAULT_OUTPUT_TOKENS = 256
_INTERRUPTED = 130
_GENERATE_OPTIONS = (
    "model",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "max_draft_tokens",
)

_Commands = argparse._SubParsersAction  # argparse has no public name for it
_Prompt = str | list[drafthouse.ChatMessage]


def add_generate(commands: _Commands[argparse.ArgumentParser]) -> None:
    """Adds the command `generate`."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Sends a prompt to a server and shows the text as it comes; a line of figures"
        " follows on stderr.",
        allow_abbrev=False,
    )
    parser.add_argument("prompt", help='text to continue; "-" reads it from stdin')
    add_connection(parser)
    _add_options(parser)
    parser.set_defaults(run=_generate)


def add_chat(commands: _Commands[argparse.ArgumentParser]) -> None:
    """Adds the command `chat`."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model in its chat format",
        description="Talks to a model in its chat format. /reset forgets the conversation, /quit or"
        " Ctrl-D leaves, Ctrl-C stops an answer. Piped in, every line is one message.",
        allow_abbrev=False,
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument(
        "--chat-template-kwargs",
        type=_json_object,
        metavar="JSON",
        help="arguments of the model's chat template, such as '{\"enable_thinking\": false}'",
    )
    add_connection(parser)
    _add_options(parser)
    parser.set_defaults(run=_chat)


def add_models(commands: _Commands[argparse.ArgumentParser]) -> None:
    """Adds the command `models`."""
    parser = commands.add_parser("models", help="list the models of a server", allow_abbrev=False)
    add_connection(parser)
    parser.set_defaults(run=_models)


def _json_object(text: str) -> dict[str, object]:
    """Returns a JSON object that stands on the command line."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="", help="name of the model; default: the server's")
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        default=_DEFAULT_OUTPUT_TOKENS,
        help="most tokens to generate; 0: until the context is full; default: %(default)s",
    )
    add("--temperature", type=float, metavar="T", help="randomness, 0 to 10; 0: likeliest tokens")
    add("--top-k", type=int, metavar="K", help="keep the K likeliest tokens; 0: off")
    add("--top-p", type=float, metavar="P", help="keep the likeliest tokens that together reach P")
    add("--min-p", type=float, metavar="P", help="drop tokens below this share of the likeliest")
    add("--seed", type=int, metavar="N", help="same seed, same request: same text")
    add("--stop", action="append", metavar="TEXT", help="text that ends the output; repeatable")
    add("--grammar", metavar="FILE", help='GBNF grammar with a rule "root"')
    draft = parser.add_mutually_exclusive_group()
    draft.add_argument(
        "--draft-tokens", type=int, dest="max_draft_tokens", metavar="K", help="drafts per step"
    )
    draft.add_argument("--no-draft", action="store_true", help="no speculation: one token per step")


@dataclass(slots=True)
class Figures:
    """What a generation took, as its client saw it."""

    n_tokens: int = 0
    """Tokens received."""
    first_token_s: float = 0.0
    """From the call to the first token."""
    total_s: float = 0.0
    """From the call to the end."""
    speculation: drafthouse.SpeculationStatistics | None = None
    """How drafts did; None when the generation was left before its end."""

    def __str__(self) -> str:
        if not self.n_tokens:
            return f"no tokens, {self.total_s:.2f} s"
        rate = self.n_tokens / self.total_s if self.total_s > 0 else 0.0
        noun = "token" if self.n_tokens == 1 else "tokens"
        parts = [
            f"{self.n_tokens} {noun}, {rate:,.0f} tokens/s",
            f"first token after {self.first_token_s * 1000:,.1f} ms",
        ]
        counts = self.speculation
        if counts is not None and counts.n_drafted:
            parts.append(
                f"acceptance {counts.acceptance_rate:.1%}"
                f" ({counts.n_accepted} of {counts.n_drafted} drafted)"
            )
        elif counts is not None:
            parts.append("nothing drafted")
        return ", ".join(parts)


class _Generation:
    """One generation on its way to the terminal.

    Args:
        stream: Not yet read.
        terminal: Takes the text.
    """

    def __init__(self, stream: drafthouse.GenerationStream, terminal: Terminal) -> None:
        self._stream = stream
        self._terminal = terminal
        self.figures = Figures()
        self.text = ""

    def show(self) -> bool:
        """Shows the text as it comes.

        Returns:
            Whether it came to its end; False when the user has stopped it.

        Raises:
            drafthouse.DrafthouseError: the call failed.
        """
        started = time.perf_counter()
        try:
            with stopping_at_ctrl_c(self._stream.close) as ctrl_c:
                try:
                    for chunk in self._stream:
                        self._take(chunk, started)
                    self.figures.speculation = self._stream.result().speculation
                except drafthouse.Cancelled:
                    if not ctrl_c.is_pressed:
                        raise
                    return False
        except KeyboardInterrupt:
            return False
        finally:
            self._stream.close()
            self.figures.total_s = time.perf_counter() - started
            if self.text and not self.text.endswith("\n"):
                self._terminal.write("\n")
        return True

    def _take(self, chunk: drafthouse.Chunk, started: float) -> None:
        if chunk.token_ids and not self.figures.n_tokens:
            self.figures.first_token_s = time.perf_counter() - started
        self.figures.n_tokens += len(chunk.token_ids)
        self.text += chunk.text
        self._terminal.write(chunk.text)


def _options(arguments: argparse.Namespace) -> drafthouse.GenerateOptions:
    """Returns the options of a generation. What was not given is the server's default.

    Raises:
        OSError: the grammar cannot be read.
        UnicodeDecodeError: the grammar is no text.
    """
    given = {name: getattr(arguments, name) for name in _GENERATE_OPTIONS}
    options: drafthouse.GenerateOptions = {}
    options.update({name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]  # by the names of the flags
    if arguments.max_tokens:
        options["max_output_tokens"] = arguments.max_tokens
    if arguments.no_draft:
        options["speculation"] = "off"
    if arguments.grammar:
        options["grammar"] = Path(arguments.grammar).read_text(encoding="utf-8")
    return options


def _checked_options(
    arguments: argparse.Namespace, terminal: Terminal
) -> drafthouse.GenerateOptions | None:
    """Returns the options, or None when the grammar cannot be read, which is then told."""
    try:
        return _options(arguments)
    except OSError as error:
        terminal.error(f"cannot read the grammar {arguments.grammar!r}: {error.strerror}")
    except UnicodeDecodeError:
        terminal.error(f"cannot read the grammar {arguments.grammar!r}: it is not UTF-8 text")
    return None


def _generate(arguments: argparse.Namespace, terminal: Terminal) -> int:
    options = _checked_options(arguments, terminal)
    if options is None:
        return 2
    try:
        prompt = terminal.read_all() if arguments.prompt == "-" else arguments.prompt
    except UnicodeDecodeError:
        terminal.error("cannot read the prompt: what is piped in is not UTF-8 text")
        return 2
    try:
        with connected(arguments) as client:
            generation = _Generation(client.generate(prompt, **options), terminal)
            is_whole = generation.show()
    except (drafthouse.DrafthouseError, ConfigError) as error:
        return tell(error, arguments, terminal)
    terminal.note(str(generation.figures))
    return 0 if is_whole else _INTERRUPTED


def _models(arguments: argparse.Namespace, terminal: Terminal) -> int:
    try:
        with connected(arguments) as client:
            models = client.list_models()
    except (drafthouse.DrafthouseError, ConfigError) as error:
        return tell(error, arguments, terminal)
    header = (
        "name",
        "architecture",
        "parameters",
        "size",
        "context",
        "slots",
        "draft",
        "K",
        "chat",
    )
    for line in format_table(header, [_model_cells(model) for model in models]):
        terminal.line(line)
    return 0


def _model_cells(model: drafthouse.Model) -> list[str]:
    is_drafting = model.max_draft_tokens > 0
    return [
        model.name,
        model.architecture,
        format_count(model.parameter_count),
        format_bytes(model.size_bytes),
        str(model.context_tokens),
        str(model.slot_count),
        str(model.speculation_mode) if is_drafting else "none",
        f"{model.default_draft_tokens} (max. {model.max_draft_tokens})" if is_drafting else "–",
        "yes" if model.chat_template else "no",
    ]


def _chat(arguments: argparse.Namespace, terminal: Terminal) -> int:
    options = _checked_options(arguments, terminal)
    if options is None:
        return 2
    options["chat_template_kwargs"] = arguments.chat_template_kwargs
    try:
        with connected(arguments) as client:
            return _Chat(client, options, arguments, terminal).run()
    except (drafthouse.DrafthouseError, ConfigError) as error:
        return tell(error, arguments, terminal)


class _Chat:
    """One conversation.

    Args:
        client: Connected to the server.
        options: Of every answer.
        arguments: Of the command line.
        terminal: Where it takes place.
    """

    def __init__(
        self,
        client: drafthouse.Client,
        options: drafthouse.GenerateOptions,
        arguments: argparse.Namespace,
        terminal: Terminal,
    ) -> None:
        self._client = client
        self._options = options
        self._arguments = arguments
        self._terminal = terminal
        self._messages: list[drafthouse.ChatMessage] = []
        self._reset()

    def run(self) -> int:
        """Runs the conversation and returns the exit code."""
        while True:
            try:
                line = self._terminal.ask("> ").strip()
            except EOFError:
                if self._terminal.is_interactive:
                    self._terminal.line()  # the shell's prompt starts a line of its own
                return 0
            except KeyboardInterrupt:
                self._terminal.line()
                continue
            except UnicodeDecodeError:
                self._terminal.error("cannot read the message: it is not UTF-8 text")
                return 2
            if line == "/quit":
                return 0
            if line == "/reset":
                self._reset()
            elif line.startswith("/"):
                self._terminal.note("commands: /reset, /quit")
            elif line and (code := self._answer(line)) and not self._terminal.is_interactive:
                return code

    def _reset(self) -> None:
        system = self._arguments.system
        self._messages = [drafthouse.ChatMessage("system", system)] if system else []

    def _answer(self, line: str) -> int:
        """Shows the answer to a message; returns the exit code, 0 where there was one."""
        messages = [*self._messages, drafthouse.ChatMessage("user", line)]
        try:
            generation = _Generation(
                self._client.generate(messages, **self._options), self._terminal
            )
            generation.show()
        except drafthouse.DrafthouseError as error:
            self._terminal.error(self._advice(error))
            return exit_code(error)
        # Also of an answer that was stopped: the user has read it.
        self._messages = [*messages, drafthouse.ChatMessage("assistant", generation.text)]
        if self._terminal.is_interactive:
            self._terminal.note(str(generation.figures))
        return 0

    def _advice(self, error: drafthouse.DrafthouseError) -> str:
        text = explain(error, self._arguments)
        return (
            f"{text}; /reset starts anew" if isinstance(error, drafthouse.ContextTooLong) else text
        )
