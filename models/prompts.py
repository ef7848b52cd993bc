"""Held-out prompts for the tests and the benchmarks: `prompts.json`.

Each prompt is a run of whole lines of a held-out file, long enough that a prompt of 8 to 900 tokens
can be cut from its start. `python -m models.prompts` writes the file again.
"""

import json
import platform
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TypedDict

from models.corpus import SourceFile, read_corpus, split_corpus, standard_library

__all__ = ["Prompt", "PromptFile", "cut_prompts", "write_prompts"]

N_PROMPTS = 72
N_CHARS = 3_500
"""Shortest prompt, in characters."""

N_INK = 2_500
"""Shortest prompt, in characters that are not white space: indentation costs few tokens, and with
this much ink the worst prompt still has more than 900."""

PATH = Path(__file__).with_name("prompts.json")


class Prompt(TypedDict):
    """One prompt of `prompts.json`."""

    id: str
    """`<path>:<first line>`, unique in the file."""

    text: str
    """Python source, at least `N_CHARS` characters and more than 900 tokens."""


class PromptFile(TypedDict):
    """The whole of `prompts.json`."""

    source: str
    """Where the text is from."""

    license: str
    """SPDX identifier of the text's licence."""

    prompts: list[Prompt]
    """Prompts, neighbours from different files."""


def cut_prompts(files: list[SourceFile], n_prompts: int = N_PROMPTS) -> list[Prompt]:
    """Cuts prompts from files, one of each file in turn, so that any first few are diverse.

    Args:
        files: Held-out files. Codec tables are left out: they are lists, not code.
        n_prompts: How many to cut at most, ≥ 1.
    """
    cuts = [_cut(file) for file in files if not file.path.startswith("encodings/")]
    turns = chain.from_iterable(zip_longest(*cuts))
    return list(islice((prompt for prompt in turns if prompt is not None), n_prompts))


def write_prompts() -> None:
    """Writes `prompts.json` from the standard library of the running interpreter."""
    _, held_out = split_corpus(read_corpus(standard_library()))
    content: PromptFile = {
        "source": f"CPython {platform.python_version()} standard library, held-out files",
        "license": "PSF-2.0",
        "prompts": cut_prompts(held_out),
    }
    PATH.write_text(json.dumps(content, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


def _cut(file: SourceFile) -> Iterator[Prompt]:
    first, text = 1, ""
    for number, line in enumerate(file.text.splitlines(keepends=True), start=1):
        text += line
        if len(text) >= N_CHARS and len("".join(text.split())) >= N_INK:
            yield {"id": f"{file.path}:{first}", "text": text}
            first, text = number + 1, ""


if __name__ == "__main__":
    write_prompts()
