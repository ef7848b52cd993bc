"""The C boundary as a C program sees it, and the Python mirrors of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from tests.support.built import built
from tests.support.hand import DENSE, HYBRID, MODELS

import drafthouse_engine
from drafthouse_engine import DRAFT_TYPES, POOLINGS, SAMPLERS, Status
from drafthouse_engine.errors import BY_STATUS

ROOT = Path(__file__).resolve().parents[2]
CEXT = ROOT / "cext"
HEADER = (CEXT / "spec.h").read_text(encoding="utf-8")


def test_header_is_plain_c11_and_stands_alone(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None
    flags = ["-std=c11", "-pedantic", "-Wall", "-Wextra", "-Wconversion", "-Werror"]
    source = CEXT / "abi_test.c"
    command = [compiler, *flags, f"-I{CEXT}", "-c", str(source), "-o", str(tmp_path / "abi_test.o")]
    subprocess.run(command, check=True, timeout=110)


@pytest.mark.model
@pytest.mark.parametrize("arguments", [[], [DENSE], [HYBRID]])
def test_c_program_gets_the_documented_codes(arguments: list[str]) -> None:
    command = [str(built("abi_test")), *[str(MODELS / name) for name in arguments]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_statuses_are_those_of_the_header() -> None:
    declared = re.findall(r"XX\((\w+), (-\d+),", HEADER)
    mirrored = {status.name: str(status.value) for status in Status if status is not Status.OK}
    assert dict(declared) == mirrored
    assert set(BY_STATUS) == set(Status) - {Status.OK}


def test_draft_types_are_those_of_the_header() -> None:
    declared = re.findall(r"SPEC_DRAFT_(\w+) = (\d+)", HEADER)
    names = [
        name.lower().replace("_", "-") for name, _ in sorted(declared, key=lambda x: int(x[1]))
    ]
    assert tuple(names) == DRAFT_TYPES


def test_samplers_and_poolings_are_those_of_the_header() -> None:
    for prefix, names in (("SAMPLER", SAMPLERS), ("POOLING", POOLINGS)):
        declared = re.findall(rf"SPEC_{prefix}_(\w+) = (\d+)", HEADER)
        ordered = sorted(declared, key=lambda x: int(x[1]))
        assert tuple(name.lower() for name, _ in ordered) == names


def test_every_function_of_the_header_is_called_by_the_c_program_and_mirrored() -> None:
    declared = set(
        re.findall(r"^(?:int32_t|void \*|void|const char \*)\s+(spec_\w+)\(", HEADER, re.M)
    )
    assert len(declared) > 30
    called = set(re.findall(r"\b(spec_\w+)\(", (CEXT / "abi_test.c").read_text()))
    mirror = (CEXT / "drafthouse_engine" / "spec.pxd").read_text()
    assert declared - called == set()
    assert declared - set(re.findall(r"\b(spec_\w+)\(", mirror)) == set()


def test_versions_are_told() -> None:
    assert drafthouse_engine.abi_version() == 9
    lock = tomllib.loads((CEXT / "llama_cpp.lock").read_text())
    assert lock["version"].startswith("b")
    assert "llama.cpp" in drafthouse_engine.build_version()
