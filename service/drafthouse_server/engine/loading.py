"""Loads the models and makes the contexts, or says in a sentence why not and what to do."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from drafthouse_server.config import AUTOMATIC, Config
from drafthouse_server.engine.parameters import (
    GAVE_UP,
    check_built,
    draft_placement_of,
    draft_types,
    engine_params,
    explained,
    least_cells,
    may_be_mtp,
    n_layers_of,
    placement_of,
    unfit_errors,
)
from drafthouse_server.engine.surveyor import (
    GPU_MARGIN_BYTES,
    WINDOWS_SPARED,
    Surveyor,
    is_fitted,
)
from drafthouse_server.engine.threads import Threads, threads_of
from drafthouse_server.errors import ModelLoadError, StartupError
from drafthouse_server.host.engine import CoreFacts, DeviceFacts, EngineFacts
from drafthouse_server.host.length import N_CTX_SEQ_AUTOMATIC
from drafthouse_server.host.memory import HostMemory, read_memory
from drafthouse_server.host.size import (
    check_books,
    check_processes,
    choose_size,
    is_better_read,
    on_devices,
)

# The fake engine, and all tests that use it, work without the extension.
with suppress(ImportError):  # `check_built` says so
    import drafthouse_engine

__all__ = [
    "Loaded",
    "check_texts",
    "engine_facts",
    "engine_version",
    "load_engine",
]

_log = logging.getLogger(__name__)

_NOT_FINITE = (
    "what it computes is not finite: its weights are damaged, or cache types or RoPE settings do"
    " not suit it"
)

_HAS_ENDED = f"{GAVE_UP}: this process ends, and every stream with it"


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """An engine, and what was chosen for it."""

    engine: drafthouse_engine.Engine
    """Its contexts are made."""
    threads: Threads
    """What it computes with."""
    prefix_bytes: int
    """Host memory that prefixes may take."""


def load_engine(
    config: Config,
    progress: Callable[[str, float], object] | None = None,
    target: drafthouse_engine.Model | None = None,
) -> Loaded:
    """Loads the models of a configuration and makes the contexts. Thread: the engine thread.

    Args:
        config: The server's settings.
        progress: Called with a file and the share of it that is loaded, [0, 1].
        target: The target, where another engine here has it.

    Raises:
        ModelLoadError: a file is missing, broken, or does not fit; says which and what to do.
        StartupError: the extension is not built, or the process that probes cannot be started.
    """
    check_built()
    memory = read_memory()
    if config.fit:
        check_processes(config.text_workers, memory, config.model)
    check_books(least_cells(config), 1, memory, config.model)
    _prepare_devices(config)
    if config.probe:
        _probe(config)
    with _fitted(config) as (config, survey):  # noqa: PLR1704  # as it fits from here on
        target = target or _load_model(config, progress, placed_by=survey)
    draft = _load_model(config, progress, is_draft=True) if config.model_draft else None
    if config.synth_rates:
        _log.warning(
            "BENCHMARK: drafts are accepted at random (synth_rates); what is generated is not"
            " the model's output"
        )
    loaded = [target] if draft is None else [target, draft]
    n_host_bytes = sum(int(model.setting("host_bytes")) for model in loaded)
    threads = threads_of(config, target.size_bytes, n_host_bytes)
    engine = _make_engine(config, target, draft, threads)
    _generate_first(config, engine)
    then = "after the RPC server, where that died" if config.rpc else "and report that line"
    drafthouse_engine.on_abort(f"drafthouse: {_HAS_ENDED}; start it again, {then}")
    return Loaded(engine, threads, config.prefix_cache_mib << 20)


@contextmanager
def _fitted(config: Config) -> Iterator[tuple[Config, drafthouse_engine.Survey | None]]:
    """Gives the settings as they fit into memory, and who says where the weights go.

    Where heads of the model's own might draft (`may_be_mtp`), and will not, they say so, too.

    Raises:
        ConfigError: a setting needs a drafter, and none was found.
        ModelLoadError: what is set can never fit.
    """
    if not config.fit and (config.draft_type != AUTOMATIC or config.model_draft):
        yield config, None
        return
    with contextlib.ExitStack() as stack:
        surveyor = None
        # What is wrong with files and settings is told by those who load them.
        with suppress(ModelLoadError):
            surveyor = stack.enter_context(Surveyor(config))
        if surveyor is None:
            yield config, None
            return
        fitted = config
        if config.fit:
            surveyor.check(memory := read_memory())
            surveyor.lengthen(memory)
            surveyor.fit_devices()
            if surveyor.spare_windows(memory):
                _log.info("swa_full: %s", WINDOWS_SPARED)
            fitted = _choose(surveyor, config, memory)
        if surveyor.draft_type == "none":
            fitted = dataclasses.replace(fitted, draft_type="none")
        devices = surveyor.devices
        is_placed = devices is not None and devices.n_layers is not None
        yield fitted, surveyor.survey if is_placed else None


def _choose(surveyor: Surveyor, config: Config, memory: HostMemory) -> Config:
    """Returns the settings with what fits into memory, and tells what was chosen.

    That are slots and lengths, in one line, and how files get there, where this is left open.

    Raises:
        ModelLoadError: what is set can never fit.
    """
    if memory.total_bytes:
        chosen = choose_size(surveyor, memory, config.model)
        _log.log(logging.WARNING if chosen.is_less else logging.INFO, "%s", chosen.sentence)
        n_prefix_mib = chosen.needs.prefix_bytes >> 20
        fitted = dataclasses.replace(
            surveyor.sized(chosen.needs.size), prefix_cache_mib=n_prefix_mib
        )
        if config.load_mode == AUTOMATIC and is_better_read(chosen.needs, memory):
            _log.info("load_mode: weights are read, not mapped: there is room, and huge pages")
            return dataclasses.replace(fitted, load_mode="none")
        return fitted
    size, devices = surveyor.wish.size, surveyor.devices
    if devices is not None:
        words = on_devices(devices, surveyor.needs(size))
        slots = f"{size.parallel} slots of {size.max_model_len} tokens"
        _log.log(logging.WARNING if devices.is_less else logging.INFO, "fit: %s%s", words, slots)
    return surveyor.sized(size)


def check_texts(config: Config) -> list[str]:
    """Sees that the model's file has a vocabulary that reads and writes texts; loads that alone.

    Returns:
        What is odd in it, a sentence each.

    Raises:
        ModelLoadError: it has none, or its parts do not fit each other.
    """
    path = config.model
    with explained(path, config), drafthouse_engine.Model(path, vocab_only=True) as target:
        _try_texts(path, target)
        odd = _odd_tokens(target)
        if target.chat_template:
            try:
                target.format_chat([("user", "Hello")])
            except drafthouse_engine.EngineError as error:
                odd.append(f"a chat of one user's message is refused: {error.message}")
    return odd


def _odd_tokens(target: drafthouse_engine.Model) -> list[str]:
    """Returns what is odd in the tokens that begin and end texts, which llama.cpp takes as it can.

    llama.cpp has a default for the end of a text, which in some vocabularies is an ordinary token:
    answers end where it stands.
    """
    odd, named = [], set()
    for name in ("bos", "eos", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        value = target.meta(key)
        if value is not None and int(value) < target.n_vocab:
            named.add(name)
        elif value is not None:
            known = f"the vocabulary has 0 to {target.n_vocab - 1}"
            odd.append(f"{key} is {value}, which is no token and is ignored ({known})")
    end = target.token_eos
    if "eos" not in named and end >= 0 and (text := target.token_bytes(end)):
        odd.append(
            f"no tokenizer.ggml.eos_token_id: answers end at token {end}, which llama.cpp takes and"
            f" which is the text {text.decode('utf-8', 'replace')!r}"
        )
    added = target.tokenize("")
    if len(added) > target.add_bos and added[-1] == end:
        odd.append(
            "tokenizer.ggml.add_eos_token: prompts get the end token, too, so that"
            " answers follow an end"
        )
    return odd


def engine_version() -> str:
    """Returns the version of llama.cpp and how it was built.

    Raises:
        StartupError: the extension is not built.
    """
    check_built()
    return drafthouse_engine.build_version()


def engine_facts(rpc: tuple[str, ...] = ()) -> EngineFacts:
    """Returns how the engine was built, and what it can compute on.

    Args:
        rpc: RPC servers, whose devices are devices of this process from now on.

    Raises:
        StartupError: the extension is not built, or an RPC server does not answer as it should.
    """
    text = engine_version().partition(";")[2]
    features = frozenset(re.findall(r"(\w+) = 1\b", text.partition("CPU :")[2]))
    cores = drafthouse_engine.find_cores()
    with _asking(rpc):
        drafthouse_engine.add_rpc_servers(rpc)
        devices = tuple(
            DeviceFacts(it.name, it.description, it.kind, it.total_bytes, it.free_bytes)
            for it in drafthouse_engine.list_devices()
        )
    return EngineFacts(
        drafthouse_engine.build_facts(),
        features,
        CoreFacts(cores.n_cores, cores.n_physical, cores.n_logical, cores.quota),
        devices,
    )


@contextmanager
def _asking(rpc: tuple[str, ...]) -> Iterator[None]:
    """Turns what goes wrong with devices into a sentence, the end of the process too.

    Raises:
        StartupError: the extension has refused one.
    """
    advice = "start the RPC server again, where that died" if rpc else "look at the devices"
    drafthouse_engine.on_abort(f"drafthouse: cannot ask the devices: {GAVE_UP}; {advice}", 1)
    try:
        yield
    except drafthouse_engine.EngineError as error:
        raise StartupError(error.message) from error
    finally:
        drafthouse_engine.on_abort("")


def _prepare_devices(config: Config) -> None:
    """Makes RPC servers' devices, and says what there is.

    Raises:
        StartupError: an RPC server does not answer, or speaks another version.
    """
    with _asking(config.rpc):
        numa: Any = config.numa  # Config allows the same names only
        if numa != "off" and not drafthouse_engine.set_numa(numa):
            _log.warning("numa %s changes nothing: there is one memory node", config.numa)
        drafthouse_engine.add_rpc_servers(config.rpc)
        devices = drafthouse_engine.list_devices()
    for device in devices:
        if device.kind != "cpu":
            n_free, n_total = device.free_bytes >> 20, device.total_bytes >> 20
            name = f"{device.name} ({device.description})"
            _log.info("device %s: %d of %d MiB are free", name, n_free, n_total)


def _probe(config: Config) -> None:
    """Has unproven models decoded elsewhere first: a draft alone, the target with its drafter.

    Before this process builds anything of them, a survey included, which may end it. So it is that
    process that finds which layers fit on the devices; those of RPC servers are its own only with
    split_mode tensor, which nothing else can try.

    One that the system ends for the memory that it takes has told nothing of the model, and with
    rpc the server itself may take far less of this machine's. The server goes on with a warning.

    Raises:
        ModelLoadError: that process died of it, or its decode failed or came to no end.
        StartupError: that process cannot be started.
    """
    arch, draft_arch = _arch_of(config.model, config), None
    is_split = config.split_mode == "tensor"
    own: dict[str, Any] = {"n_gpu_layers": n_layers_of(config.gpu_layers)}
    own["margin_bytes"] = GPU_MARGIN_BYTES if is_fitted(config) else None
    drafts: dict[str, Any] = {"n_gpu_layers": n_layers_of(config.gpu_layers_draft)}
    if is_split or not config.rpc:  # elsewhere it is the CPU: files need not go there twice
        own["placement"], drafts["placement"] = placement_of(config), draft_placement_of(config)
    if config.model_draft:
        draft_arch = _arch_of(config.model_draft, config)
        of_draft = {"path": config.model_draft} | drafts
        own |= {f"{name}_draft": value for name, value in of_draft.items()}
    rpc = {"rpc": config.rpc if is_split else ()}
    draft_type = draft_types(config, draft_arch)[0]
    params = engine_params(config, draft_type, N_CTX_SEQ_AUTOMATIC, Threads(config.threads, 0))
    if draft_arch and draft_arch not in drafthouse_engine.PROVEN | {"eagle3", "dflash"}:
        cache = params.cache
        cache = dataclasses.replace(cache, type_k=cache.type_k_draft, type_v=cache.type_v_draft)
        alone = dataclasses.replace(params, draft_type="ngram-simple", cache=cache)
        _probe_one(config.model_draft, _unproven(draft_arch), alone, drafts | rpc)
    if is_split or arch not in drafthouse_engine.PROVEN:
        why = "split_mode tensor is experimental in llama.cpp" if is_split else _unproven(arch)
        _probe_one(config.model, why, params, own | rpc)


def _arch_of(path: str, config: Config) -> str:
    with explained(path, config), drafthouse_engine.Model(path, vocab_only=True) as header:
        return header.arch


def _unproven(arch: str) -> str:
    return f"the architecture {arch!r} is not among those that were compared with llama-server"


def _probe_one(
    path: str, why: str, params: drafthouse_engine.EngineParams, places: dict[str, Any]
) -> None:
    _log.info("%s: %s is decoded once in a process of its own (probe)", why, path)
    try:
        problem = drafthouse_engine.probe_model(path, params, **places)
    except drafthouse_engine.OutOfMemory as error:
        _log.warning("%s, so %s is served without having been decoded first", error.message, path)
        return
    except OSError as error:
        what = f"the process that decodes {path!r} first cannot be started: {error}"
        raise StartupError(f"{what}; repair that, or do without it (probe false)") from error
    if problem:
        advice = "use another model"
        if (placement := places.get("placement")) and placement.split_mode == "tensor":
            advice += ", or another split_mode"
        raise ModelLoadError(path, problem, advice)


def _load_model(
    config: Config,
    progress: Callable[[str, float], object] | None,
    *,
    is_draft: bool = False,
    placed_by: drafthouse_engine.Survey | None = None,
) -> drafthouse_engine.Model:
    path = config.model_draft if is_draft else config.model
    with explained(path, config):
        return drafthouse_engine.Model(
            path,
            n_gpu_layers=n_layers_of(config.gpu_layers_draft if is_draft else config.gpu_layers),
            load_mtp=not is_draft and may_be_mtp(config),
            placed_by=placed_by,
            placement=draft_placement_of(config) if is_draft else placement_of(config),
            # Returning None goes on; only False would stop the load.
            progress=None if progress is None else lambda share: progress(path, share),
        )


def _make_engine(
    config: Config,
    target: drafthouse_engine.Model,
    draft: drafthouse_engine.Model | None,
    threads: Threads,
) -> drafthouse_engine.Engine:
    """Makes the contexts, with the first drafter that fits where the setting leaves it open.

    Raises:
        ConfigError: a setting needs a drafter, and none fits.
        ModelLoadError: they cannot be made; says why and what to do.
    """
    with explained(config.model, config):
        _try_texts(config.model, target)
        for problem in _odd_tokens(target):
            _log.warning("%s: %s", config.model, problem)
    *others, last = draft_types(config, None if draft is None else draft.arch)
    for draft_type in others:
        params = engine_params(config, draft_type, target.n_ctx_train, threads)
        with explained(config.model, config, is_loaded=True), suppress(*unfit_errors()):
            return drafthouse_engine.Engine(target, draft, params)
    # Its rules hold for what was found, too: n-grams first, before nothing, is refused.
    config = dataclasses.replace(config, draft_type=last)
    with explained(config.model, config, is_loaded=True):
        return drafthouse_engine.Engine(
            target, draft, engine_params(config, last, target.n_ctx_train, threads)
        )


def _try_texts(path: str, target: drafthouse_engine.Model) -> None:
    """Sees that the vocabulary reads and writes texts: in them a server is asked, and answers.

    Raises:
        EngineError: there is no vocabulary.
        ModelLoadError: its parts do not fit each other.
    """
    target.token_bytes(0)
    try:
        target.tokenize("Hello, world: 1\n")
    except drafthouse_engine.EngineError as error:
        problem = f"its tokenizer cannot read a text ({error.message})"
        advice = "give a file whose tokenizer.ggml values belong together"
        raise ModelLoadError(path, problem, advice) from error


def _generate_first(config: Config, engine: drafthouse_engine.Engine) -> None:
    """Generates some tokens, with a draft: a model that can generate none is not served.

    It reads the weights and has devices load their programs, too, for which the first client would
    wait otherwise.

    Raises:
        ModelLoadError: it fails; says why and what to do.
    """
    target, limits, seq_id = engine.target, engine.limits, 0
    greedy = drafthouse_engine.Sampler(target, drafthouse_engine.SamplingParams(temperature=0.0))
    moves = [drafthouse_engine.Moves(starts=[drafthouse_engine.Start(seq_id, greedy)]), None]
    n_draft = min(1, limits.n_draft_max)
    n_past, token = 0, max(0, target.token_bos)
    statuses = drafthouse_engine.Status
    not_finite = (statuses.SAMPLING_FAILED, statuses.NO_TOKEN_ALLOWED)
    for before, n_drafted in zip(moves, (0, n_draft), strict=True):
        row = (seq_id, n_past, 0, 1, n_drafted, 1)
        with explained(config.model, config, is_loaded=True):
            plan = np.array([row], drafthouse_engine.PLAN_DTYPE)
            result = engine.step(plan, [token], moves=before)
        entry = result.entries[0]
        status = statuses(int(entry["status"]))
        if status in not_finite:
            advice = "give a whole file, or leave these settings out"
            raise ModelLoadError(config.model, _NOT_FINITE, advice)
        if status is not statuses.OK:
            raise ModelLoadError(
                config.model, f"its first step fails ({status.name})", "see the log"
            )
        n_past, token = int(entry["n_past"]), int(result.tokens[-1])
    engine.seq_end(seq_id)
