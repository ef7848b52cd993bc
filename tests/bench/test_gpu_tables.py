"""`scripts/gpu_tables.sh`: what it would run exists, and what it has run it does not run again.

No GPU is needed: the commands of all pieces are read, and the script itself is run in a folder
whose programs only say that they were called.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
from models.bench_models import QUANTS, SHAPES
from scripts import cuda, gpu_built

from drafthouse_bench import command
from drafthouse_bench.peers.command import _plan

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_tables.sh"
GPU = "NVIDIA Some, 580.1, 143771 MiB, 9.0"
FEW = ("build", "smoke", "peer", "tests", "equal")
"""Pieces of the script that is run: each kind."""


def dry_run(**environment: str) -> dict[str, list[str]]:
    """Returns the commands of each piece."""
    said = subprocess.run(
        [SCRIPT, "--dry-run"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PACK": "none"} | environment,
    ).stdout
    pieces: dict[str, list[str]] = {}
    for line in said.splitlines():
        if line.startswith("# "):
            pieces[line[2:]] = []
        else:
            pieces[list(pieces)[-1]].append(line)
    return pieces


PIECES = dry_run()
PEERS = {name: lines for name, lines in PIECES.items() if "drafthouse-bench peers" in lines[0]}


def test_the_list_has_every_piece_and_its_time() -> None:
    said = subprocess.run([SCRIPT, "--list"], capture_output=True, text=True, check=True).stdout
    rows = [re.fullmatch(r"\[ \] (\S+) +up to +(\d+) s  \S.*", line) for line in said.splitlines()]
    assert [row[1] for row in rows if row] == list(PIECES)
    assert all(row and int(row[2]) < 600 for row in rows)


@pytest.mark.parametrize("name", PEERS)
def test_each_table_is_one_that_the_benchmark_can_take(name: str) -> None:
    (line,) = PEERS[name]
    arguments = command._parser().parse_args(shlex.split(line)[1:])
    cases = _plan(arguments).cases()
    assert cases
    written = re.findall(r"echo (\S+) --quants (\S+);", " ".join(PIECES["models"]))
    assert written
    for shape, quant in written:
        assert shape in SHAPES
        assert quant in QUANTS
    names = {f"{shape}-{quant}" for shape, quant in written}
    assert "--rounds 3" in line
    assert {case.model for case in cases} <= names
    if name.startswith("own-"):
        assert [case.streams for case in cases] == [1, 4, 8, 16, 32]


def test_other_benchmarks_have_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    others = [
        shlex.split(line)[1:]
        for lines in PIECES.values()
        for line in lines
        if line.startswith("drafthouse-bench ") and "peers" not in line
    ]
    assert others
    for program, *flags in others:
        assert program in command._PROGRAMS
        with pytest.raises(SystemExit):
            command.main([program, "--help"])
        told = capsys.readouterr().out
        assert all(flag in told for flag in flags if flag.startswith("--"))


def test_programs_and_files_of_the_commands_exist() -> None:
    lines = [line for lines in (PIECES | dry_run(PEER="stock")).values() for line in lines]
    scripts = {name for line in lines for name in re.findall(r"\bscripts/\w+\.py", line)}
    assert {"scripts/build.py", "scripts/peers.py", "scripts/gpu_results.py"} <= scripts
    for name in scripts:
        assert (ROOT / name).is_file(), name
    for name in {name for line in lines for name in re.findall(r"python -m (\S+)", line)}:
        assert importlib.util.find_spec(name), name
    listed = subprocess.run(
        ["make", "-s", "device-tests"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert listed
    for name in [*listed, *re.findall(r"tests/\S+\.py", " ".join(lines))]:
        assert (ROOT / name).is_file(), name


def test_packages_that_python_has_are_used_when_asked_for(tmp_path: Path) -> None:
    lines = dry_run(SITE="1", PYTHON=sys.executable)["build"]
    n_more = len(lines) - len(PIECES["build"])
    assert n_more == 2
    assert "--without-pip" in lines[0]
    folder = tmp_path / ".venv" / "lib" / "python3.99" / "site-packages"
    for path in (folder, tmp_path / ".venv" / "bin"):
        path.mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "pip").touch()  # one that is there is kept
    for line in lines[:n_more]:
        subprocess.run(["sh", "-eu", "-c", line], cwd=tmp_path, check=True)
    (written,) = folder.glob("*.pth")
    assert written.read_text().strip() == sysconfig.get_paths()["purelib"]


def test_an_unknown_piece_is_refused() -> None:
    done = subprocess.run(
        [SCRIPT, "nothing"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 2
    assert 'no piece "nothing"' in done.stderr


@pytest.mark.model
def test_the_tree_of_the_engine_has_a_llama_server_when_asked_for(tmp_path: Path) -> None:
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=tools)
    assert cmake, "there was one to build the engine with"
    asked_for = [f"-D{name}={value}" for name, value in cuda.SERVER.items()]
    options = ["-DDRAFTHOUSE_DEV=ON", "-DDRAFTHOUSE_EXTENSION=OFF", *asked_for]
    options += [f"-DPython_EXECUTABLE={sys.executable}"]
    done = subprocess.run(
        [cmake, "-G", "Ninja", "-S", str(ROOT / "cext"), "-B", str(tmp_path), *options],
        env=os.environ | {"PATH": tools},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    targets = (tmp_path / "build.ninja").read_text()
    assert "\nbuild bin/llama-server: " in targets
    (everything,) = re.findall(r"^build all: phony (.*)$", targets, re.M)
    assert "rpc_server" in everything  # ours, for `make test-device`, is built as ever


class Machine:
    """A folder with the script, and programs that only say that they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        for name in ("scripts/gpu_tables.sh", "scripts/gpu_results.py", "scripts/cuda.py"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        shutil.copy(ROOT / "pyproject.toml", folder)
        script = folder / "scripts" / "gpu_tables.sh"
        text, n = re.subn(
            r"^pieces=.*$", f"pieces='{' '.join(FEW)}'", script.read_text(), flags=re.M
        )
        assert n == 1
        script.write_text(text)
        toolkit = folder / "toolkit"
        for name in ("include/cublas_v2.h", "lib/libcublas.so"):
            (toolkit / name).parent.mkdir(parents=True)
            (toolkit / name).touch()
        self.program("bin/nvcc", f"echo 'release 13.0'; echo '#$ TOP={toolkit}'")
        self.gpu(GPU)
        for name in ("python", "cmake", "make"):
            self.program(f".venv/bin/{name}", f'echo "{name} $*"')
        self.bench("exit 0")
        (folder / "scripts" / "build.py").write_text("import os; print(os.environ['CMAKE_ARGS'])\n")

    def program(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def gpu(self, name: str) -> None:
        self.program(
            "bin/nvidia-smi", f'case "$*" in *=compute_cap*) echo 9.0;; *) echo "{name}"; esac'
        )

    def bench(self, text: str) -> None:
        rows = 'while [ "$1" ]; do if [ "$1" = --json ]; then echo "{}" >"$2"; fi; shift; done'
        self.program(".venv/bin/drafthouse-bench", f'echo "measured $*"; {rows}; {text}')

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "OUT": str(self.out),
            "CUDACXX": str(self.folder / "bin" / "nvcc"),
        }
        return subprocess.run(
            [self.folder / "scripts" / "gpu_tables.sh", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=env | environment,
        )

    def pieces(self, gpu: str = GPU) -> dict[str, dict[str, object]]:
        content = json.loads((self.out / "gpu-tables.json").read_text())
        found: dict[str, dict[str, object]] = content[gpu]
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_calls_go_on_where_the_last_one_stopped(machine: Machine) -> None:
    first = machine.run(BUDGET="390")  # the third piece may take 400
    assert first.returncode == 0, first.stderr
    assert list(machine.pieces()) == ["build", "smoke"]
    assert "python scripts/gpu_smoke.py" in first.stdout  # what was printed is shown at once
    assert first.stdout.splitlines()[-1] == "next: peer"
    shutil.rmtree(machine.out)  # whoever called took the results away
    second = machine.run(BUDGET="100000")
    assert second.returncode == 0, second.stderr
    assert "== build" not in second.stdout
    assert list(machine.pieces()) == list(FEW)
    assert machine.pieces()["equal"]["rows"] == {}
    page = (machine.out / "gpu-tables.md").read_text()
    assert page.startswith(f"# {GPU}\n")
    assert "measured peers --peer build/gpu/llama-server" in page
    third = machine.run(BUDGET="100000")
    assert "==" not in third.stdout
    assert "no piece is left" in third.stdout


def test_the_build_is_for_this_gpu_and_shares_its_objects_with_the_peer(machine: Machine) -> None:
    machine.run("build", CMAKE_ARGS="-DMINE=1")
    text = str(machine.pieces()["build"]["text"])
    for option in ("-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90", "-DMINE=1"):
        assert option in text
    assert "-DLLAMA_BUILD_SERVER=ON" in text
    machine.run("build", PEER="stock")
    assert "-DLLAMA_BUILD_SERVER=ON" not in str(machine.pieces()["build"]["text"])


@pytest.mark.parametrize("place", ["", "pack", "/pack"], ids=["default", "relative", "absolute"])
def test_a_machine_without_a_network_builds_from_the_pack(
    machine: Machine, tmp_path: Path, place: str
) -> None:
    source, pack = tmp_path / "source", machine.folder / "build" / "gpu-pack"
    environment = {}
    if place:
        pack = tmp_path / "elsewhere" if place[0] == "/" else machine.folder / place
        environment["PACK"] = str(pack) if place[0] == "/" else place
    for name in ("CMakeLists.txt", "include/llama.h"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    pack.mkdir(parents=True)
    with tarfile.open(pack / "llama.cpp.tar.xz", "w:xz") as archive:
        archive.add(source, "llama.cpp")
    names = ("DRAFTHOUSE_LLAMA_CPP", "PIP_NO_INDEX", "PIP_FIND_LINKS")
    (machine.folder / "scripts" / "build.py").write_text(
        f"import os; print(*(os.environ[name] for name in {names}), sep=chr(10))\n"
    )
    machine.program(".venv/bin/pip", "")
    (machine.folder / ".venv" / "lib" / "python3.99" / "site-packages").mkdir(parents=True)
    for _ in range(2):  # what is unpacked is kept
        done = machine.run("build", **environment)
        assert done.returncode == 0, done.stderr
        said = str(machine.pieces()["build"]["text"]).splitlines()
        unpacked = machine.folder / "build" / "gpu" / "llama.cpp"
        assert said[:3] == [str(unpacked), "1", str(pack / "wheels")]
        assert (unpacked / "include" / "llama.h").is_file()


def test_what_another_machine_has_built_is_not_built_again(
    machine: Machine, tmp_path: Path
) -> None:
    packed, pack = tmp_path / "packed", machine.folder / "build" / "gpu-pack"
    for name in ("site/drafthouse_engine/__init__.py", "bin/llama-server"):
        (packed / name).parent.mkdir(parents=True, exist_ok=True)
        (packed / name).touch()
    pack.mkdir(parents=True)
    with tarfile.open(pack / "built.tar.xz", "w:xz") as archive:
        archive.add(packed, ".")
    shutil.copy(ROOT / "scripts" / "gpu_built.py", machine.folder / "scripts")
    machine.program(".venv/bin/pip", "")
    site = machine.folder / ".venv" / "lib" / "python3.99" / "site-packages"
    site.mkdir(parents=True)
    done = machine.run("build", "peer", CUDACXX="no compiler")
    assert done.returncode == 0, done.stderr
    built = machine.folder / "build" / "gpu" / "built"
    assert f"{built / 'site'}\n" in (site / "drafthouse-built.pth").read_text()
    assert (site / "site-of-python.pth").is_file()  # what Python has is used, too
    assert "drafthouse_bench" in (machine.folder / ".venv" / "bin" / "drafthouse-bench").read_text()
    assert (machine.folder / "build" / "gpu" / "llama-server").samefile(
        built / "bin" / "llama-server"
    )


def test_libraries_of_cuda_are_found_beside_python_and_in_toolkits(tmp_path: Path) -> None:
    site, toolkits = tmp_path / "site", tmp_path / "local"
    for name in ("nvidia/cu13/lib/libcublas.so.13", "nvidia/cu13/lib/libcublasLt.so.13"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).touch()
    for name in ("libcudart.so.13", "libcublas.so.13"):
        (toolkits / "cuda-13.0" / "lib64" / name).parent.mkdir(parents=True, exist_ok=True)
        (toolkits / "cuda-13.0" / "lib64" / name).touch()
    found = gpu_built.libraries(site, toolkits)
    assert found == [site / "nvidia" / "cu13" / "lib", toolkits / "cuda-13.0" / "lib64"]


def test_a_pack_is_made_again_with_the_network(machine: Machine) -> None:
    """It was to come from itself: from a source that is not unpacked, and from its own wheels."""
    pack = machine.folder / "build" / "gpu-pack"
    pack.mkdir(parents=True)
    (pack / "llama.cpp.tar.xz").touch()
    machine.program("bin/packer", 'echo "$*"; echo "${PIP_NO_INDEX:-}${DRAFTHOUSE_LLAMA_CPP:-}"')
    done = machine.run("--pack", "--python", "3.12", PYTHON="packer")
    assert done.stdout == "scripts/gpu_pack.py --python 3.12\n\n"


def test_nothing_is_measured_where_the_smoke_test_fails(machine: Machine) -> None:
    machine.program(
        ".venv/bin/python", 'case "$*" in *smoke*) echo "no GPU holds them"; exit 1; esac'
    )
    failed = machine.run(BUDGET="100000")
    assert failed.returncode == 1
    assert list(machine.pieces()) == ["build", "smoke"]
    assert "no GPU holds them" in failed.stderr


def test_what_failed_is_told_and_taken_again(machine: Machine) -> None:
    machine.bench("exit 3")
    failed = machine.run("equal", "tests")
    assert failed.returncode == 1
    assert machine.pieces()["equal"]["code"] == 3
    assert machine.pieces()["tests"]["code"] == 0  # a table that fails keeps no other one away
    machine.bench("exit 0")
    assert "== equal" in machine.run(BUDGET="100000").stdout
    assert machine.pieces()["equal"]["code"] == 0


def test_a_build_that_fails_ends_the_call(machine: Machine) -> None:
    (machine.folder / "scripts" / "build.py").write_text("raise SystemExit('no compiler')\n")
    failed = machine.run(BUDGET="100000")
    assert failed.returncode == 1
    assert list(machine.pieces()) == ["build"]
    assert "no compiler" in failed.stderr


def test_a_piece_is_ended_at_its_time(machine: Machine) -> None:
    machine.bench("exec sleep 60")
    late = machine.run("equal", BUDGET="1")
    assert late.returncode == 1
    assert machine.pieces()["equal"]["code"] == 124
    assert machine.pieces()["equal"]["rows"] == {}  # what was measured before is kept


def test_another_gpu_has_pieces_of_its_own_and_a_new_machine_builds_again(
    machine: Machine,
) -> None:
    machine.run("build", "equal")
    machine.gpu("NVIDIA Other, 580.1, 1 MiB, 8.6")
    machine.run("equal")
    assert list(machine.pieces("NVIDIA Other, 580.1, 1 MiB, 8.6")) == ["equal"]
    assert list(machine.pieces()) == ["build", "equal"]
    machine.gpu(GPU)
    shutil.rmtree(machine.folder / "build")  # as on a new machine that is given the results
    listed = machine.run("--list")
    assert listed.returncode == 0
    again = machine.run(BUDGET="1")
    assert "== build" in again.stdout
    said = machine.run("--list").stdout
    assert "[x] equal" in said


def test_a_machine_without_a_gpu_is_told_so(machine: Machine) -> None:
    machine.program("bin/nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    done = machine.run()
    assert done.returncode == 1
    assert "nvidia-smi finds no GPU here: NVIDIA-SMI has failed" in done.stderr
    assert not (machine.out / "gpu-tables.json").exists()
