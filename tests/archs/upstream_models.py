"""Makes of what upstream's program writes models that a server takes and a test can learn from.

They get a vocabulary of bytes. Their weights get the size that trained ones have: upstream draws
all of them, norms and scales too, with a standard deviation of 0.1, so that the logits hardly
depend on any token but the last one (by 0.001, where they are 0.15 wide), and a cache that lost
tokens would not be noticed.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from models.archs import add_byte_vocabulary, sized

__all__ = ["make_usable"]


def make_usable(source: Path, path: Path) -> None:
    """Writes a copy of a model that has tokens and weights as a text model has them.

    Args:
        source: A file of upstream's program.
        path: Where the copy goes.
    """
    reader = GGUFReader(source)
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        is_left_out = key.startswith(("GGUF.", "tokenizer.")) or key == "general.architecture"
        value, kind = field.contents(), field.types[0]
        is_number = not (isinstance(value, float) and not math.isfinite(value))
        if is_left_out or not is_number:
            continue
        if kind != GGUFValueType.ARRAY:
            writer.add_key_value(key, value, kind)
        elif len(value):
            writer.add_key_value(key, value, kind, field.types[-1])
    table = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    add_byte_vocabulary(writer, int(table.shape[-1]))
    names = {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        stem, _, last = tensor.name.rpartition(".")
        # Scales of quantised weights: the matrices are none.
        if not (last in ("scale", "input_scale") and f"{stem}.weight" in names):
            writer.add_tensor(tensor.name, sized(tensor.name, np.array(tensor.data)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
