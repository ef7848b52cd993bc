"""Writes the licences of what is linked into the extension: `licenses.py SOURCE FOLDER`.

CMake runs it at configure time. What is linked is llama.cpp with ggml, and what both carry along.
The texts are files of their own or stand at the head of a source file; besides, single pieces of
code have a copyright notice, which all go into one file.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TEXTS = {
    "llama.cpp": "LICENSE",
    "jsonhpp": "licenses/LICENSE-jsonhpp",
    "cpp-httplib": "vendor/cpp-httplib/LICENSE",
}
"""Licences by name, and where they are. Of cpp-httplib the linker takes nothing as long as nobody
calls common's downloader."""

HEADS = {"llamafile-sgemm": "ggml/src/ggml-cpu/llamafile/sgemm.cpp"}
"""Licences that stand at the head of a source file."""

VENDORED = {"cpp-httplib": True, "nlohmann": True, "hash": False, "miniaudio": False, "stb": False}
"""Folders of vendor/ and whether they are linked: the last three are of tools and examples."""

PUBLIC_DOMAIN = frozenset({"sheredom"})
"""Folders of vendor/ whose licence asks for nothing."""

NOT_COMPILED = ("The Abseil Authors",)
"""Holders of code that is left out: in json.hpp what C++14 and newer have themselves."""

NOTICES = "notices"
_COMPILED = ("src", "common", "ggml/src", "ggml/src/ggml-cpu", "ggml/src/ggml-rpc")
_NOTICE = re.compile(r"(?:SPDX-FileCopyrightText: *|(?=Copyright \(c\)))(.*\d{4}.*)")
_SUFFIXES = frozenset({".c", ".cpp", ".h", ".hpp", ".inc"})
_ABOUT = """\
Copyright notices of code inside llama.cpp that is compiled into this extension. All of it is under
the MIT licence, whose permission notice is that of LICENSE.llama.cpp.

"""


def head_of(text: str) -> str:
    """Returns the comment that a source file begins with."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line.removeprefix("//").removeprefix(" "))
    return "\n".join(lines).strip() + "\n"


def notices_of(root: Path) -> str:
    """Returns the notices of all code that is compiled, each with the file that has it."""
    found = set()
    paths = [path for folder in _COMPILED for path in (root / folder).glob("*")]
    paths += (root / "vendor" / "nlohmann").glob("*.hpp")
    for path in paths:
        if path.suffix in _SUFFIXES:
            text = path.read_text(encoding="utf-8", errors="replace")
            name = path.relative_to(root).as_posix()
            notices = (it[1].strip() for it in _NOTICE.finditer(text))
            found |= {f"{name}: {it}" for it in notices if not it.endswith(NOT_COMPILED)}
    return _ABOUT + "\n".join(sorted(found)) + "\n"


def licenses_of(root: Path) -> dict[str, str]:
    """Returns the licences by name, of those that this source has.

    Args:
        root: The source of llama.cpp.
    """
    found = {
        name: (root / path).read_text(encoding="utf-8")
        for name, path in TEXTS.items()
        if (root / path).exists()
    }
    for name, path in HEADS.items():
        if (root / path).exists():
            found[name] = head_of((root / path).read_text(encoding="utf-8"))
    for folder in unknown(root):
        for text in sorted((root / "vendor" / folder).rglob("LICENSE*")):
            found[folder] = found.get(folder, "") + text.read_text(encoding="utf-8")
    found[NOTICES] = notices_of(root)
    return found


def unknown(root: Path) -> list[str]:
    """Returns what a source has in vendor/ that stands in no list above."""
    folders = (path.name for path in (root / "vendor").glob("*") if path.is_dir())
    return sorted(set(folders) - VENDORED.keys() - PUBLIC_DOMAIN)


def main() -> int:
    """Writes them as FOLDER/LICENSE.NAME."""
    root, out = map(Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    for path in out.glob("LICENSE.*"):
        path.unlink()
    for name, text in licenses_of(root).items():
        (out / f"LICENSE.{name}").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
