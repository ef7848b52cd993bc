"""Copies of GGUF files with other metadata, and tensors left out or changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

__all__ = ["copied", "header_only", "quantised"]

ARCHITECTURE = "general.architecture"
TYPES: dict[type, GGUFValueType] = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}
Tensor = tuple[npt.NDArray[Any], GGMLQuantizationType]


def copied(
    source: Path,
    path: Path,
    values: Mapping[str, bool | float | str | None] = {},
    *,
    arch: str | None = None,
    change: Callable[[str, Tensor], Tensor | None] = lambda _, tensor: tensor,
    added: Mapping[str, npt.NDArray[Any]] = {},
) -> Path:
    """Writes a copy of a GGUF file and returns its path.

    Args:
        source: The file.
        path: Where the copy goes.
        values: Metadata to set; None leaves a key out.
        arch: Another architecture, in the keys too.
        change: Called with each tensor's name, data and type; None leaves it out.
        added: Tensors that it has not, by name.
    """
    reader = GGUFReader(source)
    old = reader.fields[ARCHITECTURE].contents()
    writer = GGUFWriter(path, arch or old)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == ARCHITECTURE or key in values:
            continue
        prefix, _, rest = key.partition(".")
        name = f"{arch or old}.{rest}" if prefix == old else key
        kind, items = field.types[0], field.contents()
        if kind != GGUFValueType.ARRAY:
            writer.add_key_value(name, items, kind)
        elif len(items):
            writer.add_key_value(name, items, kind, field.types[-1])
    _add(writer, values.items())
    for tensor in reader.tensors:
        kept = change(tensor.name, (tensor.data, tensor.tensor_type))
        if kept is not None:
            writer.add_tensor(tensor.name, kept[0], raw_dtype=kept[1])
    for tensor_name, data in added.items():
        writer.add_tensor(tensor_name, data)
    _write(writer)
    return path


def header_only(path: Path, arch: str, values: Mapping[str, bool | float | str]) -> Path:
    """Writes a GGUF file without tensors; keys are those of the architecture."""
    writer = GGUFWriter(path, arch)
    _add(writer, ((f"{arch}.{key}", value) for key, value in values.items()))
    _write(writer)
    return path


def quantised(name: str, tensor: Tensor) -> Tensor:
    """Turns the matrices of a copy into Q4_0."""
    data, kind = tensor
    if kind != GGMLQuantizationType.F16 or not name.startswith("blk."):
        return tensor
    wide = data.astype(np.float32)
    return quants.quantize(wide, GGMLQuantizationType.Q4_0), GGMLQuantizationType.Q4_0


def _add(writer: GGUFWriter, values: Iterable[tuple[str, bool | float | str | None]]) -> None:
    for key, value in values:
        if value is not None:
            writer.add_key_value(key, value, TYPES[type(value)])


def _write(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
