"""Damaged GGUF files against the loader, each in a process of its own: what refuses, what crashes.

    python -m tests.bench.malformed [files] [model]

Bytes of the header (keys, types, lengths, tensor descriptions) are changed at random. A file may
be refused or load; a process that dies, or that takes longer than ten seconds, is a finding.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.demo import EAGLE3, MODELS, SIMPLE, TARGETS

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


def verdict(path: Path) -> str:
    """Returns how a process that loads a file ends."""
    command = [sys.executable, "-c", LOAD, str(path)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=False
        )
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
            path.write_bytes(damage(content, random.Random(i)))
            found = verdict(path)
            counts[found] += 1
            if found.startswith(("DIED", "TIMEOUT")):
                print(f"{i}: {names[i % len(names)]}: {found}", flush=True)
    for text, n in counts.most_common():
        print(f"{n:5}  {text}")


if __name__ == "__main__":
    main()
