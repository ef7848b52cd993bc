"""What a server does where its sizes do not fit into memory."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tests.support.built import needs_extension
from tests.support.demo import EAGLE3, MODELS, SIMPLE, TARGETS
from tests.support.windows import windowed

import drafthouse_engine
from drafthouse_server.config import Config
from drafthouse_server.engine import loading, surveyor
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.engine.surveyor import WINDOWS_SPARED, Surveyor
from drafthouse_server.errors import ModelLoadError
from drafthouse_server.host import size
from drafthouse_server.host.fit import Size
from drafthouse_server.host.memory import HostMemory
from drafthouse_server.host.needs import Needs, process_bytes
from drafthouse_server.serving.compose import make_scheduler
from drafthouse_server.step import EngineLimits

pytestmark = needs_extension()

MIB = 1 << 20
N_TRAIN = 1024
"""Tokens that the demo models were trained with: the most of one request."""
AMPLE = HostMemory(10**12, 10**12)


def config(target: str = "dense", **settings: Any) -> Config:
    values: dict[str, Any] = {"model": str(MODELS / TARGETS[target]), "threads": 1}
    return Config(**values | settings)


def serving_with(
    memory: HostMemory, settings: Config, monkeypatch: pytest.MonkeyPatch
) -> EngineLimits:
    """Returns what an engine of these settings offers on a host with such memory."""
    monkeypatch.setattr(loading, "read_memory", lambda: memory)
    engine = LlamaEngine.load(settings)
    try:
        return engine.limits
    finally:
        engine.close()


def free_for(settings: Config, size: Size) -> HostMemory:
    """Returns a host on which just this size fits."""
    with Surveyor(settings) as found:
        n_bytes = found.needs(size).start_bytes
    return HostMemory(10**12, int(n_bytes / 0.95) + 1000)


def fit_line(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """Returns the one line of the log that tells what was chosen."""
    (line,) = (it for it in caplog.records if it.message.startswith("fit:"))
    return line


@pytest.mark.parametrize("target", ["dense", "hybrid"])
def test_what_nobody_has_set_is_lowered(
    target: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(target)
    memory = free_for(settings, Size(3, N_TRAIN))
    with caplog.at_level(logging.INFO, loading.__name__):
        limits = serving_with(memory, settings, monkeypatch)
    assert (limits.n_seq_max, limits.n_ctx_seq) == (3, N_TRAIN)
    line = fit_line(caplog)
    assert line.levelno == logging.WARNING
    assert line.message.startswith(f"fit: 3 slots of {N_TRAIN} tokens take")
    assert f"8 slots of {N_TRAIN} tokens would take" in line.message


@pytest.mark.parametrize(
    ("settings", "fitting", "found"),
    [
        ({}, Size(1, 768), (1, 768)),
        ({"max_model_len": 768}, Size(2, 768), (2, 768)),
        ({"parallel": 4}, Size(4, 768), (4, 768)),
        ({"fit": False}, Size(1, 512), (8, N_TRAIN)),
    ],
)
def test_what_is_set_stays(
    settings: dict[str, Any],
    fitting: Size,
    found: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wished = config(**settings)
    limits = serving_with(free_for(wished, fitting), wished, monkeypatch)
    assert (limits.n_seq_max, limits.n_ctx_seq) == found


def test_all_that_fits_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, loading.__name__):
        limits = serving_with(AMPLE, config(), monkeypatch)
    assert (limits.n_seq_max, limits.n_ctx_seq) == (8, N_TRAIN)
    line = fit_line(caplog)
    assert line.levelno == logging.INFO


def test_what_can_never_fit_is_refused_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    small = HostMemory(10**12, 10**12, 190 * MIB, 190 * MIB)
    set_sizes = config(parallel=8, max_model_len=4096, ctx_size=8 * 4096)
    with pytest.raises(ModelLoadError, match=r"8 slots of 4096 tokens take .*may have 199 MB"):
        serving_with(small, set_sizes, monkeypatch)


def test_what_does_not_fit_now_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(parallel=2, max_model_len=512, ctx_size=1024)
    limits = serving_with(HostMemory(10**12, MIB), settings, monkeypatch)
    assert (limits.n_seq_max, limits.n_ctx_seq) == (2, 512)
    assert "the server may become slow or be ended" in caplog.text


def test_where_nothing_is_known_of_the_memory_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = serving_with(HostMemory(0, 0), config(), monkeypatch)
    assert (limits.n_seq_max, limits.n_ctx_seq) == (8, N_TRAIN)


@pytest.mark.parametrize(
    ("settings", "draft_type"),
    [
        ({}, "mtp"),
        ({"draft_type": "none"}, "none"),
        ({"model_draft": str(MODELS / EAGLE3["dense"])}, "eagle3"),
        ({"model_draft": str(MODELS / SIMPLE)}, "simple"),
        ({"model": str(MODELS / SIMPLE)}, "none"),
    ],
)
def test_the_drafter_that_is_counted_is_the_one_that_is_made(
    settings: dict[str, Any], draft_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wished = config(**settings)
    with Surveyor(wished) as found:
        needs = found.needs(found.wish.size)
        assert needs.draft_type == draft_type
        assert (needs.host.draft_bytes > 0) == (draft_type != "none")
    assert serving_with(AMPLE, wished, monkeypatch).draft_type == draft_type


_SURVEY = """
import resource, sys
from drafthouse_server.config import Config
from drafthouse_server.engine.surveyor import Surveyor
from drafthouse_server.host.fit import Size

with Surveyor(Config(model=sys.argv[1], draft_max=64)) as found:
    found.needs(Size(1, 1024))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    needs = found.needs(Size(64, 1024))
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(needs.host.cells_bytes, taken << 10)
"""


def test_recurrent_states_are_not_allocated_to_find_out_what_they_take() -> None:
    model = str(MODELS / TARGETS["hybrid"])
    told = subprocess.run(
        [sys.executable, "-c", _SURVEY, model], check=True, capture_output=True, text=True
    )
    n_cells_bytes, n_taken_bytes = map(int, told.stdout.split())
    assert n_cells_bytes > 1 << 30
    assert n_taken_bytes < n_cells_bytes / 4


def test_what_is_placed_for_a_size_has_cells_for_that_size() -> None:
    """Also where the size is the one that the settings ask for, by the cells of all slots."""
    with Surveyor(config("dense", parallel=8, ctx_size=8 * 256)) as found:
        assert found.wish.size == Size(8, 256)
        found.place_for(Size(8, 256), AMPLE)
        n_bytes = [found.needs(Size(n, 256)).host.cells_bytes for n in (4, 8, 16)]
    assert n_bytes[2] == 2 * n_bytes[1] == 4 * n_bytes[0]


@pytest.mark.parametrize(
    ("settings", "is_small"),
    [
        ({}, True),
        ({"swa_full": False}, True),
        ({"fit": False}, False),
        ({"kv_unified": True}, False),
        ({"model": str(MODELS / TARGETS["dense"])}, False),  # its window is its context
    ],
)
def test_windows_are_kept_alone_where_not_all_would_fit_else(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    *,
    is_small: bool,
) -> None:
    wished = config(ubatch_size=64, **{"model": str(windowed(64))} | settings)
    memory = free_for(dataclasses.replace(wished, swa_full=False), Size(8, N_TRAIN))
    with caplog.at_level(logging.INFO, loading.__name__):
        limits = serving_with(memory, wished, monkeypatch)
    assert limits.n_window_cells == (256 if is_small else 0)
    if is_small:
        assert (limits.n_seq_max, limits.n_ctx_seq) == (8, N_TRAIN)
    assert (WINDOWS_SPARED in caplog.text) == (is_small and not settings)


def test_windows_keep_all_tokens_where_all_fits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wished = config(model=str(windowed(64)), ubatch_size=64)
    with caplog.at_level(logging.INFO, loading.__name__):
        limits = serving_with(free_for(wished, Size(8, N_TRAIN)), wished, monkeypatch)
    assert (limits.n_window, limits.n_window_cells, limits.n_seq_max) == (64, 0, 8)
    assert WINDOWS_SPARED not in caplog.text


@contextmanager
def pretended_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gpu = drafthouse_engine.Device("GPU0", "none", "gpu", 0, 0)
    monkeypatch.setattr(drafthouse_engine, "list_devices", lambda: (gpu,))
    yield


@pytest.mark.parametrize("layers", [None, "auto", -1, "all", 3])
def test_on_devices_llama_cpp_s_search_says_where_the_weights_go(
    layers: str | int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless all layers are asked for, or a number of them: as of llama-server."""
    # There is none here, so the search looks at the host's memory, and the same path is taken.
    monkeypatch.setattr(surveyor, "GPU_MARGIN_BYTES", 0)
    settings: dict[str, Any] = {} if layers is None else {"gpu_layers": layers}
    with caplog.at_level(logging.INFO, loading.__name__), pretended_device(monkeypatch):
        limits = serving_with(AMPLE, config(**settings), monkeypatch)
    assert (limits.n_seq_max, limits.n_ctx_seq) == (8, N_TRAIN)
    (line,) = (it for it in caplog.messages if it.startswith("fit:"))
    slots = f"8 slots of {N_TRAIN} tokens take"
    is_searched = layers not in ("all", 3)
    assert line.startswith(
        f"fit: all layers on devices; {slots}" if is_searched else f"fit: {slots}"
    )


def test_what_fits_on_no_device_is_loaded_as_set_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(surveyor, "GPU_MARGIN_BYTES", 1 << 49)
    with pretended_device(monkeypatch):
        limits = serving_with(AMPLE, config(max_model_len=512), monkeypatch)
    assert (limits.n_seq_max, limits.n_ctx_seq) == (8, 512)
    line = fit_line(caplog)
    assert "does not fit on the devices in any way that llama.cpp knows" in line.message
    assert line.levelno == logging.WARNING


@pytest.mark.parametrize("max_model_len", [250, 0])
def test_on_devices_a_request_may_fill_a_pool_that_all_slots_share(
    max_model_len: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was cut to a slot's share of the pool, and longer requests were refused."""
    monkeypatch.setattr(surveyor, "GPU_MARGIN_BYTES", 0)
    settings = config(kv_unified=True, parallel=8, ctx_size=256, max_model_len=max_model_len)
    with caplog.at_level(logging.INFO, loading.__name__), pretended_device(monkeypatch):
        limits = serving_with(AMPLE, settings, monkeypatch)
    assert (limits.n_seq_max, limits.n_ctx, limits.n_ctx_seq) == (8, 256, max_model_len or 256)
    assert fit_line(caplog).levelno == logging.INFO


class ShorterThere:
    """A survey on whose devices all layers fit, and requests of so many tokens."""

    def __init__(self, survey: drafthouse_engine.Survey, n_tokens: int) -> None:
        self._survey, self._n_tokens = survey, n_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._survey, name)

    def fit(self, params: drafthouse_engine.EngineParams, **_: object) -> drafthouse_engine.Fit:
        return drafthouse_engine.Fit(-1, params.n_seq_max * self._n_tokens)


@pytest.mark.parametrize("is_told", [True, False])
def test_what_the_devices_have_lowered_the_host_does_not_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_told: bool
) -> None:
    """Where the host has room for fewer slots, these were as long as had been asked for."""
    settings, survey = config(), drafthouse_engine.Survey
    memory = free_for(settings, Size(3, 768)) if is_told else HostMemory(0, 0)
    monkeypatch.setattr(loading, "read_memory", lambda: memory)
    monkeypatch.setattr(
        drafthouse_engine, "Survey", lambda *paths, **how: ShorterThere(survey(*paths, **how), 768)
    )
    with (
        caplog.at_level(logging.INFO, loading.__name__),
        pretended_device(monkeypatch),
        loading._fitted(settings) as (fitted, _),
    ):
        n_slots = 3 if is_told else 8
        assert (fitted.parallel, fitted.max_model_len) == (n_slots, 768)
    line = fit_line(caplog)
    assert line.levelno == logging.WARNING
    asked = f"where 8 slots of {N_TRAIN} tokens have no room"
    assert line.message.startswith(f"fit: all layers on devices, {asked}; {n_slots} slots of 768")


class SmallWindowsFit:
    """A survey on whose devices all layers fit where windows are kept alone, else three."""

    def __init__(self, survey: drafthouse_engine.Survey) -> None:
        self._survey = survey

    def __getattr__(self, name: str) -> Any:
        return getattr(self._survey, name)

    def fit(self, params: drafthouse_engine.EngineParams, **_: object) -> drafthouse_engine.Fit:
        n_layers = 3 if params.cache.swa_full else -1
        return drafthouse_engine.Fit(n_layers, params.n_seq_max * params.n_ctx_seq)


@pytest.mark.parametrize("has_windows", [True, False])
def test_windows_are_kept_alone_where_layers_would_not_fit_on_devices_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, has_windows: bool
) -> None:
    """Where no layer has one, what fits is left as it was found."""
    settings = config(ubatch_size=64)
    if has_windows:
        settings = dataclasses.replace(settings, model=str(windowed(64)))
    monkeypatch.setattr(loading, "read_memory", lambda: AMPLE)
    survey = drafthouse_engine.Survey
    monkeypatch.setattr(
        drafthouse_engine, "Survey", lambda *paths, **how: SmallWindowsFit(survey(*paths, **how))
    )
    with (
        caplog.at_level(logging.INFO, loading.__name__),
        pretended_device(monkeypatch),
        loading._fitted(settings) as (fitted, _),
    ):
        assert (fitted.swa_full, fitted.parallel) == (not has_windows, 8)
    layers = "all layers" if has_windows else "3 layers"
    assert fit_line(caplog).message.startswith(f"fit: {layers} on devices")
    assert (WINDOWS_SPARED in caplog.text) == has_windows


def test_caches_that_grow_beyond_what_is_free_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(prefix_cache_mib=100, preempted_mib=50)
    memory = free_for(settings, Size(8, N_TRAIN))
    with caplog.at_level(logging.INFO, loading.__name__):
        limits = serving_with(memory, settings, monkeypatch)
    assert (limits.n_seq_max, limits.n_ctx_seq) == (8, N_TRAIN)
    line = fit_line(caplog)
    assert line.levelno == logging.WARNING
    assert "with its caches full the server takes" in line.message


@pytest.mark.parametrize(
    ("settings", "n_mib"),
    [
        ({"preempted_mib": 100}, 300),
        ({"preempted_mib": 100, "prefix_cache_mib": 500}, 500),  # it is set
        ({"preempted_mib": 100, "fit": False}, 8192),
        ({"preempted_mib": 100, "prefix_cache": False}, 0),
    ],
)
def test_prefixes_get_half_of_what_is_left_of_the_host(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], n_mib: int
) -> None:
    """Of 600 MiB beside the server, the weights' file, and 100 MiB of preempted requests."""
    wished = config(**settings)
    with Surveyor(wished) as found:
        needs = found.needs(Size(8, N_TRAIN))
    n_bytes = needs.start_bytes + needs.host.mapped_bytes + 700 * MIB
    memory = HostMemory(10**12, int(n_bytes / 0.95) + 1000)
    monkeypatch.setattr(loading, "read_memory", lambda: memory)
    engine = LlamaEngine.load(wished)
    try:
        assert engine.limits.n_seq_max == 8
        assert engine.prefix_bytes_max == n_mib * MIB
        scheduler = make_scheduler(engine, wished)
        assert scheduler.prefixes._n_host_bytes_max == n_mib * MIB
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("settings", "has_huge_pages", "least_bytes", "has_room", "mode"),
    [
        ({}, True, 1, True, "none"),
        ({}, False, 1, True, "auto"),
        ({}, True, 1 << 40, True, "auto"),
        ({}, True, 1, False, "auto"),
        ({"load_mode": "mmap"}, True, 1, True, "mmap"),
        ({"fit": False}, True, 1, True, "auto"),
    ],
)
def test_weights_are_read_where_they_get_huge_pages_and_all_has_room(
    monkeypatch: pytest.MonkeyPatch,
    *,
    settings: dict[str, Any],
    has_huge_pages: bool,
    least_bytes: int,
    has_room: bool,
    mode: str,
) -> None:
    """Room for what the caches may grow to, too: what is read cannot be dropped for them."""
    wished = config(**settings)
    n_caches = (wished.prefix_cache_mib + wished.preempted_mib) << 20
    free = free_for(wished, Size(8, N_TRAIN)).available_bytes + has_room * 2 * n_caches
    memory = HostMemory(10**12, free, has_huge_pages=has_huge_pages)
    monkeypatch.setattr(loading, "read_memory", lambda: memory)
    monkeypatch.setattr(size, "HUGE_BYTES", least_bytes)
    with loading._fitted(wished) as (fitted, _):
        assert (fitted.load_mode, fitted.parallel) == (mode, 8)
    engine = LlamaEngine.load(wished)
    try:
        buffers = engine._engine.target.setting("buffers")
        assert ("Mapped" in buffers) == (mode != "none")
    finally:
        engine.close()


@pytest.mark.parametrize("draft_type", ["none", "mtp"])
def test_cells_that_are_set_are_refused_before_all_of_them_are_surveyed(
    draft_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp keeps books of all cells of a survey, in memory that is really taken."""
    measured = []
    needs_of = Surveyor._measured

    def note(it: Surveyor, wished: Config, size: Size) -> Needs:
        measured.append(wished.ctx_size)
        return needs_of(it, wished, size)

    monkeypatch.setattr(Surveyor, "_measured", note)
    memory = HostMemory(5 * 10**9, 5 * 10**9)
    settings = config("dense", ctx_size=1 << 24, draft_type=draft_type)
    with pytest.raises(ModelLoadError, match="16777216 KV cells are set, 2097152 of them take"):
        serving_with(memory, settings, monkeypatch)
    assert measured == [1 << 20, 1 << 21]
    with pytest.raises(ModelLoadError, match="5 GB, all there is; 1 GB are free; lower parallel"):
        serving_with(HostMemory(5 * 10**9, 10**9), settings, monkeypatch)


def test_slots_whose_books_have_no_room_are_not_surveyed() -> None:
    memory = HostMemory(10**12, 10**9)
    with Surveyor(config("dense", max_model_len=1 << 20, draft_type="none")) as found:
        found.check(memory)
        assert found.wish.size == Size(8, 1 << 20)
        found.check(HostMemory(10**12, 3 * 10**8))
        assert found.wish.size == Size(2, 1 << 20)


@pytest.mark.parametrize(("n_free", "n_ubatch"), [(10**12, 4096), (10**8, 2048)])
def test_physical_batches_whose_graphs_have_no_room_are_not_surveyed(
    n_free: int, n_ubatch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp makes graphs for a survey, too: of a hybrid 40 nodes for each token."""
    monkeypatch.setattr(surveyor, "_N_TOKENS_AT_ONCE", 512)
    settings = {"batch_size": 4096, "ubatch_size": 4096, "draft_type": "none"}
    with Surveyor(config("hybrid", max_model_len=1024, **settings)) as found:
        found.check(HostMemory(10**12, n_free))
        found._uses.clear()
        assert (found.needs(found.wish.size).start_bytes > n_free) == (n_ubatch < 4096)
        assert max(it.n_ubatch for it in found._uses) == n_ubatch


_VOCABULARY = """
import sys
from drafthouse_engine import Model

def taken():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

before = taken()
model = Model(sys.argv[1], vocab_only=True)
print(taken() - before)
"""


def test_a_large_vocabulary_takes_no_more_than_is_counted(tmp_path: Path) -> None:
    """As Llama 3's and Gemma 4's, with two merges for each token."""
    path, n_vocab = tmp_path / "vocabulary.gguf", 26**4 // 4
    letters = [chr(ord("a") + i) for i in range(26)]
    tokens = ["".join(it) for it in itertools.islice(itertools.product(letters, repeat=4), n_vocab)]
    merges = [f"{it[:cut]} {it[cut:]}" for it in tokens for cut in (1, 2)]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * n_vocab)
    writer.add_token_merges(merges)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    command = [sys.executable, "-c", _VOCABULARY, str(path)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    n_counted = process_bytes(0, n_vocab) - process_bytes(0, 0)
    assert n_counted / 4 < int(told) < n_counted / 2  # two processes hold it
