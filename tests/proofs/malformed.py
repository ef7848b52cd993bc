"""Damaged GGUF files against the loader, each in a process of its own: what refuses, what crashes.

    python -m tests.proofs.malformed [files] [model]

Three files of four have one metadata value changed, the others any bytes of the header. A file may
be refused or load; a process that dies, or that takes longer than ten seconds, is a finding.
"""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.support.demo import EAGLE3, MODELS, SIMPLE, TARGETS

LOAD = """
import sys
from drafthouse_engine import Engine, EngineParams, Model
from drafthouse_engine.errors import EngineError
try:
    with Model(sys.argv[1]) as model:
        params = EngineParams(n_ctx_seq=64, n_batch=64, n_ubatch=64, n_threads=1)
        Engine(model, None, params).close()
except EngineError as error:
    print(type(error).__name__)
    sys.exit(3)
"""


def damage(content: bytes, chance: random.Random) -> bytes:
    """Changes one to four places of the header, most of them small."""
    data = bytearray(content)
    n_header = min(len(data), 60_000)
    # The metadata before the vocabulary and the tensors' descriptions behind it matter most.
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(4, 3000 if chance.random() < 0.5 else n_header)
        kind = chance.randrange(4)
        if kind == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at] = chance.choice((0, 1, 255, 127, 128, 9, 8))
        elif kind == 2:
            data[at : at + 4] = chance.choice((0, 1, 2**31 - 1, 2**32 - 1, 65535)).to_bytes(
                4, "little"
            )
        else:
            del data[at : at + chance.randrange(1, 9)]
    return bytes(data)


WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the scalar types of GGUF."""
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Value:
    """Where one metadata value lies in a file."""

    key: str
    """Name of the value."""
    type_at: int
    """Offset of its type."""
    at: int
    """Offset of the value: a scalar, the length of a string, the type and length of an array."""
    width: int
    """Bytes of a scalar or a length."""


def values(content: bytes) -> list[Value]:
    """Returns the metadata values of a GGUF file.

    Source: the GGUF specification, version 3.
    """
    found: list[Value] = []
    (n,) = struct.unpack_from("<Q", content, 16)
    at = 24
    for _ in range(n):
        (length,) = struct.unpack_from("<Q", content, at)
        key = content[at + 8 : at + 8 + length].decode()
        type_at = at + 8 + length
        (kind,) = struct.unpack_from("<I", content, type_at)
        at = type_at + 4
        if kind == ARRAY:
            item, length = struct.unpack_from("<IQ", content, at)
            found.append(Value(key, at, at + 4, 8))
            at += 12
            for _ in range(length if item == STRING else 0):
                at += 8 + struct.unpack_from("<Q", content, at)[0]
            at += 0 if item == STRING else length * WIDTHS[item]
        elif kind == STRING:
            found.append(Value(key, type_at, at, 8))
            at += 8 + struct.unpack_from("<Q", content, at)[0]
        else:
            found.append(Value(key, type_at, at, WIDTHS[kind]))
            at += WIDTHS[kind]
    return found


EDGES = (0, 1, 2, 3, 5, 7, 63, 100, 1000, 2**15, 2**31 - 1, 2**31, 2**32 - 1)


def damage_value(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Gives one metadata value another number or another type; the file's structure stays."""
    data = bytearray(content)
    value = chance.choice([v for v in values(content) if not v.key.startswith("tokenizer")])
    if chance.random() < 0.2:
        data[value.type_at : value.type_at + 4] = chance.randrange(14).to_bytes(4, "little")
        return bytes(data), f"{value.key}: type"
    number = chance.choice(EDGES) & (2 ** (8 * value.width) - 1)
    data[value.at : value.at + value.width] = number.to_bytes(value.width, "little")
    return bytes(data), f"{value.key} = {number}"


def verdict(path: Path) -> str:
    """Returns how a process that loads a file ends."""
    flags = ["-S"] if sys.flags.no_site else []
    command = [sys.executable, *flags, "-c", LOAD, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return "TIMEOUT"
    if done.returncode == 0:
        return "loaded"
    if done.returncode == 3:
        return f"refused: {done.stdout.strip()}"
    lines = [line for line in done.stderr.splitlines() if "GGML_A" in line or "Error" in line]
    where = lines[0] if lines else (done.stderr.strip().splitlines() or ["no text"])[-1]
    return f"DIED {done.returncode}: {where.split('/')[-1][:110]}"


def main() -> None:
    """Prints how many files ended in which way."""
    n_files = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    names = sys.argv[2:] or [*TARGETS.values(), *EAGLE3.values(), SIMPLE]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.gguf"
        for i in range(n_files):
            content = (MODELS / names[i % len(names)]).read_bytes()
            chance = random.Random(i)
            data, what = damage_value(content, chance) if i % 4 else (damage(content, chance), "")
            path.write_bytes(data)
            found = verdict(path)
            counts[found] += 1
            if found.startswith(("DIED", "TIMEOUT")):
                print(f"{i}: {names[i % len(names)]}: {what}: {found}", flush=True)
    for text, n in counts.most_common():
        print(f"{n:5}  {text}")


if __name__ == "__main__":
    main()
