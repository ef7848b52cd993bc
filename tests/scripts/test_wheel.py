"""How the wheels of several levels become one."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
INFO = "drafthouse_server-0.1.0.dist-info"
LIBRARY = "drafthouse_engine/_spec.cpython-311-x86_64-linux-gnu.so"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheel_script", ROOT / "scripts" / "wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wheel = load()


def one(level: str) -> dict[str, bytes]:
    return {
        LIBRARY: f"code of {level}".encode(),
        "drafthouse_engine/_cpu.cpython-311-x86_64-linux-gnu.so": b"any",
        "drafthouse_engine/__init__.py": b"",
        "drafthouse_engine/licenses/LICENSE.llama.cpp": b"MIT",
        "drafthouse_engine/licenses/LICENSE.cpp-httplib": b"MIT, too",
        f"{INFO}/METADATA": b"Metadata-Version: 2.2\nName: drafthouse-server\n\nThe text.\n",
        f"{INFO}/RECORD": b"stale",
    }


def test_each_level_has_its_library_and_all_else_is_there_once() -> None:
    files = wheel.merged({level: one(level) for level in ("v2", "v4")})
    name = Path(LIBRARY).name
    assert files[f"drafthouse_engine/levels/v2/{name}"] == b"code of v2"
    assert files[f"drafthouse_engine/levels/v4/{name}"] == b"code of v4"
    assert LIBRARY not in files  # it would be found where none of the levels suits
    assert "drafthouse_engine/_cpu.cpython-311-x86_64-linux-gnu.so" in files


def test_a_cpu_takes_the_highest_level_that_it_and_the_wheel_have() -> None:
    both, low = (
        wheel.merged({level: one(level) for level in levels}) for levels in (("v2", "v4"), ("v2",))
    )
    assert [wheel.chosen_level(level, both) for level in ("v2", "v3", "v4")] == ["v2", "v2", "v4"]
    assert [wheel.chosen_level(level, low) for level in ("v2", "v3")] == ["v2", "v2"]
    assert wheel.chosen_level("", both) == ""


def test_the_licences_are_named_in_the_metadata() -> None:
    files = wheel.merged({"v2": one("v2")})
    assert files[f"{INFO}/licenses/LICENSE.llama.cpp"] == b"MIT"
    head, _, text = files[f"{INFO}/METADATA"].decode().partition("\n\n")
    assert head.splitlines() == [
        "Metadata-Version: 2.4",
        "Name: drafthouse-server",
        "License-File: LICENSE.cpp-httplib",
        "License-File: LICENSE.llama.cpp",
    ]
    assert text == "The text.\n"
    assert not any(name.startswith("drafthouse_engine/licenses") for name in files)
    made = [name for name in files if name.startswith(f"{INFO}/licenses/")]
    assert sorted(made) == [f"{INFO}/licenses/LICENSE.{it}" for it in ("cpp-httplib", "llama.cpp")]


def test_a_wheel_s_record_is_of_what_is_in_it(tmp_path: Path) -> None:
    files = wheel.merged({"v2": one("v2"), "v3": one("v3")})
    wheel.write(files, tmp_path / "made.whl")
    assert wheel.read(tmp_path / "made.whl").keys() == files.keys()
    with zipfile.ZipFile(tmp_path / "made.whl") as archive:
        rows = archive.read(f"{INFO}/RECORD").decode().splitlines()
        names = archive.namelist()
    assert len(rows) == len(files)
    assert rows[-1] == f"{INFO}/RECORD,,"
    for row in rows[:-1]:
        name, digest, size = row.rsplit(",", 2)
        sha = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={sha}", len(files[name]))
    assert names[-1] == f"{INFO}/RECORD"


@pytest.mark.parametrize(("variable", "flags"), [("1", ()), ("", ("--emulated",))])
def test_where_other_cpus_must_be_tried_a_missing_emulator_is_an_error(
    tmp_path: Path, variable: str, flags: tuple[str, ...]
) -> None:
    script = str(ROOT / "scripts" / "wheel.py")
    done = subprocess.run(
        [sys.executable, script, "--test", *flags],
        env=os.environ | {"CI": variable, "PATH": str(tmp_path)},  # where nothing is installed
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "error: qemu-user is not installed (make test-deps)" in done.stderr


def test_elsewhere_one_sentence_tells_which_cpus_were_not_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert wheel.cpus(needs_emulator=False) == {"": ""}
    (line,) = capsys.readouterr().out.splitlines()
    assert "the wheels were not tried on Nehalem and Haswell" in line
