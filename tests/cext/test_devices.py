"""Devices: what asks for them, and how each setting of them arrives in llama.cpp."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from tests.support import windows
from tests.support.built import built
from tests.support.hand import DENSE, HYBRID, MODELS, params, plan, sampler, tokens_of
from tests.support.hand import model as shared_model

from drafthouse_engine import (
    CacheParams,
    Engine,
    EngineParams,
    InvalidArgument,
    InvalidConfig,
    Model,
    ModelNotFound,
    Placement,
    RopeParams,
    RpcUnreachable,
    Sampler,
    SamplingParams,
    SnapshotError,
    SnapshotKind,
    add_rpc_servers,
    list_devices,
    set_numa,
)

pytestmark = pytest.mark.model

CACHE: list[tuple[str, dict[str, Any], str, str]] = [
    ("cache_type_k", {"type_k": "q8_0"}, "q8_0", "f16"),
    ("cache_type_v", {"type_v": "q4_0"}, "q4_0", "f16"),
    ("cache_type_k_draft", {"type_k_draft": "f32"}, "f32", "f16"),
    ("cache_type_v_draft", {"type_v_draft": "bf16"}, "bf16", "f16"),
]
ROPE: list[tuple[str, dict[str, Any], str, str]] = [
    ("rope_scaling", {"scaling": "yarn"}, "yarn", "linear"),
    ("rope_freq_base", {"freq_base": 20000.0}, "20000", "10000"),
    ("rope_freq_scale", {"freq_scale": 0.25}, "0.25", "1"),
    ("yarn_orig_ctx", {"yarn_orig_ctx": 512}, "512", "1024"),
    ("yarn_ext_factor", {"yarn_ext_factor": 0.5}, "0.5", "0"),
    ("yarn_attn_factor", {"yarn_attn_factor": 0.75}, "0.75", "1"),
    ("yarn_beta_slow", {"yarn_beta_slow": 2.0}, "2", "1"),
    ("yarn_beta_fast", {"yarn_beta_fast": 16.0}, "16", "32"),
]
"""Name of llama-server, parameters, what llama.cpp has then, and what it has without."""


def changed(name: str, fields: dict[str, Any]) -> EngineParams:
    """Returns parameters with one setting; windows must be shorter than the context."""
    is_cache = any(name == row[0] for row in CACHE)
    group = {"cache": CacheParams(**fields)} if is_cache else {"rope": RopeParams(**fields)}
    return params("mtp", n_ctx_seq=1024, n_seq_max=1, **group)


@pytest.fixture(scope="module")
def snapshot() -> bytes:
    """A sequence of an engine in which every setting has its default."""
    with Engine(shared_model(DENSE), None, params("mtp", n_ctx_seq=1024, n_seq_max=1)) as engine:
        return saved(engine)


def saved(engine: Engine) -> bytes:
    tokens = tokens_of("def parse(text):\n")
    engine.seq_begin(0, sampler())
    engine.step(plan((0, 0, 0, len(tokens), 0, 1)), tokens)
    return bytes(engine.save(0))


@pytest.mark.parametrize(
    ("name", "fields", "wanted", "before"), CACHE + ROPE, ids=[row[0] for row in CACHE + ROPE]
)
def test_each_setting_is_what_llama_cpp_has_and_binds_snapshots(
    name: str, fields: dict[str, Any], wanted: str, before: str, snapshot: bytes
) -> None:
    with Engine(shared_model(DENSE), None, params("mtp", n_ctx_seq=1024, n_seq_max=1)) as plain:
        assert plain.setting(name) == before
        plain.load(0, snapshot)
    with Engine(shared_model(DENSE), None, changed(name, fields)) as engine:
        assert engine.setting(name) == wanted
        with pytest.raises(SnapshotError, match=name) as refusal:
            engine.load(0, snapshot)
        assert refusal.value.kind is SnapshotKind.OTHER_CONFIG
        again = saved(engine)
        engine.seq_end(0)
        engine.load(0, again)


def windowed_params(*, swa_full: bool) -> EngineParams:
    return params(n_ctx_seq=1024, n_seq_max=1, cache=CacheParams(swa_full=swa_full))


def test_small_caches_give_the_same_tokens_and_bind_snapshots() -> None:
    target, texts = windows.model(32), tokens_of("def parse(text):\n    return text\n" * 12)
    outputs, snapshots = [], []
    for swa_full in (True, False):
        with Engine(target, None, windowed_params(swa_full=swa_full)) as engine:
            assert engine.setting("swa_full") == str(swa_full).lower()
            engine.seq_begin(0, Sampler(target, SamplingParams(temperature=0.0)))
            at, tokens = len(texts) // 64 * 64, []
            for i in range(0, at, 64):
                engine.step(plan((0, i, 0, 64, 0, 0)), texts[i : i + 64])
            rest = texts[at:]
            result = engine.step(plan((0, at, 0, len(rest), 0, 1)), rest)
            at = len(texts)
            for _ in range(16):
                token = int(result.tokens[0])
                tokens.append(token)
                result = engine.step(plan((0, at, 0, 1, 0, 1)), [token])
                at += 1
            outputs.append(tokens)
            snapshots.append(engine.save(0))
    assert outputs[0] == outputs[1]
    assert len(snapshots[1]) <= len(snapshots[0])
    with (
        Engine(target, None, windowed_params(swa_full=True)) as engine,
        pytest.raises(SnapshotError, match="swa_full is 0 in the snapshot, 1 in this engine"),
    ):
        engine.load(0, snapshots[1])


def test_there_are_no_other_settings() -> None:
    with (
        Engine(shared_model(DENSE), None, params("mtp")) as engine,
        pytest.raises(InvalidArgument, match="no setting"),
    ):
        engine.setting("colour")
    with pytest.raises(InvalidArgument, match="no setting"):
        shared_model(DENSE).setting("colour")
    with pytest.raises(ModelNotFound):
        shared_model(DENSE).setting("buffer:colour")


def has_mapped(model: Model) -> bool:
    return "Mapped" in model.setting("buffers")


def all_on_the_cpu(model: Model) -> bool:
    return model.setting("device") == ""


PLACES: list[tuple[str, Placement, Callable[[Model], bool]]] = [
    ("device", Placement(devices=()), all_on_the_cpu),
    ("split_mode", Placement(split_mode="row"), lambda m: m.setting("split_mode") == "row"),
    ("split_mode none", Placement(split_mode="none"), lambda m: m.setting("split_mode") == "none"),
    ("load_mode mmap", Placement(load_mode="mmap"), has_mapped),
    ("load_mode auto", Placement(load_mode="auto"), has_mapped),
    ("load_mode none", Placement(load_mode="none"), lambda m: not has_mapped(m)),
    ("load_mode dio", Placement(load_mode="dio"), lambda m: not has_mapped(m)),
]


@pytest.mark.parametrize(
    ("placement", "is_so"), [row[1:] for row in PLACES], ids=[row[0] for row in PLACES]
)
def test_each_placement_is_what_llama_cpp_has(
    placement: Placement, is_so: Callable[[Model], bool]
) -> None:
    with Model(MODELS / DENSE, placement=placement) as model:
        assert is_so(model)


def locked_kib() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmLck"))


def may_lock(n_bytes: int) -> bool:
    """Whether this process may lock so much memory, which it tries without llama.cpp."""
    libc = ctypes.CDLL(None)
    with mmap.mmap(-1, n_bytes) as room:
        view = (ctypes.c_char * n_bytes).from_buffer(room)
        is_locked = libc.mlock(view, ctypes.c_size_t(n_bytes)) == 0
        if is_locked:
            libc.munlock(view, ctypes.c_size_t(n_bytes))
        del view
    return bool(is_locked)


@pytest.mark.parametrize("mode", ["mlock", "mmap+mlock"])
def test_locked_weights_cannot_be_swapped(mode: Any) -> None:
    path = MODELS / DENSE
    if not may_lock(2 * path.stat().st_size):
        pytest.skip("this user may not lock as much memory as the model has")
    before = locked_kib()
    with Model(path, placement=Placement(load_mode=mode)) as model:
        assert (locked_kib() - before) * 1024 >= model.size_bytes * 0.9


def test_mtp_weights_are_loaded_where_they_are_drafted_with() -> None:
    def n_bytes(*, load_mtp: bool) -> int:
        with Model(MODELS / DENSE, load_mtp=load_mtp) as model:
            sizes = model.setting("buffers").split(",")
            return sum(int(size.rpartition("=")[2]) for size in sizes)

    assert n_bytes(load_mtp=False) < n_bytes(load_mtp=True)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (Placement(devices=("CUDA9",)), 'no device "CUDA9"'),
        (Placement(devices=("CPU",)), 'no device "CPU"'),
        (Placement(split_mode="none", main_gpu=15), "main_gpu is 15"),
        (Placement(override_tensor="ffn=NOWHERE"), 'buffer type "NOWHERE"; expected one of CPU'),
        (Placement(override_tensor="ffn(=CPU"), "no regular expression"),
        (Placement(override_tensor="ffn"), "expected PATTERN=BUFFER TYPE"),
    ],
)
def test_places_that_do_not_exist_are_refused(placement: Placement, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Model(MODELS / DENSE, placement=placement)


def test_a_device_that_does_not_exist_is_told_beside_those_that_do() -> None:
    names = [it.name for it in list_devices() if it.kind != "cpu"]
    words = f", or some of {', '.join(names)}" if names else ": there is no device but the CPU"
    with pytest.raises(InvalidArgument, match=f"expected none{words}$"):
        Model(MODELS / DENSE, placement=Placement(devices=("CUDA9",)))


def test_quantised_values_need_flash_attention() -> None:
    fields = params(flash_attention=False, cache=CacheParams(type_v="q8_0"))
    with pytest.raises(InvalidArgument, match=r"cache_type_v is q8_0, and .* flash attention"):
        Engine(shared_model(DENSE), None, fields)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Placement(split_mode="rows"),  # type: ignore[arg-type]  # wrong on purpose
        lambda: Placement(devices=("",)),
        lambda: Placement(main_gpu=-1),
        lambda: Placement(tensor_split=(-1.0,)),
        lambda: Placement(load_mode="fast"),  # type: ignore[arg-type]  # wrong on purpose
        lambda: CacheParams(type_k="q2_k"),  # type: ignore[arg-type]  # wrong on purpose
        lambda: RopeParams(scaling="long"),  # type: ignore[arg-type]  # wrong on purpose
        lambda: RopeParams(freq_scale=1e-9),
        lambda: RopeParams(yarn_ext_factor=-0.5),
        lambda: EngineParams(cache="f16"),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
def test_values_out_of_range_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidConfig):
        make()


def test_the_cpu_is_a_device() -> None:
    assert [device.name for device in list_devices() if device.kind == "cpu"] == ["CPU"]


def test_threads_can_be_left_where_they_are() -> None:
    assert set_numa("off") in {True, False}
    with pytest.raises(InvalidArgument, match="expected one of off"):
        set_numa("everywhere")  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1", ":1", "a:b:1", "127.0.0.1:x", "h:99999"])
def test_rpc_servers_have_a_host_and_a_port(endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match="host:port"):
        add_rpc_servers((endpoint,))


def test_a_server_that_does_not_answer_is_an_error_and_not_the_end() -> None:
    with pytest.raises(RpcUnreachable, match="cannot be reached"):
        add_rpc_servers(("127.0.0.1:1",))


def test_nothing_asks_a_device_before_a_model_is_loaded() -> None:
    command = [str(built("device_test")), str(MODELS / HYBRID)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
