"""Models on llama.cpp's RPC servers: where weights lie, what is refused, and a server that dies.

Each engine is in a process of its own: what one has of an RPC server it has until it ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from models.archs import write_model
from tests.support.gguf_copy import copied
from tests.support.hand import DENSE, HYBRID, MODELS, SIMPLE
from tests.support.ports import free_port
from tests.support.rpc_server import RpcServer, rpc_server

import drafthouse

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
PAGE = resource.getpagesize()
PROMPT = "def parse(text):\n"

pytestmark = pytest.mark.model


@pytest.fixture
def rpc(tmp_path: Path) -> Iterator[RpcServer]:
    with rpc_server(tmp_path) as server:
        yield server


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if "DRAFTHOUSE_" not in key}
    return kept | {"GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "passive"}


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program over the engine library, and fails where it does."""
    command = [
        sys.executable,
        "-c",
        f"from drafthouse_engine import *\nimport numpy as np\nimport sys\n{code}",
    ]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


PLACES = """
endpoint, path = sys.argv[1:]
add_rpc_servers((endpoint,))
add_rpc_servers((endpoint,))
assert [d.name for d in list_devices()] == ["CPU", "RPC0"]
far = next(d for d in list_devices() if d.kind == "gpu")
assert far.description == endpoint and far.total_bytes > 0
MEMORY = f"RPC0[{endpoint}]"

def placed(layers=-1, **fields):
    return Model(path, n_gpu_layers=layers, placement=Placement(**fields))

def buffers(model):
    return dict(part.rsplit("=", 1) for part in model.setting("buffers").split(","))

def host_bytes(model, layers=-1, **fields):
    with Survey(path, n_gpu_layers=layers, placement=Placement(**fields)) as survey:
        assert survey.host_bytes == int(model.setting("host_bytes"))
    return int(model.setting("host_bytes"))

with placed() as model:
    assert model.setting("device") == "RPC0", model.setting("device")
    assert host_bytes(model) == 0
    whole = int(buffers(model)[MEMORY])
    assert "RPC0" in model.setting("buffer:blk.0.attn_norm.weight")
with placed(2) as model:
    assert model.setting("gpu_layers") == "2"
    assert 0 < int(buffers(model)[MEMORY]) < whole
    assert 0 < host_bytes(model, 2) < model.size_bytes
with placed(devices=()) as model:
    assert host_bytes(model, devices=()) == model.size_bytes
    assert model.setting("device") == "" and MEMORY not in buffers(model)
with placed(devices=("RPC0",), split_mode="none", main_gpu=0) as model:
    assert (model.setting("device"), model.setting("split_mode")) == ("RPC0", "none")
with placed(tensor_split=(3.0,)) as model:
    assert model.setting("tensor_split") == "3"
with placed(override_tensor="blk.[01]..*=CPU") as model:
    assert "RPC0" not in model.setting("buffer:blk.1.attn_norm.weight")
    assert "RPC0" in model.setting("buffer:blk.2.attn_norm.weight")
    assert 0 < host_bytes(model, override_tensor="blk.[01]..*=CPU") < model.size_bytes
placed(override_tensor=f"attn_norm={MEMORY}").close()
for wrong, said in (
    ({"split_mode": "none", "main_gpu": 1}, "there are 1 devices"),
    ({"split_mode": "row"}, "split_mode is row, and the device RPC0 cannot hold rows"),
):
    try:
        placed(**wrong)
    except InvalidArgument as error:
        assert said in error.message, error.message
    else:
        raise AssertionError
placed(devices=(), split_mode="row").close()
"""


def test_weights_lie_where_the_placement_says(rpc: RpcServer) -> None:
    run(PLACES, rpc.endpoint, str(MODELS / DENSE))


FITS = """
import dataclasses
endpoint, path, draft_path = sys.argv[1:]
add_rpc_servers((endpoint,))
free_bytes = next(d.free_bytes for d in list_devices() if d.kind == "gpu")
MEMORY = f"RPC0[{endpoint}]"

def params(draft_type="none"):
    sizes = dict(n_ctx_seq=256, n_seq_max=2, n_batch=64, n_ubatch=64)
    return EngineParams(draft_type=draft_type, **sizes)

def layers_of(survey, draft_type, room_bytes):
    how = dict(is_ctx_fixed=True, margin_bytes=free_bytes - room_bytes)
    return survey.fit(params(draft_type), **how).n_gpu_layers

def placed(survey=None):
    with Model(path, placed_by=survey) as model:
        parts = dict(part.rsplit("=", 1) for part in model.setting("buffers").split(","))
        there = int(parts.pop(MEMORY))
        here = sum(map(int, parts.values()))
        first = model.setting("buffer:blk.0.attn_norm.weight")
        return int(model.setting("gpu_layers")), there, here, "RPC0" in first

n_all, there_all, here_all, has_first = placed()
assert has_first and there_all > here_all
with Survey(path) as survey, Survey(path, draft_path) as with_draft:
    whole = survey.measure(params())
    room_bytes = whole[1].total_bytes - 1
    n_layers = layers_of(survey, "none", room_bytes)
    assert 0 < n_layers < n_all, (n_layers, n_all)
    n_found, there, here, has_first = placed(survey)
    assert (n_found, has_first) == (n_layers, False)
    assert 0 < there < there_all and here_all < here
    assert there + here >= there_all + here_all

    # What is measured from then on is what is loaded so.
    host, device = survey.measure(params())
    assert (device.device, device.weights_bytes) == ("RPC0", there)
    assert device.total_bytes <= room_bytes
    assert host.weights_bytes - whole[0].weights_bytes == there_all - there
    assert host.cells_bytes > whole[0].cells_bytes

    n_beside = layers_of(with_draft, "simple", room_bytes)
    assert 0 < n_beside < n_layers, (n_beside, n_layers)

    # And none of it, or all, is measured as it is then.
    assert layers_of(survey, "none", 0) == 0
    assert survey.measure(params())[0].weights_bytes == whole[0].weights_bytes + there_all
    assert layers_of(survey, "none", room_bytes) == n_layers
    assert layers_of(survey, "none", 2 * room_bytes) == -1
    assert survey.measure(params()) == whole
"""


def test_layers_that_do_not_fit_stay_here_and_fewer_fit_beside_a_drafter(rpc: RpcServer) -> None:
    run(FITS, rpc.endpoint, str(MODELS / DENSE), str(MODELS / SIMPLE))


FITTED = """
import dataclasses
import logging
from drafthouse_engine import probe, probe_worker
from drafthouse_server.config import Config
from drafthouse_server.doctor.model import examine_model
from drafthouse_server.engine import loading, surveyor
from drafthouse_server.host.memory import HostMemory

endpoint, path, long_path = sys.argv[1:]
sizes = dict(parallel=2, max_model_len=1024, threads=1, prefix_cache_mib=0, preempted_mib=0)
config = Config(model=path, rpc=(endpoint,), draft_type="none", **sizes)
loading._prepare_devices(config)
free_bytes = next(d.free_bytes for d in list_devices() if d.kind == "gpu")
with surveyor.Surveyor(config) as it:
    whole = it.needs(it.wish.size)
room_bytes = dict(whole.devices)["RPC0"].total_bytes - 1
surveyor.GPU_MARGIN_BYTES = free_bytes - room_bytes

lines = []
loading._log.addHandler(logging.Handler())
loading._log.handlers[0].emit = lambda record: lines.append(record.getMessage())
loading._log.setLevel(logging.INFO)
tight = HostMemory(10**12, int(whole.start_bytes / 0.95) + 1000)
for memory, word in ((tight, "only"), (HostMemory(10**12, 10**12), "1 TB are free")):
    loading.read_memory = lambda: memory
    lines.clear()
    with loading._fitted(config) as (_, survey):
        (line,) = lines
        assert "layers on devices (" in line and word in line, line
        with Model(path, placed_by=survey) as model:
            n_layers = int(model.setting("gpu_layers"))

sections, problems = examine_model(config, memory, {"RPC0": room_bytes})
fits = next(it for it in sections if it.name == "fits")
found = {it.key: it.value for it in fits.facts}
assert found["1024"] >= 2, found
assert not problems, problems

# Each length is counted with the layers that a server has there for it: with longer ones, fewer.
config = dataclasses.replace(config, model=long_path)
sections, _ = examine_model(config, memory, {"RPC0": room_bytes})
fits = next(it for it in sections if it.name == "fits")
placed = []
for fact in fits.facts[:3]:
    n_tokens = int(fact.key)
    lines.clear()
    with loading._fitted(dataclasses.replace(config, max_model_len=n_tokens)) as _:
        line = next(line for line in lines if line.startswith("fit: "))
        words = line.removeprefix("fit: ").split(" on devices")[0]
    assert fact.shown.endswith(f", {words} on devices"), (words, fact)
    assert fact.value >= 2, fact
    placed.append(int(words.split()[0]))
assert n_tokens == 16384 and placed[0] > placed[1] >= placed[2], placed

# And a model of an architecture that is not proven is decoded as it will lie.
setup = {"params": dataclasses.asdict(EngineParams(draft_type="none")), "draft": None,
         "target": probe._part(path, -1, None), "margin_bytes": None, "rpc": ()}
params = probe_worker._params(setup)
with Survey(path, load_mtp=False) as survey:
    small_bytes = survey.measure(params)[1].total_bytes - 1
layers = []

def model(*arguments, **options):
    loaded = Model(*arguments, **options)
    layers.append(int(loaded.setting("gpu_layers")))
    return loaded

probe_worker.Model = model
probe_worker._tell = lambda **_: None
for margin_bytes in (None, free_bytes - small_bytes):
    assert probe_worker._probe(setup | {"margin_bytes": margin_bytes}) == ""
assert 0 < layers[1] < layers[0], layers
"""


def test_what_stays_here_is_counted_here_by_server_and_doctor(
    rpc: RpcServer, tmp_path: Path
) -> None:
    """A server counted no weights of its own, told that it fits, and was ended as it loaded."""
    longer = {"mimo2.context_length": 16384}
    long_path = copied(MODELS / DENSE, tmp_path / "long.gguf", longer)
    run(FITTED, rpc.endpoint, str(MODELS / DENSE), str(long_path))


OUTLIVES = """
endpoint, path = sys.argv[1:]
add_rpc_servers((endpoint,))
model = Model(path)
first, other = (Engine(model, None, EngineParams(n_ctx_seq=64, n_threads=1)) for _ in range(2))
tokens = model.tokenize("def f(x):")

def plan(n_past, n):
    return np.array([(0, n_past, 0, n, 0, 1)], PLAN_DTYPE)

def step(engine):
    engine.seq_begin(0, Sampler(model, SamplingParams(temperature=0.0)))
    out = [int(engine.step(plan(0, len(tokens)), tokens).tokens[0])]
    n = len(tokens)
    for _ in range(6):
        result = engine.step(plan(n, 1), [out[-1]])
        out.append(int(result.tokens[0]))
        n += 1
    engine.seq_end(0)
    return out

before = step(first)
step(other)
other.close()
assert step(first) == before
"""


def test_an_engine_outlives_another_on_the_same_server(rpc: RpcServer) -> None:
    """The server drops the graphs of all with a buffer of one (patch 0013)."""
    run(OUTLIVES, rpc.endpoint, str(MODELS / DENSE))


@contextlib.contextmanager
def answering(answer: bytes, *, is_silent: bool = False) -> Iterator[str]:
    """Yields the address of something that takes a connection and is no RPC server of ours."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(64)
                    connection.sendall(answer)
                    if is_silent:
                        connection.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("answer", "is_silent", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", False, "is no RPC server"),
        (b"", False, "is no RPC server"),
        (b"", True, "does not answer within"),
        ((28).to_bytes(8, "little") + bytes([7, 0, 0]) + bytes(25), False, "version 7.0"),
    ],
    ids=["http", "nothing", "silent", "older"],
)
def test_what_is_no_server_of_this_version_is_an_error(
    answer: bytes, is_silent: bool, words: str
) -> None:
    import drafthouse_engine  # here: this process has no device

    with (
        answering(answer, is_silent=is_silent) as endpoint,
        pytest.raises(drafthouse_engine.RpcUnreachable, match=words),
    ):
        drafthouse_engine.add_rpc_servers((endpoint,), timeout_s=0.5 if is_silent else 50.0)
    assert [device.name for device in drafthouse_engine.list_devices()] == ["CPU"]


ONCE = """
(endpoint,) = sys.argv[1:]
add_rpc_servers((endpoint,))
assert [d.name for d in list_devices()] == ["CPU", "RPC0"]
"""


def test_a_server_that_is_given_twice_is_refused_and_outlives_that(rpc: RpcServer) -> None:
    """Two connections at once are what it never answers: a start waited for ever."""
    import drafthouse_engine  # here: this process has no device

    twice = (rpc.endpoint.replace("127.0.0.1", "localhost"), rpc.endpoint)
    with pytest.raises(
        drafthouse_engine.RpcUnreachable, match=rf"{rpc.endpoint} .* given twice, under two names"
    ):
        drafthouse_engine.add_rpc_servers(twice, timeout_s=5.0)
    assert [device.name for device in drafthouse_engine.list_devices()] == ["CPU"]
    run(ONCE, rpc.endpoint)


def test_a_server_that_another_process_has_outlives_who_asked_for_it(rpc: RpcServer) -> None:
    """It was ended by SIGPIPE when it came to a connection that had been given up."""
    import drafthouse_engine  # here: this process has no device

    host, port = rpc.endpoint.split(":")
    with (
        socket.create_connection((host, int(port))),
        pytest.raises(drafthouse_engine.RpcUnreachable, match="another process may have it"),
    ):
        drafthouse_engine.add_rpc_servers((rpc.endpoint,), timeout_s=0.5)
    run(ONCE, rpc.endpoint)
    assert rpc.process.poll() is None


def test_a_name_that_no_server_can_have_is_an_error() -> None:
    import drafthouse_engine  # here: this process has no device

    for host in ("a" * 64, "..", "a..b"):
        with pytest.raises(drafthouse_engine.RpcUnreachable, match="cannot be reached"):
            drafthouse_engine.add_rpc_servers((f"{host}:1",))


def test_a_build_without_the_backend_serves_without_rpc_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import drafthouse_engine  # here: this process has no device

    monkeypatch.setattr(drafthouse_engine.rpc, "rpc_version", lambda: None)
    drafthouse_engine.add_rpc_servers(())
    with pytest.raises(drafthouse_engine.Unsupported, match="no RPC backend"):
        drafthouse_engine.add_rpc_servers(("127.0.0.1:1",))


@dataclass(frozen=True)
class Served:
    process: subprocess.Popen[bytes]
    target: str
    log: Path


@contextlib.contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Served]:
    """Runs `drafthouse serve` until the block ends, ready from the beginning."""
    port = free_port()
    log = folder / f"server-{port}.log"
    command = [sys.executable, "-m", "drafthouse_server", "serve", "--model", str(MODELS / DENSE)]
    command += ["--port", str(port), "--parallel", "2", "--max-model-len", "256", *flags]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, env=environment())
    served = Served(process, f"127.0.0.1:{port}", log)
    try:
        _await_ready(served)
        yield served
    finally:
        process.terminate()
        process.wait(100)


def _await_ready(served: Served) -> None:
    ends_s = time.monotonic() + START_S
    with drafthouse.Client(served.target) as client:
        while time.monotonic() < ends_s:
            assert served.process.poll() is None, served.log.read_text()
            with contextlib.suppress(drafthouse.DrafthouseError, grpc.RpcError):
                client.list_models()
                return
            time.sleep(0.1)
    raise AssertionError(served.log.read_text())


@contextlib.contextmanager
def killed_after(n_bytes: int, rpc: RpcServer) -> Iterator[str]:
    """Gives an address before an RPC server, which is killed when so much has gone to it."""
    left = [n_bytes]

    def pass_on(source: socket.socket, sink: socket.socket, *, is_counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                left[0] -= len(data) * is_counted
                if left[0] <= 0:
                    rpc.process.kill()
                    rpc.process.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()  # without it what is on its way would wait for a reader

    def accept() -> None:
        host, port = rpc.endpoint.rsplit(":", 1)
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            while True:
                client = opened.enter_context(listener.accept()[0])
                server = opened.enter_context(socket.create_connection((host, int(port))))
                for ends, is_counted in (((client, server), True), ((server, client), False)):
                    counted = {"is_counted": is_counted}
                    passing = threading.Thread(target=pass_on, args=ends, kwargs=counted)
                    passing.start()
                    opened.callback(passing.join)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


def generated(served: Served) -> list[int]:
    with drafthouse.Client(served.target, retry=None) as client:
        stream = client.generate(PROMPT, temperature=0, max_output_tokens=12)
        return [token for chunk in stream for token in chunk.token_ids]


def test_a_dead_rpc_server_ends_the_process_and_a_restart_serves_again(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        wanted = generated(served)
    port = free_port()
    with rpc_server(tmp_path, port) as rpc, serving(tmp_path, "--rpc", rpc.endpoint) as served:
        assert f"device RPC0 ({rpc.endpoint})" in served.log.read_text()
        assert generated(served) == wanted
        n_accepted = rpc.n_accepted
        with drafthouse.Client(served.target) as client:  # what text workers do
            assert client.count_tokens(PROMPT).prompt_tokens > 0
        assert rpc.n_accepted == n_accepted
        rpc.process.kill()
        rpc.process.wait()
        with pytest.raises(drafthouse.DrafthouseError) as lost:
            generated(served)
        assert lost.value.code is grpc.StatusCode.UNAVAILABLE
        assert served.process.wait(100) == -signal.SIGABRT
        log = served.log.read_text()
        assert "Remote RPC server crashed" in log
        assert log.rstrip().endswith("start it again, after the RPC server, where that died")
    with rpc_server(tmp_path, port) as rpc, serving(tmp_path, "--rpc", rpc.endpoint) as served:
        assert generated(served) == wanted


NO_ROOM = """
endpoint, path = sys.argv[1:]
add_rpc_servers((endpoint,))
try:
    Model(path)
except OutOfMemory as error:
    assert f"unable to allocate RPC0[{endpoint}] buffer" in error.message, error.message
else:
    raise AssertionError
with Model(path, placement=Placement(devices=())) as model:
    assert model.setting("device") == ""
"""


def test_a_device_without_room_is_not_the_file_s_fault(rpc: RpcServer) -> None:
    path = MODELS / DENSE
    n_bytes = int(Path(f"/proc/{rpc.process.pid}/statm").read_text().split()[0]) * PAGE
    n_bytes += path.stat().st_size // 4
    resource.prlimit(rpc.process.pid, resource.RLIMIT_AS, (n_bytes, n_bytes))
    run(NO_ROOM, rpc.endpoint, str(path))
    said = refused("--model", str(path), "--gpu-layers", "all", "--rpc", rpc.endpoint)
    assert "unable to allocate" in said
    assert "keep fewer layers on devices (gpu_layers)" in said
    assert "download" not in said


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("deepseek2", ("--split-mode", "tensor"), "not implemented for architecture 'deepseek2'"),
        ("llama", ("--split-mode", "tensor", "--flash-attn", "off"), "requires flash_attn"),
        ("deepseek2", ("--cache-type-k", "bf16"), r"does not support different K .bf16. and V"),
    ],
)
def test_a_setting_that_does_not_suit_the_model_is_what_is_to_be_changed(
    rpc: RpcServer, tmp_path: Path, name: str, settings: tuple[str, ...], words: str
) -> None:
    path = write_model(tmp_path / f"{name}.gguf", name)
    said = refused("--model", str(path), *settings, "--rpc", rpc.endpoint)
    assert re.search(words, said), said
    assert said.endswith("; change this setting\n"), said


def test_a_split_that_ends_the_process_is_refused(rpc: RpcServer, tmp_path: Path) -> None:
    """llama.cpp asserts how tensors are split, in some graphs of several sequences or one alone."""
    split = ("--split-mode", "tensor", "--rpc", rpc.endpoint)
    for model in (
        ("--model", str(MODELS / HYBRID), "--draft-type", "none"),  # by two streams at once
        ("--model", str(MODELS / HYBRID), "--draft-type", "mtp"),  # where neither has a draft
        ("--model", str(MODELS / DENSE), "--model-draft", str(MODELS / SIMPLE)),  # by a token
    ):
        assert "use another model, or another split_mode" in refused(*model, *split)
    with serving(tmp_path, *split, "--draft-type", "none") as served:  # the dense model
        assert generated(served)


def refused(*settings: str) -> str:
    """Returns what a server says that does not start."""
    command = [sys.executable, "-m", "drafthouse_server", "serve", "--port", "0", *settings]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_wrong_drafter_is_a_sentence_where_there_is_a_device_too(rpc: RpcServer) -> None:
    """What fits on the devices is asked before the models are loaded."""
    model = str(MODELS / "tiny-draft-f16.gguf")
    said = refused("--model", model, "--draft-type", "mtp", "--rpc", rpc.endpoint)
    assert "use a model with MTP heads" in said


def test_the_server_says_why_it_does_not_start_without_its_rpc_server() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    said = refused("--model", str(MODELS / DENSE), "--rpc", endpoint)
    assert f"the RPC server {endpoint} cannot be reached" in said


@pytest.mark.parametrize("n_bytes", [34, 110], ids=str)
def test_an_rpc_server_that_dies_while_it_is_asked_ends_the_start_with_a_sentence(
    n_bytes: int, rpc: RpcServer
) -> None:
    """When its devices are counted, and when it is asked what is free there."""
    with killed_after(n_bytes, rpc) as endpoint:
        said = refused("--model", str(MODELS / DENSE), "--rpc", endpoint)
    *_, why, last = said.splitlines()
    assert "Remote RPC server crashed" in why
    assert last.startswith("drafthouse: cannot ")
    assert "llama.cpp gave up, as the line above says; start the RPC server again" in last


def test_an_rpc_server_that_dies_while_a_model_is_loaded_ends_the_start_with_a_sentence(
    rpc: RpcServer, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "drafthouse_server", "serve", "--model", str(MODELS / DENSE)]
    with killed_after(3 << 20, rpc) as endpoint:
        command += ["--port", str(free_port()), "--rpc", endpoint]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
    assert rpc.process.returncode == -signal.SIGKILL
    assert done.returncode == 1, done.stderr
    *_, why, last = done.stderr.splitlines()
    assert "Remote RPC server crashed" in why
    assert last == (
        f"drafthouse: cannot load '{MODELS / DENSE}': llama.cpp gave up, as the line above says;"
        " start the RPC server again, where that died; else use another model, or other settings"
    )
