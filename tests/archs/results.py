"""What was found, kept between runs, and with what: of another engine or processor it is void."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts import peers
from tests.archs.judge import Verdict
from tests.archs.table import Row

from drafthouse_engine import _spec

__all__ = ["Stamp", "digest_of", "load", "processor", "save", "stamp"]

_N_DIGITS = 16


@dataclasses.dataclass(frozen=True)
class Stamp:
    """With what answers were found."""

    llama_cpp: str
    """Its version."""
    engine: str
    """Digest of our compiled engine: of its C++ and Cython, llama.cpp, the patches, all options."""
    processor: str
    """The processor's name."""
    form: int = 2
    """What a row holds: 2, embeddings, too."""


def stamp() -> Stamp:
    """Returns the stamp of what is found now."""
    return Stamp(peers.version(), digest_of(Path(_spec.__file__)), processor())


def digest_of(*paths: Path) -> str:
    """Returns a short hash of the contents of files."""
    found = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:_N_DIGITS]


def processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the name of the processor."""
    text = path.read_text("utf-8") if path.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def save(path: Path, rows: Mapping[str, Row], now: Stamp) -> None:
    """Writes what was found."""
    found = {name: dataclasses.asdict(row) for name, row in rows.items()}
    content = {"stamp": dataclasses.asdict(now), "rows": found}
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def load(path: Path, models: Path, now: Stamp) -> dict[str, Row]:
    """Reads what was found so far and holds still, by the model's name.

    Args:
        path: The file; nothing where there is none, or it has another stamp.
        models: The folder of the models; what was found of another file is left out.
        now: The stamp of what is found now.
    """
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if content.get("stamp") != dataclasses.asdict(now):
        return {}
    rows = {name: _row(values) for name, values in content["rows"].items()}
    files = {name: models / f"{name}.gguf" for name in rows}
    return {
        name: row
        for name, row in rows.items()
        if files[name].exists() and digest_of(files[name]) == row.digest
    }


def _row(values: dict[str, Any]) -> Row:
    for key in ("cells", "embeddings"):
        values[key] = {
            kind: {name: Verdict(**cell) for name, cell in cells.items()}
            for kind, cells in values[key].items()
        }
    return Row(**values)
