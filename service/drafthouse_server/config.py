"""The server's settings: one declaration each, with name, type, default, rule and help.

The flag (`--parallel`), the environment variable (`DRAFTHOUSE_PARALLEL`), the key of the TOML file
and the attribute of `Config` have one name. Where llama-server or vLLM has that name, it means what
it means there. `cli.settings` reads the sources and writes help, example and reference from what is
declared here.

Why not `pydantic-settings` (tried: 2.16.3 with pydantic 2.14.3): it would replace some 80 lines,
which turn texts and TOML values into types. The rest stays ours, because it ignores a variable that
is no setting, knows no "did you mean", applies no prefix to old names, warns of none, reads a list
from a variable as JSON alone, takes `"3"` in TOML for a number, and its errors name no source and
show what was given, a key too. It brings six packages of 11 MB, one of them compiled, and imports
for 206 ms, where argparse and tomllib take 21.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from drafthouse_server.access import UNIX, are_api_keys, check_access, has_access, is_loopback
from drafthouse_server.administration import AdminSettings, check_admin
from drafthouse_server.devices import DeviceSettings, check_cells, check_devices
from drafthouse_server.errors import ConfigError
from drafthouse_server.front import FrontSettings, check_outbox, check_ports
from drafthouse_server.setting import ANY, AUTO, Rule, Setting, between, declare, layers, one_of
from drafthouse_server.sharing import SharingSettings

__all__ = [
    "AUTOMATIC",
    "DRAFT_POLICIES",
    "DRAFT_TYPES",
    "SETTINGS",
    "Config",
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
_DRAFT_TYPES_WITH_FILE = frozenset({"eagle3", "simple", "dflash", "dspark"})


_NOT_EMPTY = Rule("a text that is not empty", bool)
_HOST = Rule("an address, a name, or unix:PATH", lambda host: host not in ("", UNIX))


_API_KEYS = Rule(
    'entries of the form "tenant:key", every key once; a tenant is 1 to 64 of A-Z a-z 0-9 . _ -,'
    " and a key has no spaces",
    are_api_keys,
)


def _are_rates(texts: tuple[str, ...]) -> bool:
    try:
        rates = [float(text) for text in texts]
    except ValueError:
        return False
    return all(0 <= rate <= before for rate, before in zip(rates, [1.0, *rates], strict=False))


_RATES = Rule("numbers in [0, 1] that never rise", _are_rates)


_model = functools.partial(declare, "Model")
_access = functools.partial(declare, "Address and access")
_slots = functools.partial(declare, "Slots and context")
_steps = functools.partial(declare, "Steps")
_memory = functools.partial(declare, "Prefix cache and preemption")
_drafts = functools.partial(declare, "Drafts")
_compute = functools.partial(declare, "Threads and accelerators")
_load = functools.partial(declare, "Queue and connections")
_other = functools.partial(declare, "Log and benchmarks")


# The last base is the first in `SETTINGS`, and so in help, example and reference.
@dataclass(frozen=True)
class Config(DeviceSettings, SharingSettings, FrontSettings, AdminSettings):
    """All settings of a server, checked.

    Raises:
        ConfigError: a value breaks its rule; names setting, value and expectation.
    """

    model: str = _model(
        "models/tiny-mimo2-f16.gguf",
        _NOT_EMPTY,
        "Path of the model, a GGUF file.",
    )
    """Path of the model."""
    name: str = _model(
        "",
        ANY,
        "Name of the model in requests. Empty: the file name without its ending.",
        peers=("alias", "served_model_name"),
    )
    """Name that requests use; see `model_name`."""
    probe: bool = _model(
        True,
        ANY,
        "Decode a model with split_mode tensor, or of an architecture that was never compared with"
        " llama-server, in a process of its own first: its death is a sentence and exit code 1.",
    )
    """Whether a model of an architecture that is not proven is decoded elsewhere first."""
    host: str = _access(
        "127.0.0.1",
        _HOST,
        "Address to listen at. 0.0.0.0: every IPv4 interface; unix:PATH: a socket of this machine."
        " Beyond loopback the server needs keys and a certificate, or to be told that it has none.",
    )
    """Address to listen at."""
    port: int = _access(50051, between(0, 65535), "Port to listen at. 0: any free port.")
    """Port to listen at."""
    metrics_port: int = _access(
        0,
        between(0, 65535),
        "Port of the Prometheus endpoint (http://METRICS_HOST:PORT/metrics, unauthenticated)."
        " 0 disables it.",
    )
    """Port of the Prometheus endpoint; 0 disables it."""
    api_keys: tuple[str, ...] = _access(
        (),
        _API_KEYS,
        'Keys of the clients, each as "tenant:key"; a tenant may have several. As a flag they are'
        " visible to every user of the machine, as a variable deprecated; use api_keys_file or a"
        " store. Beyond loopback a key has 20 characters or more. Empty, and no ssl_client_ca_file:"
        ' no key is asked for, every client is tenant "default", on loopback only.',
        peers=("api_key",),
        is_secret=True,
    )
    """Keys and their tenants."""
    api_keys_file: str = _access(
        "",
        ANY,
        'Path of a file of keys, one "tenant:key" a line, such as a mounted secret; empty lines'
        " and lines that begin with # are skipped. Instead of api_keys. Empty: no file.",
        peers=("api_key_file",),
    )
    """Path of the file that `api_keys` were read from; empty when they were not."""
    insecure_no_auth: bool = _access(
        False,
        ANY,
        "Listen beyond loopback without keys: whoever reaches the port may use the server.",
    )
    """Whether a server beyond loopback may do without keys."""
    ssl_cert_file: str = _access(
        "",
        ANY,
        "Path of the server's certificate and its chain (PEM); with it, connections are TLS 1.2 or"
        " newer. Read again when it changes. Empty: plain text.",
        peers=("ssl_certfile", "tls_cert_file"),
    )
    """Path of the server's certificate; empty is plain text."""
    ssl_key_file: str = _access(
        "",
        ANY,
        "Path of the private key of ssl_cert_file (PEM, not encrypted). Read again when it"
        " changes.",
        peers=("ssl_keyfile", "tls_key_file"),
    )
    """Path of the private key."""
    ssl_client_ca_file: str = _access(
        "",
        ANY,
        "Path of certificates (PEM) of which one must have signed each client's certificate: mutual"
        " TLS. Whoever it names by a URI spiffe://DOMAIN/drafthouse/tenant/NAME is that tenant and"
        " needs no key. Empty: clients show no certificate.",
        peers=("ssl_ca_certs", "tls_client_ca_file"),
    )
    """Path of the authorities of clients' certificates; empty when clients need none."""
    insecure_no_tls: bool = _access(
        False,
        ANY,
        "Listen beyond loopback without ssl_cert_file: keys and texts can be read on their way."
        " For a server behind a proxy or mesh that encrypts.",
    )
    """Whether a server beyond loopback may do without TLS."""
    parallel: int = _slots(
        8,
        between(1, 256),
        "Slots: requests that run at the same time; others wait.",
        old="n_seq_max",
        peers=("max_num_seqs",),
    )
    """Slots."""
    max_model_len: int = _slots(
        0,
        between(0, 1 << 20),
        "Maximum tokens of one request, prompt and output together. 0: what ctx_size gives a slot;"
        " without it 4096, or with fit more where memory is ample; at most the training context.",
        old="n_ctx_seq",
    )
    """Maximum tokens of one request; 0 is automatic."""
    ctx_size: int = _slots(
        0,
        between(0, 1 << 28),
        "KV cells (tokens) of all slots together. With kv_unified any request may use any of them;"
        " otherwise each slot has ctx_size / parallel. 0: parallel times max_model_len.",
        old="n_ctx",
    )
    """KV cells of all slots together; 0 is automatic."""
    kv_unified: bool = _slots(
        False,
        ANY,
        "One pool of KV cells for all slots. Otherwise each slot has its own, and its attention"
        " reads no other slot's: faster with many streams, and its rounding is its own.",
        old="is_kv_unified",
    )
    """Whether slots share one pool of cells."""
    fit: bool = _slots(
        True,
        ANY,
        "Serve what fits into memory: where ctx_size and max_model_len are not set, fewer slots"
        " (with parallel at its default) or shorter requests; on accelerators fewer layers (with"
        " gpu_layers auto). What was chosen is logged. What can never fit is refused.",
        peers=("fit_params",),
    )
    """Whether sizes that nobody has set are lowered to what fits."""
    batch_size: int = _steps(
        512,
        between(1, 1 << 16),
        "Maximum tokens of one step, over all requests; at its default more, where parallel * (1 +"
        " draft_max) is. Steps are shorter where tokens take long: prompts are cut by time.",
        old="n_batch",
        peers=("max_num_batched_tokens",),
    )
    """Token budget of a step."""
    ubatch_size: int = _steps(
        512,
        between(1, 1 << 16),
        "Maximum tokens of one physical batch; at most batch_size, and at its default no more.",
        old="n_ubatch",
    )
    """Physical batch."""
    gap_target_ms: float = _steps(
        0.0,
        between(0, 60_000),
        "Milliseconds that running streams may wait for their next tokens while prompts are"
        " computed; prompts are cut so that nearly all steps hold it. 0: automatic,"
        " max(40 ms, 2 x the 99th percentile of steps without prompts).",
    )
    """Target of the gap between tokens; 0 is automatic."""
    prefix_cache: bool = _memory(
        True,
        ANY,
        "Keep what was computed for a request until its memory is needed: a later request of the"
        " same tenant that begins with the same tokens continues from there.",
        old="has_prefix_cache",
        peers=("enable_prefix_caching",),
    )
    """Whether prefixes are reused."""
    prefix_cache_mib: int = _memory(
        8192,
        between(0, 1 << 20),
        "MiB of host memory for prefixes whose slots were needed and, for recurrent models, for"
        " checkpoints near the end of each prompt, from which the next turn of a conversation"
        " continues; by default at most half of what is free beside the rest (fit). 0: none.",
        old="n_prefix_mib_max",
        peers=("cache_ram",),
    )
    """Host memory of prefixes."""
    preempted_mib: int = _memory(
        1024,
        between(0, 1 << 20),
        "MiB of host memory for requests that were preempted; what does not fit is"
        " computed again when they resume. 0: none.",
        old="n_parked_mib_max",
        peers=("swap_space",),
    )
    """Host memory of preempted sequences."""
    draft_type: str = _drafts(
        AUTOMATIC,
        one_of(AUTOMATIC, *DRAFT_TYPES),
        "How drafts are made. auto: by model_draft as its architecture says; without one by the"
        " model's MTP heads, or not at all where it has none. eagle3, simple, dflash and dspark"
        " need model_draft.",
        peers=("spec_type",),
    )
    """How drafts are made; the engine's limits tell what `auto` has found."""
    model_draft: str = _drafts(
        "",
        ANY,
        "Path of the draft model, a GGUF file; only for draft types auto, eagle3, simple, dflash,"
        " dspark.",
        old="draft_model",
        peers=("spec_draft_model",),
    )
    """Path of the draft model; empty when the draft type needs none."""
    draft_max: int = _drafts(
        4,
        between(1, 64),
        "Maximum draft tokens (K) of one request and step; memory is set aside for them.",
        old="n_draft_max",
        peers=("spec_draft_n_max", "num_speculative_tokens"),
    )
    """Upper bound of K."""
    draft_policy: str = _drafts(
        "adaptive",
        one_of(*DRAFT_POLICIES),
        "How K is chosen when the request does not say. adaptive: at each step what promises most"
        " tokens per second by the acceptance and the costs measured so far, 0 included; fixed:"
        " draft_default.",
    )
    """Who chooses K when the request does not say."""
    draft_default: int = _drafts(
        3,
        between(0, 64),
        "Draft tokens (K) per step when the request does not say, with draft_policy fixed."
        " 0: none.",
        old="n_draft_default",
    )
    """K when the request does not say, of policy fixed."""
    draft_p_min: float = _drafts(
        0.0,
        between(0, 0.999),
        "Minimum probability of a drafted token; a draft ends before the first one below it.",
        old="p_min",
        peers=("spec_draft_p_min",),
    )
    """Minimum probability of a drafted token."""
    draft_sampling: str = _drafts(
        "probabilistic",
        one_of("probabilistic", "greedy"),
        "How mtp and simple draft at temperatures above 0. probabilistic: sample drafts, and"
        " verify them by rejection, but for requests with a seed; greedy: draft the likeliest"
        " tokens, and keep those that the model samples too. The distribution is the same.",
        old="is_probabilistic",
        old_values={
            "true": "probabilistic",
            "1": "probabilistic",
            "false": "greedy",
            "0": "greedy",
        },
        peers=("spec_draft_sampling",),
    )
    """How drafts are sampled."""
    prompt_lookup: bool = _drafts(
        False,
        ANY,
        "Prompt-lookup decoding: if the last tokens of a request occurred earlier in its prompt or"
        " output, propose what followed. Used only while accepted at least as often as the"
        " drafter. For edits of code, summaries, answers with quotations. Needs a draft_type.",
        old="has_ngram_first",
    )
    """Whether drafts are looked up before they are made."""
    prompt_lookup_min: int = _drafts(
        3,
        between(1, 16),
        "With prompt_lookup: minimum number of last tokens that must have occurred earlier. Twice"
        " as many are looked for first.",
        old="n_ngram_min",
    )
    """Shortest n-gram that is looked up."""
    prompt_lookup_pool: int = _drafts(
        0,
        between(0, 1 << 24),
        "With prompt_lookup: tokens of each tenant's finished outputs that its later requests may"
        " draft from, about 0.5 KiB each. No tenant drafts from another's. 0: none.",
        old="n_ngram_pool_max",
    )
    """Maximum tokens of ended sequences to draft from, of each tenant."""
    threads: int = _compute(
        0,
        between(0, 512),
        "Threads of a decode; fewer while others take cores. 0: all cores that affinity mask and"
        " quota allow; one less for few tokens where steps are short (under 16 MB of weights per"
        " core) and nothing else is left to the rest. Where devices compute all layers, 4 at most.",
        old="n_threads",
    )
    """Threads of a decode, at most."""
    threads_batch: int = _compute(
        0,
        between(0, 512),
        "Threads of a decode of two tokens and more. 0: as threads; where that is 0 too, all"
        " cores for prompts and for many streams.",
        old="n_threads_batch",
    )
    """Threads of a decode of several tokens."""
    gpu_layers: int | str = _compute(
        AUTO,
        layers(10000),
        "Layers kept on an accelerator, if there is one. auto: as many as fit, or all without fit;"
        " all: every layer, whether it fits or not; or a number.",
        old="n_gpu_layers",
        old_values={"-1": AUTO},
    )
    """Layers kept on an accelerator: a number, "auto" (or -1) or "all"."""
    flash_attn: str = _compute(
        "auto",
        one_of("auto", "on", "off"),
        "Flash attention. auto: where model and device allow it; on: do not ask whether they do.",
        old="has_flash_attention",
        old_values={"true": "auto", "1": "auto", "false": "off", "0": "off"},
    )
    """Whether flash attention is used."""
    text_workers: int = _load(
        2,
        between(1, 64),
        "Processes that read what clients send as text: tokenise, format chats, compile grammars."
        " A tenant keeps all but one of them busy, at most. One more is kept ready, and each holds"
        " the model's vocabulary.",
    )
    """Processes that read texts."""
    queue_size: int = _load(
        256,
        between(1, 1_000_000),
        "Requests that may wait for a slot, over all tenants.",
        old="n_waiting_max",
    )
    """Length of the queue."""
    tenant_queue_size: int = _load(
        128,
        between(1, 1_000_000),
        "Requests of one tenant that may wait for a slot.",
        old="n_waiting_tenant_max",
    )
    """Length of one tenant's queue."""
    retry_after_s: float = _load(
        1.0,
        between(0.001, 3600),
        "Seconds that a client is told to wait before it asks again, when the queue is full.",
    )
    """Advice to refused clients."""
    drain_timeout_s: float = _load(
        20.0,
        between(0, 86400),
        "Seconds that running requests may continue after a SIGTERM, before they are ended.",
    )
    """Bound of a drain."""
    keepalive_time_s: float = _load(
        60.0, between(1, 86400), "Seconds between HTTP/2 pings to a silent client."
    )
    """Interval of pings."""
    keepalive_timeout_s: float = _load(
        20.0, between(0.1, 3600), "Seconds that a client has to answer a ping."
    )
    """Bound of a ping."""
    log_level: str = _other("info", one_of(*_LOG_LEVELS), "Minimum severity that is logged.")
    """Minimum severity that is logged."""
    synth_rates: tuple[str, ...] = _other(
        (),
        _RATES,
        "BENCHMARKS ONLY: accept drafts at random instead of verifying them, so that what is"
        " generated is not the model's output. Entry i is the probability that the first i + 1"
        " draft tokens are all accepted; draft_max of them. Empty: off.",
        peers=("spec_synth_rates",),
    )
    """Synthetic acceptance; empty is off."""
    tenants: Mapping[str, Mapping[str, object]] = dataclasses.field(
        default_factory=dict, hash=False
    )
    """Weight and limits by tenant, of the file's sections [tenants.NAME]; `tenancy` checks them."""

    def __post_init__(self) -> None:
        for setting in SETTINGS.values():
            _check_value(setting, getattr(self, setting.name))
        for check in (check_access, check_admin, check_devices, check_outbox, check_ports):
            check(self)
        check_cells(self, self.flash_attn)
        _check_sizes(self)
        _check_drafts(self)

    @property
    def is_open(self) -> bool:
        """Whether clients from elsewhere need no key."""
        return not (has_access(self) or is_loopback(self.host))

    @property
    def is_plain(self) -> bool:
        """Whether what clients from elsewhere send can be read on its way."""
        return not (self.ssl_cert_file or is_loopback(self.host))

    @property
    def model_name(self) -> str:
        """Name that requests use."""
        return self.name or Path(self.model).stem


def _is_inherited(field: dataclasses.Field[Any]) -> bool:
    return field.name not in Config.__annotations__


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        field.name: dataclasses.replace(field.metadata["declared"], name=field.name)
        # What stands in files of its own comes behind what stands here.
        for field in sorted(dataclasses.fields(Config), key=_is_inherited)
        if "declared" in field.metadata
    }
)
"""All settings by name, group by group; but for those of single tenants."""


def _require(condition: bool, key: str, value: object, problem: str) -> None:
    if not condition:
        raise ConfigError(key, value, problem=problem)


def _check_value(setting: Setting, value: object) -> None:
    # No text has the character 0: system calls that get one raise ValueError.
    has_null = isinstance(value, str | tuple) and any("\0" in text for text in value)
    if has_null or not setting.rule.is_valid(value):
        expected = "a text without the character 0" if has_null else setting.rule.expected
        raise ConfigError(setting.name, setting.shown(value), expected)


def _check_sizes(config: Config) -> None:
    _require(
        config.batch_size >= config.parallel,
        "batch_size",
        config.batch_size,
        f"batch_size {config.batch_size} is less than parallel {config.parallel}, and a step has a"
        " token of each slot; raise batch_size or lower parallel",
    )
    _require(
        config.ubatch_size <= config.batch_size
        or config.ubatch_size == SETTINGS["ubatch_size"].default,
        "ubatch_size",
        config.ubatch_size,
        f"ubatch_size is more than batch_size ({config.batch_size}); lower it or raise batch_size",
    )


def _check_drafts(config: Config) -> None:
    _require(
        config.draft_policy != "fixed" or config.draft_default <= config.draft_max,
        "draft_default",
        config.draft_default,
        f"draft_default {config.draft_default} is more than draft_max {config.draft_max}; lower"
        " draft_default or raise draft_max",
    )
    has_file, may_be_found = bool(config.model_draft), config.draft_type == AUTOMATIC
    needs_file = config.draft_type in _DRAFT_TYPES_WITH_FILE
    _require(
        has_file or not needs_file,
        "model_draft",
        config.model_draft,
        f"draft_type {config.draft_type!r} needs model_draft; set it to the path of a draft"
        " model, or choose another draft_type: auto, mtp, ngram-simple, none, …",
    )
    _require(
        needs_file or may_be_found or not has_file,
        "model_draft",
        config.model_draft,
        f"draft_type {config.draft_type!r} takes no model_draft; remove it, or choose auto,"
        f" {', '.join(kind for kind in DRAFT_TYPES if kind in _DRAFT_TYPES_WITH_FILE)}",
    )
    _require(
        not config.prompt_lookup or config.draft_type != "none",
        "prompt_lookup",
        config.prompt_lookup,
        "prompt_lookup needs a drafter, and draft_type is 'none', as set or as found for this"
        " model; set draft_type to ngram-simple, which looks drafts up without a draft model,"
        " or turn prompt_lookup off",
    )
    n_rates = len(config.synth_rates)
    _require(
        n_rates in {0, 0 if config.draft_type == "none" else config.draft_max},
        "synth_rates",
        config.synth_rates,
        f"synth_rates has {n_rates} rates; expected as many as draft_max, {config.draft_max},"
        " and a draft_type that is not 'none', as set or as found for this model",
    )
    _check_draft_places(config)


def _check_draft_places(config: Config) -> None:
    for name in ("device_draft", "gpu_layers_draft", "cpu_moe_draft", "n_cpu_moe_draft"):
        value = getattr(config, name)
        _require(
            bool(config.model_draft) or value == SETTINGS[name].default,
            name,
            value,
            f"{name} is of model_draft, and there is none; remove it (MTP heads are in the model,"
            " and lie where it does)",
        )
