"""How the engine with CUDA is configured; it is not built here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = "Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0\n"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_script", ROOT / "scripts" / "cuda.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


cuda = load()


def answers(top: Path) -> object:
    def ask(command: Sequence[str]) -> str:
        return VERSION if "--version" in command else f"#$ _SPACE_= \n#$ TOP={top}/bin/..\n#$ X=1\n"

    return ask


def filled(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def test_a_toolkit_is_found_through_whatever_calls_its_compiler(tmp_path: Path) -> None:
    filled(tmp_path, "bin/nvcc")
    found = cuda.read_toolkit("wrapper", answers(tmp_path))
    assert (found.version, found.folder) == ((13, 0), tmp_path)
    assert cuda.read_toolkit("nothing", lambda _: "") is None


@pytest.mark.parametrize(
    ("names", "has_cublas"),
    [
        (("include/cuda_runtime.h",), False),
        (("include/cublas_v2.h",), False),
        (("include/cublas_v2.h", "lib64/libcublas.so"), True),
        (("targets/x/include/cublas_v2.h", "targets/x/lib/libcublas.so"), True),
    ],
)
def test_cublas_is_fetched_where_the_toolkit_lacks_it(
    tmp_path: Path, names: tuple[str, ...], has_cublas: bool
) -> None:
    toolkit = cuda.Toolkit("nvcc", (13, 0), filled(tmp_path, *names))
    assert toolkit.has_cublas == has_cublas
    if has_cublas:
        assert cuda.cublas_of(toolkit, tmp_path / "none") is None


def test_what_pypi_has_is_given_to_cmake_by_path(tmp_path: Path) -> None:
    folder = tmp_path / "cublas"
    libraries = ("libcublas.so.13", "libcublasLt.so.13")
    filled(folder / "nvidia" / "cu13", "include/cublas_v2.h", *(f"lib/{it}" for it in libraries))
    cuda.link_libraries(folder)
    toolkit = cuda.Toolkit("nvcc-of-nowhere", (13, 0), tmp_path)
    found = cuda.options(toolkit, "90", folder)
    inside = folder / "nvidia" / "cu13"
    assert found["CUDA_cublas_LIBRARY"] == str(inside / "lib" / "libcublas.so")
    assert found["CUDA_cublasLt_LIBRARY"] == str(inside / "lib" / "libcublasLt.so")
    assert (inside / "lib64" / "libcublas.so").resolve().name == "libcublas.so.13"
    assert found["CMAKE_CUDA_FLAGS"] == f"-I{inside / 'include'}"
    assert found["GGML_CUDA_NO_VMM"] == "ON"  # else an import needs a driver
    assert found["CMAKE_CUDA_ARCHITECTURES"] == "90"
    with pytest.raises(cuda.CudaError, match="has no cuBLAS"):
        cuda.options(toolkit, "90", tmp_path / "empty")
    assert not {name for name in cuda.options(toolkit, "90", None) if "cublas" in name}


def test_what_python_has_already_is_not_fetched(tmp_path: Path) -> None:
    inside = tmp_path / "nvidia" / "cu13"
    names = ["include/cublas_v2.h", "lib/libcublas.so.13", "lib/libcublasLt.so.13"]
    filled(inside, *names[:-1])
    assert cuda.installed_cublas(13, [str(tmp_path)]) is None
    filled(inside, names[-1])
    assert cuda.installed_cublas(12, [str(tmp_path)]) is None
    assert cuda.installed_cublas(13, ["nowhere", str(tmp_path)]) == inside
    found = cuda.options(cuda.Toolkit("nvcc", (13, 0), tmp_path), "90", inside)
    assert found["CUDA_cublas_LIBRARY"] == str(inside / names[1])  # its folder may be read-only


def test_a_toolkit_of_another_age_is_refused(tmp_path: Path) -> None:
    with pytest.raises(cuda.CudaError, match="CUDA 11 has no cuBLAS beside its nvcc"):
        cuda.cublas_of(cuda.Toolkit("nvcc", (11, 8), tmp_path), tmp_path)


def test_the_architecture_is_that_of_the_gpus() -> None:
    assert cuda.arch_of("9.0\n9.0\n") == "90"
    assert cuda.arch_of("8.6\n12.0\n") == "120;86"
    assert cuda.arch_of("NVIDIA-SMI has failed because it could not talk to the driver\n") is None
    assert cuda.arch_of("") is None


def test_another_machine_has_a_level_and_a_server_when_asked_for(tmp_path: Path) -> None:
    toolkit = cuda.Toolkit("nvcc", (13, 0), tmp_path)
    here = cuda.options(toolkit, "90", None)
    assert not {"DRAFTHOUSE_PORTABLE", "LLAMA_BUILD_SERVER"} & here.keys()
    there = cuda.options(toolkit, "90-real", None, portable="v3", has_server=True)
    assert there["DRAFTHOUSE_PORTABLE"] == "v3"
    assert there["LLAMA_BUILD_SERVER"] == "ON"
    assert there["CMAKE_CUDA_ARCHITECTURES"] == "90-real"
