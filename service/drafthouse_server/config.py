"""The server's settings.

Defaults < TOML file < environment (`DRAFTHOUSE_*`) < command-line flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import ipaddress
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthouse_server.errors import ConfigError, UnknownSetting

__all__ = [
    "AUTOMATIC",
    "DRAFT_POLICIES",
    "DRAFT_TYPES",
    "Config",
    "add_flags",
    "bare_host",
    "describe",
    "is_loopback",
    "load",
]

DRAFT_TYPES = (
    "none",
    "mtp",
    "eagle3",
    "simple",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
    "dflash",
    "dspark",
)
"""How drafts can be made."""

AUTOMATIC = "auto"
"""The draft type that fits the models."""

DRAFT_POLICIES = ("adaptive", "fixed")
"""How K is chosen."""

_LOG_LEVELS = ("debug", "info", "warning", "error")
_ENVIRONMENT_PREFIX = "DRAFTHOUSE_"
# Read by the build, its tests and the client, not by the server.
_FOREIGN_VARIABLES = frozenset(
    {
        "DRAFTHOUSE_API_KEY",
        "DRAFTHOUSE_BUILD",
        "DRAFTHOUSE_CACHE",
        "DRAFTHOUSE_CPU_KERNELS",
        "DRAFTHOUSE_DEV",
        "DRAFTHOUSE_FUZZ_MODELS",
        "DRAFTHOUSE_LLAMA_CPP",
        "DRAFTHOUSE_PINNED",
        "DRAFTHOUSE_PORTABLE",
        "DRAFTHOUSE_PYTHON",
        "DRAFTHOUSE_SANITIZE",
    }
)
_DRAFT_TYPES_WITH_FILE = frozenset({"eagle3", "simple", "dflash", "dspark"})

_TYPE_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a setting may be."""

    expected: str
    """The rule in words."""
    is_valid: Callable[[Any], bool]
    """The rule."""


def _between(low: float, high: float) -> _Rule:
    return _Rule(f"a value in [{low}, {high}]", lambda value: low <= value <= high)


def _one_of(choices: tuple[str, ...]) -> _Rule:
    return _Rule(f"one of {', '.join(choices)}", lambda value: value in choices)


_ANY = _Rule("anything", lambda _: True)
_NOT_EMPTY = _Rule("a text that is not empty", bool)
_UNIX = "unix:"
_HOST = _Rule("an address, a name, or unix:PATH", lambda host: host not in ("", _UNIX))


def _are_api_keys(keys: tuple[str, ...]) -> bool:
    parts = [entry.partition(":") for entry in keys]
    secrets = [secret for _, _, secret in parts]
    return all(name and secret for name, _, secret in parts) and len(set(secrets)) == len(secrets)


_API_KEYS = _Rule('entries of the form "tenant:key", every key once', _are_api_keys)


def _are_rates(texts: tuple[str, ...]) -> bool:
    try:
        rates = [float(text) for text in texts]
    except ValueError:
        return False
    return all(0 <= rate <= before for rate, before in zip(rates, [1.0, *rates], strict=False))


_RATES = _Rule("numbers in [0, 1] that never rise", _are_rates)


def _setting(default: object, rule: _Rule, about: str) -> Any:  # noqa: ANN401  # as `field` does
    """Returns a dataclass field that carries its rule and its documentation."""
    return dataclasses.field(default=default, metadata={"rule": rule, "about": about})


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of a server, checked. `describe` lists them with their documentation.

    Raises:
        ConfigError: a value breaks its rule; names key, value and expectation.
    """

    model: str = _setting(
        "models/tiny-mimo2-f16.gguf", _NOT_EMPTY, "Path of the target model, a GGUF file."
    )
    """Path of the target model."""
    draft_type: str = _setting(
        "auto",
        _one_of((AUTOMATIC, *DRAFT_TYPES)),
        "How drafts are made. auto: by draft_model as its architecture says; without one by the"
        " model's MTP heads, or not at all where it has none. eagle3, simple, dflash and dspark"
        " need draft_model.",
    )
    """How drafts are made; the engine's limits tell what `auto` has found."""
    draft_model: str = _setting(
        "",
        _ANY,
        "Path of the draft model, a GGUF file; only for draft types auto, eagle3, simple, dflash,"
        " dspark.",
    )
    """Path of the draft model; empty when the draft type needs none."""
    name: str = _setting("", _ANY, "Name that requests use. Empty: the model's file name.")
    """Name that requests use; see `model_name`."""
    host: str = _setting(
        "127.0.0.1",
        _HOST,
        "Address to listen at; 0.0.0.0 is every IPv4 interface, unix:PATH a socket of this machine."
        " Beyond loopback it needs api_keys, or insecure_no_auth.",
    )
    """Address to listen at."""
    port: int = _setting(50051, _between(0, 65535), "Port to listen at; 0 takes any free one.")
    """Port to listen at."""
    metrics_port: int = _setting(
        0,
        _between(0, 65535),
        "Port of the same address at which Prometheus finds metrics: HTTP, /metrics, no key."
        " 0: none.",
    )
    """Port of the metrics; 0 is none."""
    n_seq_max: int = _setting(8, _between(1, 256), "Slots: requests that run at once; others wait.")
    """Slots."""
    n_ctx_seq: int = _setting(
        0,
        _between(0, 1 << 20),
        "Most tokens of one request, prompt and output together."
        " 0: the model's training context, at most 4096.",
    )
    """Most tokens of one request; 0 is automatic."""
    n_ctx: int = _setting(
        0,
        _between(0, 1 << 28),
        "KV cells of all slots together; requests reserve theirs before they start."
        " 0: n_seq_max times n_ctx_seq.",
    )
    """KV cells of all slots together; 0 is automatic."""
    n_batch: int = _setting(
        512,
        _between(1, 1 << 16),
        "Most tokens of one step, over all requests; at least n_seq_max."
        " Larger is faster for long prompts and stalls running streams longer.",
    )
    """Token budget of a step."""
    n_ubatch: int = _setting(
        512, _between(1, 1 << 16), "Most tokens of one physical batch; at most n_batch."
    )
    """Physical batch."""
    gap_target_ms: float = _setting(
        0.0,
        _between(0, 60_000),
        "Milliseconds that running streams may wait for their next tokens while prompts are"
        " computed; prompts are cut so that nearly all steps hold it. 0: twice what 99 of 100 steps"
        " take without prompts, and steps of 40 ms at least.",
    )
    """Target of the gap between tokens; 0 is automatic."""
    n_parked_mib_max: int = _setting(
        1024,
        _between(0, 1 << 20),
        "MiB of host memory for requests that had to give up their cells for others; what does not"
        " fit is computed again. 0: none.",
    )
    """Host memory of parked sequences."""
    has_prefix_cache: bool = _setting(
        True,
        _ANY,
        "Keep what was computed for a request until its memory is needed: a later request of the"
        " same tenant that begins with the same tokens goes on from there.",
    )
    """Whether prefixes are reused."""
    n_prefix_mib_max: int = _setting(
        256,
        _between(0, 1 << 20),
        "MiB of host memory for prefixes: those whose slots were needed, and, of recurrent models,"
        " the state near the end of each prompt, from which the next turn of a conversation goes on"
        " whatever became of the answer. 0: none.",
    )
    """Host memory of prefixes."""
    n_draft_max: int = _setting(
        4,
        _between(1, 64),
        "Most draft tokens of one request and step; memory is set aside for them.",
    )
    """Upper bound of K."""
    draft_policy: str = _setting(
        "adaptive",
        _one_of(DRAFT_POLICIES),
        "Who chooses the draft tokens per step when the request does not say. adaptive: what"
        " promises most tokens per second by the acceptance and the costs measured so far, none"
        " included; fixed: n_draft_default.",
    )
    """Who chooses K when the request does not say."""
    n_draft_default: int = _setting(
        3,
        _between(0, 64),
        "Draft tokens per step when the request does not say, with draft_policy fixed. 0: none.",
    )
    """K when the request does not say, of policy fixed."""
    has_ngram_first: bool = _setting(
        False,
        _ANY,
        "Where the last tokens of a request stood before in its prompt or output, draft what"
        " followed them then, as long as that is right at least as often as what draft_type drafts:"
        " for edits of code, summaries, answers with quotations. Needs a draft_type.",
    )
    """Whether drafts are looked up before they are made."""
    n_ngram_min: int = _setting(
        3,
        _between(1, 16),
        "With has_ngram_first: how many last tokens must have stood before. Twice as many are"
        " looked for first.",
    )
    """Shortest n-gram that is looked up."""
    n_ngram_pool_max: int = _setting(
        0,
        _between(0, 1 << 24),
        "With has_ngram_first: tokens of each tenant's finished outputs that its later requests may"
        " draft from, about 0.5 KiB each. No tenant drafts from another's. 0: none.",
    )
    """Most tokens of ended sequences to draft from, of each tenant."""
    p_min: float = _setting(
        0.0, _between(0, 0.999), "Stop drafting below this probability of the drafted token."
    )
    """Least probability of a drafted token."""
    is_probabilistic: bool = _setting(
        True,
        _ANY,
        "At temperatures above 0, sample drafts and verify them by rejection (mtp, simple);"
        " false: draft the likeliest tokens and keep those that the target chooses too."
        " Exact either way.",
    )
    """Whether drafts are sampled."""
    n_threads: int = _setting(
        0,
        _between(0, 1024),
        "Threads of a decode. 0: all cores that affinity and cgroup quota allow; where steps are"
        " short (less than 16 MB of weights per core) and nothing else is left to the rest of the"
        " server, one less in steps of few tokens.",
    )
    """Threads of a decode."""
    n_threads_batch: int = _setting(
        0,
        _between(0, 1024),
        "Threads of a decode of two tokens and more. 0: as n_threads; where that is 0 too, all"
        " cores for prompts and crowds.",
    )
    """Threads of a decode of several tokens."""
    n_gpu_layers: int = _setting(
        -1, _between(-1, 10000), "Layers kept on an accelerator, if there is one. -1: all."
    )
    """Layers kept on an accelerator."""
    is_kv_unified: bool = _setting(
        False,
        _ANY,
        "One pool of KV cells for all slots; false: each slot has cells of its own, n_ctx_seq of"
        " them, and its attention reads no other slot's: faster with many streams.",
    )
    """Whether slots share one pool of cells."""
    has_flash_attention: bool = _setting(
        True, _ANY, "Use flash attention where the model allows it."
    )
    """Whether flash attention is used."""
    n_waiting_max: int = _setting(
        256, _between(1, 1_000_000), "Requests that may wait for a slot, over all tenants."
    )
    """Length of the queue."""
    n_waiting_tenant_max: int = _setting(
        128, _between(1, 1_000_000), "Requests of one tenant that may wait for a slot."
    )
    """Length of one tenant's queue."""
    retry_after_s: float = _setting(
        1.0,
        _between(0.001, 3600),
        "Seconds that a client is told to wait before it asks again, when the queue is full.",
    )
    """Advice to refused clients."""
    drain_timeout_s: float = _setting(
        30.0,
        _between(0, 86400),
        "Seconds that running requests may go on after a SIGTERM, before they are ended.",
    )
    """Bound of a drain."""
    keepalive_time_s: float = _setting(
        60.0, _between(1, 86400), "Seconds between HTTP/2 pings to a silent client."
    )
    """Interval of pings."""
    keepalive_timeout_s: float = _setting(
        20.0, _between(0.1, 3600), "Seconds that a client has to answer a ping."
    )
    """Bound of a ping."""
    max_message_bytes: int = _setting(4 << 20, _between(1024, 1 << 30), "Largest request in bytes.")
    """Largest request."""
    synth_rates: tuple[str, ...] = _setting(
        (),
        _RATES,
        "BENCHMARKS ONLY: accept drafts at random instead of verifying them, so that what is"
        " generated is not the model's output. Entry i is the probability that the first i + 1"
        " draft tokens are all accepted; n_draft_max of them. llama-server: --spec-synth-rates.",
    )
    """Synthetic acceptance; empty is off."""
    api_keys: tuple[str, ...] = _setting(
        (),
        _API_KEYS,
        'Keys that open the server, each as "tenant:key"; a tenant may have several.'
        ' Empty: no key is asked for, everybody is tenant "default", and the server listens on'
        " loopback only.",
    )
    """Keys and their tenants."""
    insecure_no_auth: bool = _setting(
        False,
        _ANY,
        "Listen beyond loopback without api_keys: everybody who reaches the port may use the"
        " server.",
    )
    """Whether everybody may use a server that is reached from elsewhere."""
    log_level: str = _setting("info", _one_of(_LOG_LEVELS), "Least severity that is logged.")
    """Least severity that is logged."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            rule: _Rule = field.metadata["rule"]
            value = getattr(self, field.name)
            if not rule.is_valid(value):
                raise ConfigError(field.name, _shown(field.name, value), rule.expected)
        self._check_together()

    def _check_together(self) -> None:
        """Checks the rules that tie several settings."""
        _require(
            not self.is_open or self.insecure_no_auth,
            "host",
            self.host,
            "a loopback address (127.0.0.1, ::1, localhost, unix:PATH) while api_keys is empty:"
            " everybody who reaches the port could use the server; set api_keys, or"
            " insecure_no_auth to let them",
        )
        _require(
            not (self.metrics_port and self.host.startswith(_UNIX)),
            "metrics_port",
            self.metrics_port,
            "0 while host is a socket of this machine, which has no ports",
        )
        _require(self.n_batch >= self.n_seq_max, "n_batch", self.n_batch, "at least n_seq_max")
        _require(self.n_ubatch <= self.n_batch, "n_ubatch", self.n_ubatch, "at most n_batch")
        _require(
            self.draft_policy != "fixed" or self.n_draft_default <= self.n_draft_max,
            "n_draft_default",
            self.n_draft_default,
            "at most n_draft_max, with draft_policy fixed",
        )
        needs_file = self.draft_type in _DRAFT_TYPES_WITH_FILE
        _require(
            self.draft_type == AUTOMATIC or bool(self.draft_model) == needs_file,
            "draft_model",
            self.draft_model,
            f"{'a path' if needs_file else 'nothing'} with draft_type {self.draft_type!r}",
        )
        _require(
            not self.has_ngram_first or self.draft_type != "none",
            "has_ngram_first",
            self.has_ngram_first,
            "false with draft_type none; ngram-simple looks drafts up without a draft model",
        )
        _require(
            len(self.synth_rates) in {0, 0 if self.draft_type == "none" else self.n_draft_max},
            "synth_rates",
            self.synth_rates,
            "as many rates as n_draft_max, and a draft type",
        )

    @property
    def is_open(self) -> bool:
        """Whether callers from elsewhere need no key."""
        return not (self.api_keys or is_loopback(self.host))

    @property
    def model_name(self) -> str:
        """Name that requests use."""
        return self.name or Path(self.model).stem


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches an address; no other name than localhost is."""
    if host.startswith(_UNIX) or host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(bare_host(host))
    except ValueError:
        return False
    return address.is_loopback


def bare_host(host: str) -> str:
    """Returns an address without the brackets that an IPv6 address may be written in."""
    return host.removeprefix("[").removesuffix("]")


def _require(condition: bool, key: str, value: object, expected: str) -> None:
    if not condition:
        raise ConfigError(key, value, expected)


def _shown(key: str, value: object) -> object:
    """Returns the value as an error may show it: never a key."""
    return "(hidden)" if key == "api_keys" else value


_FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def _kind(name: str) -> type:
    """Returns the type of a setting."""
    return type(_FIELDS[name].default)


def _from_text(name: str, text: str, source: str) -> object:
    """Returns the value that a text, from a flag or the environment, stands for."""
    kind = _kind(name)
    if kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind is bool:
        value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
        if value is None:
            raise ConfigError(name, text, "true or false", source)
        return value
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(name, text, _TYPE_NAMES[kind], source) from None


def _from_toml(name: str, value: object, source: str) -> object:
    """Returns a value of a TOML file in the setting's own type."""
    kind = _kind(name)
    if kind is tuple:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ConfigError(name, _shown(name, value), "a list of texts", source)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(name, value, _TYPE_NAMES[kind], source)
    return value


def _read_file(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            entries = tomllib.load(file)
    except OSError as error:
        raise ConfigError("config", str(path), f"a readable file ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), f"valid TOML ({error})") from None
    source = str(path)
    for name in entries:
        if name not in _FIELDS:
            raise UnknownSetting(name, _similar(name, _FIELDS), source)
    return {name: _from_toml(name, value, source) for name, value in entries.items()}


def _read_environment(environment: Mapping[str, str]) -> dict[str, object]:
    settings: dict[str, object] = {}
    for variable, text in environment.items():
        if not variable.startswith(_ENVIRONMENT_PREFIX) or variable in _FOREIGN_VARIABLES:
            continue
        name = variable.removeprefix(_ENVIRONMENT_PREFIX).lower()
        if name not in _FIELDS and name != "config":
            similar = _similar(name, (*_FIELDS, "config")).upper()
            meant = _ENVIRONMENT_PREFIX + similar if similar else ""
            raise UnknownSetting(variable, meant, "environment")
        source = f"environment variable {variable}"
        if not text.strip(" ,"):  # a list of nothing is empty too
            raise ConfigError(
                name, text, "a value; unset the variable to leave the default", source
            )
        if name != "config":
            settings[name] = _from_text(name, text, source)
    return settings


def _similar(name: str, known: Iterable[str]) -> str:
    """Returns the known name that is most like another one; empty when none is."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), "")


def load(
    path: str | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, str | None] | None = None,
) -> Config:
    """Returns the settings of all sources: defaults < file < environment < flags.

    Args:
        path: A TOML file; without one the variable DRAFTHOUSE_CONFIG names it, or there is none.
        environment: Variables; `os.environ` when not given. A DRAFTHOUSE_* that is empty or no
            setting is an error, but for those that the build and the client read.
        flags: Texts by setting name, as `add_flags` parses them; None stands for a flag not given.
            No keys, and no path, are an error as they are in a variable.

    Raises:
        ConfigError: a source cannot be read, or a value breaks its rule.
    """
    environment = os.environ if environment is None else environment
    variables = _read_environment(environment)
    if path is None:
        path = environment.get(_ENVIRONMENT_PREFIX + "CONFIG")
    elif not path.strip():
        raise ConfigError(
            "config", path, "a path; leave the flag out to read none", "flag --config"
        )
    settings = (_read_file(Path(path)) if path else {}) | variables
    for name, text in (flags or {}).items():
        if text is not None:
            source = f"flag --{name.replace('_', '-')}"
            # As "$KEYS" is where nobody has set it: that must not open the server.
            if name == "api_keys" and not text.strip(" ,"):
                raise ConfigError(name, text, "keys; leave the flag out to set none", source)
            settings[name] = _from_text(name, text, source)
    return Config(**settings)  # type: ignore[arg-type]  # checked one by one above


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one flag per setting: `--n-seq-max` for `n_seq_max`. Not given, a flag is None.

    That of a setting that is true or false may stand alone: true.
    """
    for name, field in _FIELDS.items():
        about: str = field.metadata["about"]
        alone: dict[str, Any] = {"nargs": "?", "const": "true"} if _kind(name) is bool else {}
        # argparse reads % in a help text as a format.
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            metavar="VALUE",
            help=f"{about} Default: {_toml(field.default)}.".replace("%", "%%"),
            **alone,
        )


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return str(value)


def describe() -> str:
    """Returns an example configuration.

    Every setting with its default, documentation and rule, as TOML.
    """
    lines = [
        "# Every setting of Drafthouse with its default. A flag (--n-seq-max) wins over the",
        "# environment (DRAFTHOUSE_N_SEQ_MAX), which wins over this file.",
    ]
    for name, field in _FIELDS.items():
        rule: _Rule = field.metadata["rule"]
        allowed = "" if rule is _ANY else f" Expected: {rule.expected}."
        lines += ["", f"# {field.metadata['about']}{allowed}", f"{name} = {_toml(field.default)}"]
    return "\n".join(lines) + "\n"
