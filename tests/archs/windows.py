"""Models with sliding windows, made long enough that their windows are shorter than a slot."""

from __future__ import annotations

import shutil
from pathlib import Path

from gguf import GGUFReader
from tests.archs.driver import N_CTX_LONG

__all__ = ["has_window", "lengthened"]


def has_window(path: Path) -> bool:
    """Tells whether a model's file has a window."""
    fields = GGUFReader(path).fields
    arch = fields["general.architecture"].contents()
    window = fields.get(f"{arch}.attention.sliding_window")
    return window is not None and window.contents() > 0


def lengthened(source: Path, path: Path) -> Path:
    """Writes a copy of a model that is trained for long prompts, it says, and returns its path.

    llama-server takes no prompt beyond the context that a model was trained for.

    Args:
        source: The model.
        path: Where the copy goes.
    """
    shutil.copy(source, path)
    reader = GGUFReader(path, "r+")
    field = reader.fields[f"{reader.fields['general.architecture'].contents()}.context_length"]
    length = field.parts[field.data[0]]
    length[0] = max(int(length[0]), N_CTX_LONG)
    reader.data.flush()
    return path
