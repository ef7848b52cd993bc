"""What tokenising costs, counted, for every tokeniser of llama.cpp and texts that get longer.

A count is the same on every run with the same compiler (`tests/fuzz/tokenizer_counts.cpp` says what
is counted), so its growth tells n log n from n², whatever else the machine does.

Run: `make tokenizer-counts`, half an hour of a core; `ARGS="--kib 64 128 256 --kinds all"` takes
every kind of text, shorter.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build" / "texts" / "tokenizer_counts"

KINDS = ["exclamation", "spaces", "mixed"]
"""One character, spaces, mixed scripts; `tests/fuzz/tokenizer_counts.cpp` knows fifteen more."""
GROWTH_MAX = 2.2
"""Most that twice the text may cost: of n log n, 2.1 from 1 to 2 MiB; of n², 4."""

OTHER_SPM = ("t5", "rwkv", "plamo2", "plamo3", "test")
OTHER_BPE = ("hybriddna", "whitespace")
"""Values of `tokenizer.ggml.model` that no vocabulary has, by the tokens that they need."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one kind of text costs one tokeniser."""

    tokenizer: str
    """Name of the tokeniser."""
    kind: str
    """What the text consists of."""
    n_tokens: int
    """Tokens of the longest text."""
    counts: tuple[int, ...]
    """What each size costs."""

    @property
    def growth(self) -> float:
        """Cost of the longest text ÷ cost of the one before it."""
        return self.counts[-1] / self.counts[-2]


def llama_cpp() -> Path:
    """Returns the folder of llama.cpp's source, patched."""
    command = [sys.executable, str(ROOT / "cext" / "fetch_llama_cpp.py")]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return Path(run.stdout.strip())


def pre_tokenizers(source: Path) -> dict[str, list[str]]:
    """Returns the values of `tokenizer.ggml.pre` by the pre-tokeniser that each means."""
    code = (source / "src" / "llama-vocab.cpp").read_text(encoding="utf-8")
    start = code.index("only BPE models have pre-tokenizers")
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for name, kind in re.findall(
        r'tokenizer_pre == "([^"]+)"|\bpre_type = LLAMA_VOCAB_PRE_TYPE_(\w+);',
        code[start : code.index("unknown pre-tokenizer type", start)],
    ):
        if name:
            names.append(name)
        elif names:  # without names: the default, where the file says nothing
            found.setdefault(kind, []).extend(names)
            names = []
    return found


def vocabularies(source: Path) -> list[Path]:
    """Returns the vocabularies that llama.cpp's source brings."""
    return sorted((source / "models").glob("ggml-vocab-*.gguf"))


def build() -> None:
    """Compiles the programs that count and compare.

    Raises:
        RuntimeError: they do not compile.
    """
    run = subprocess.run(
        ["sh", str(ROOT / "scripts" / "instrument.sh"), "texts"],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"DRAFTHOUSE_PYTHON": sys.executable},
    )
    if run.returncode:
        raise RuntimeError(f"scripts/instrument.sh texts: {run.stdout}{run.stderr}")


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A vocabulary, and what is replaced of its metadata."""

    path: Path
    """A GGUF file."""
    model: str = ""
    """`tokenizer.ggml.model`; empty: the file's."""
    pre: str = ""
    """`tokenizer.ggml.pre`; empty: the file's."""

    @property
    def name(self) -> str:
        """What a table calls it."""
        if self.pre:
            return f"pre {self.pre}"
        vocabulary = self.path.stem.removeprefix("ggml-vocab-")
        return f"{vocabulary} as {self.model}" if self.model else vocabulary


def tokenizers(source: Path) -> list[Tokenizer]:
    """Returns every pre-tokeniser (on GPT-2's vocabulary), every vocabulary, and the rest."""
    files = {path.stem.removeprefix("ggml-vocab-"): path for path in vocabularies(source)}
    found = [Tokenizer(files["gpt-2"], pre=names[0]) for names in pre_tokenizers(source).values()]
    found += [Tokenizer(path) for path in files.values()]
    found += [Tokenizer(files["llama-spm"], model=model) for model in OTHER_SPM]
    found += [Tokenizer(files["gpt-2"], model=model) for model in OTHER_BPE]
    return found


def count(tokenizer: Tokenizer, sizes: Sequence[int], kind: str = "") -> Iterator[Row]:
    """Yields what each kind of text costs.

    Args:
        tokenizer: what tokenises.
        sizes: bytes of each text, ascending.
        kind: only this kind; empty: all.

    Raises:
        RuntimeError: the vocabulary cannot be loaded, or a text ended the process.
    """
    what = [str(tokenizer.path), tokenizer.model, tokenizer.pre, kind]
    run = subprocess.run(
        [str(PROGRAM), *what, *map(str, sizes)], check=False, capture_output=True, text=True
    )
    for line in run.stdout.splitlines():
        kind, *numbers = line.split()
        yield Row(tokenizer.name, kind, int(numbers[-2]), tuple(map(int, numbers[1::2])))
    if run.returncode:
        raise RuntimeError(
            f"{tokenizer.name}: exit code {run.returncode} after\n{run.stdout}{run.stderr}"
        )


def count_all(
    sizes: Sequence[int], *, kinds: Sequence[str] = ("",), n_jobs: int = 1
) -> Iterator[Row]:
    """Yields the rows of every tokeniser."""
    tasks = [(one, kind) for one in tokenizers(llama_cpp()) for kind in kinds]
    with ThreadPoolExecutor(n_jobs) as pool:
        for rows in pool.map(lambda task: list(count(task[0], sizes, task[1])), tasks):
            yield from rows


def summary(rows: Sequence[Row], n_bytes: int) -> str:
    """Returns a table: of each tokeniser the text whose cost grows fastest."""
    worst: dict[str, Row] = {}
    for row in rows:
        if row.growth >= worst.setdefault(row.tokenizer, row).growth:
            worst[row.tokenizer] = row
    lines = ["| tokeniser | growth with twice the text | of | count a byte |", "|---|---|---|---|"]
    for name, row in worst.items():
        n_per_byte = row.counts[-1] / n_bytes
        lines.append(f"| {name} | {row.growth:.3f} | {row.kind} | {n_per_byte:.0f} |")
    return "\n".join(lines)


def main() -> int:
    """Prints a table; 1 where the cost of a text grows faster than n log n."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kib", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument(
        "--kinds", nargs="+", default=KINDS, help=f"default {', '.join(KINDS)}; all"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    arguments = parser.parse_args()
    build()
    sizes = [n * 1024 for n in arguments.kib]
    rows = []
    kinds = [""] if arguments.kinds == ["all"] else arguments.kinds
    for row in count_all(sizes, kinds=kinds, n_jobs=arguments.jobs):
        rows.append(row)
        figures = "  ".join(f"{n / size:7.1f}" for n, size in zip(row.counts, sizes, strict=True))
        mark = "  FASTER THAN N LOG N" if row.growth > GROWTH_MAX else ""
        name = f"{row.tokenizer:32} {row.kind:18} {row.n_tokens:9} tokens"
        print(f"{name}, a byte {figures}, growth {row.growth:.3f}{mark}", flush=True)
    n_failed = sum(row.growth > GROWTH_MAX for row in rows)
    print(f"\n{summary(rows, sizes[-1])}\n\n{len(rows)} rows, {n_failed} faster than n log n")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
