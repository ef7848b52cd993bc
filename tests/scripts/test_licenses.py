"""The wheel has the licence of everything that is linked into the extension."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.support.built import missing, needs_extension

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "cext"))

import fetch_llama_cpp as pinned  # noqa: E402  # its folder is on the path since the line above
import licenses  # noqa: E402  # likewise

MIT = "Permission is hereby granted, free of charge"


@pytest.fixture(scope="module")
def source() -> Path:
    path = pinned.source_path()
    if not path.is_dir():
        missing("the source of llama.cpp is not in the cache: `make build`")
    return path


def test_each_licence_is_there_and_grants(source: Path) -> None:
    found = licenses.licenses_of(source)
    assert found.keys() == {*licenses.TEXTS, *licenses.HEADS, licenses.NOTICES}
    for name in found.keys() - {licenses.NOTICES}:
        assert MIT in found[name], name
        assert "Copyright" in found[name], name
    assert "The ggml authors" in found["llama.cpp"]
    assert "Niels Lohmann" in found["jsonhpp"]
    assert found["llamafile-sgemm"].startswith("Copyright 2024 Mozilla Foundation\n")
    assert found["llamafile-sgemm"].endswith("SOFTWARE.\n")


def test_notices_inside_of_files_are_told_with_the_file(source: Path) -> None:
    lines = licenses.licenses_of(source)[licenses.NOTICES].splitlines()
    for name, holder in (
        ("ggml/src/ggml-cpu/ops.cpp", "Jeffrey Quesnelle and Bowen Peng"),
        ("vendor/nlohmann/json.hpp", "Björn Hoehrmann"),
        ("vendor/nlohmann/json.hpp", "Florian Loitsch"),
    ):
        assert any(line.startswith(f"{name}: ") and holder in line for line in lines), holder
    assert not any("Abseil" in line for line in lines)  # of C++11, which nothing is compiled for


def test_nothing_vendored_is_of_unknown_licence(source: Path) -> None:
    """A newer llama.cpp may carry more: then say in `licenses.py` whether that is linked."""
    assert licenses.unknown(source) == []
    for name, is_linked in licenses.VENDORED.items():
        assert (source / "vendor" / name).is_dir()
        texts = [*licenses.TEXTS.values(), "vendor/nlohmann/"]
        assert is_linked == any(f"vendor/{name}/" in text for text in texts)


def test_what_another_checkout_vendors_besides_is_taken_along(tmp_path: Path) -> None:
    (tmp_path / "vendor" / "new").mkdir(parents=True)
    (tmp_path / "vendor" / "new" / "LICENSE.md").write_text("free")
    assert licenses.licenses_of(tmp_path)["new"] == "free"
    assert licenses.unknown(tmp_path) == ["new"]


class TestBuilt:
    """What `make build` has installed, of which `make wheel` makes the wheel."""

    pytestmark = needs_extension()

    def test_the_installed_package_has_them_all(self, source: Path) -> None:
        from drafthouse_engine import _spec

        folder = Path(_spec.__file__).parent / "licenses"
        for name, text in licenses.licenses_of(source).items():
            assert (folder / f"LICENSE.{name}").read_text(encoding="utf-8") == text
