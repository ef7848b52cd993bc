"""The structure of a GGUF file: everything but the weights' values."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader

__all__ = ["Structure", "read_structure", "structure_differences"]

N_LISTED = 16
"""Longer arrays (vocabulary, merges) are compared by length only."""


@dataclass(frozen=True, slots=True)
class Structure:
    """What llama.cpp looks at before it reads a weight."""

    metadata: dict[str, Any]
    """Key → value; for a long array only its length."""

    tensors: dict[str, tuple[tuple[int, ...], str]]
    """Name → shape (llama.cpp's order, fastest axis first) and type, in the order of the file."""


def read_structure(path: Path) -> Structure:
    """Reads a GGUF's structure.

    Raises:
        ValueError: Not a GGUF file.
    """
    reader = GGUFReader(path)
    metadata = {
        key: _comparable(field.contents())
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.")
    }
    tensors = {
        tensor.name: (tuple(int(n) for n in tensor.shape), tensor.tensor_type.name)
        for tensor in reader.tensors
    }
    return Structure(metadata, tensors)


def structure_differences(left: Path, right: Path) -> list[str]:
    """Lists where two GGUF files differ in structure; empty if nowhere."""
    first, second = read_structure(left), read_structure(right)
    differences = _differences(first.metadata, second.metadata)
    differences += _differences(first.tensors, second.tensors)
    if not differences and list(first.tensors) != list(second.tensors):
        differences.append("order of the tensors")
    return differences


def _comparable(value: object) -> object:
    return f"array of {len(value)}" if isinstance(value, list) and len(value) > N_LISTED else value


def _differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    return [
        f"{key}: {left.get(key, 'missing')} / {right.get(key, 'missing')}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    ]
