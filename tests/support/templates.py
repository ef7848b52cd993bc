"""Models with another chat template, for tests: files whose metadata alone differs."""

from __future__ import annotations

from pathlib import Path

from tests.proofs.malformed import values

ALIGNMENT = 32


def with_template(content: bytes, template: str) -> bytes:
    """Returns a GGUF file with another chat template.

    The text is padded, so that the tensors behind the header stay aligned.
    """
    value = next(v for v in values(content) if v.key == "tokenizer.chat_template")
    n_old = int.from_bytes(content[value.at : value.at + 8], "little")
    text = template.encode()
    text += b" " * ((n_old - len(text)) % ALIGNMENT)
    head, tail = content[: value.at], content[value.at + 8 + n_old :]
    return head + len(text).to_bytes(8, "little") + text + tail


def write_model(path: Path, source: Path, template: str) -> Path:
    """Writes a copy of a model with another chat template; returns its path."""
    path.write_bytes(with_template(source.read_bytes(), template))
    return path
