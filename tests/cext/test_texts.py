"""No text ends the process or takes more than n log n; ordinary texts keep their tokens."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tests.proofs import tokenizer_counts
from tests.proofs.tokenizer_counts import GROWTH_MAX, pre_tokenizers, vocabularies

from drafthouse_engine import Model

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
SOURCE = tokenizer_counts.llama_cpp()
CHILD = ROOT / "tests" / "support" / "hostile_texts.py"
SEPARATOR = "\n__ggml_vocab_test__\n"

STACK_KIB = 64
"""Stack of the thread that tokenises: half of what musl gives a thread."""
N_BYTES = 1 << 16
"""Of each hostile text: a byte for each byte of stack, so no character may take any of it."""


def with_pre(content: bytes, pre: str) -> bytes:
    """Returns a GGUF file without tensors, with another `tokenizer.ggml.pre`."""
    key = b"tokenizer.ggml.pre"
    start = content.index(struct.pack("<Q", len(key)) + key) + 8 + len(key)
    kind, n_old = struct.unpack_from("<IQ", content, start)
    assert kind == 8  # a string
    value = struct.pack("<IQ", kind, len(pre)) + pre.encode()
    return content[:start] + value + content[start + 12 + n_old :]


def vocabulary(name: str) -> Path:
    return SOURCE / "models" / f"ggml-vocab-{name}.gguf"


@pytest.fixture(scope="module")
def programs() -> None:
    """Builds what compares and what counts."""
    if shutil.which("g++") is None and "CXX" not in os.environ and not os.environ.get("CI"):
        pytest.skip("needs a C++ compiler of its own, as llama.cpp does")
    tokenizer_counts.build()


@pytest.mark.parametrize(
    "path",
    [path for path in vocabularies(SOURCE) if Path(f"{path}.inp").exists()],
    ids=lambda path: path.stem,
)
def test_texts_of_llama_cpp_have_the_tokens_that_it_expects(path: Path) -> None:
    texts = Path(f"{path}.inp").read_bytes().decode().split(SEPARATOR)
    lines = Path(f"{path}.out").read_text().splitlines()
    expected = [[int(token) for token in line.split()] for line in lines]
    assert len(expected) > 40
    with Model(path, vocab_only=True) as model:
        found = [
            model.tokenize(text, add_special=False).tolist() for text in texts[: len(expected)]
        ]
    assert found == expected


def run_child(paths: list[Path]) -> None:
    run = subprocess.run(
        [sys.executable, str(CHILD), str(N_BYTES), str(STACK_KIB), *map(str, paths)],
        check=False,
        capture_output=True,
        text=True,
    )
    last = run.stdout.splitlines()[-1:]
    assert run.returncode == 0, f"exit code {run.returncode} at {last}: {run.stderr[-2000:]}"
    assert last == ["end"], run.stderr[-2000:]


def test_no_text_ends_the_process_with_any_pre_tokenizer(tmp_path: Path) -> None:
    content = vocabulary("gpt-2").read_bytes()
    paths = []
    for names in pre_tokenizers(SOURCE).values():
        paths.append(tmp_path / f"{names[0]}.gguf")
        paths[-1].write_bytes(with_pre(content, names[0]))
    run_child(paths)


def test_no_text_ends_the_process_with_any_vocabulary() -> None:
    run_child(vocabularies(SOURCE))


def test_every_name_of_a_pre_tokenizer_is_known(tmp_path: Path) -> None:
    content = vocabulary("gpt-2").read_bytes()
    names = [name for names in pre_tokenizers(SOURCE).values() for name in names]
    assert {"gpt-4o", "deepseek-llm", "jais-2", "superbpe", "exaone-moe", "whitespace"} <= set(
        names
    )
    assert len(names) == len(set(names)) >= 93  # of b11549
    path = tmp_path / "vocabulary.gguf"
    for name in names:
        path.write_bytes(with_pre(content, name))
        with Model(path, vocab_only=True) as model:
            tokens = model.tokenize("Hello, world 123", add_special=False)
            assert model.meta("tokenizer.ggml.pre") == name
            if name not in (
                "gemma4",
                "granite-embed-multi-311m",
                "mmbert",
                "sarvam-moe",
                "whitespace",
            ):
                # Bytes are spelled as GPT-2 spells them.
                assert b"".join(model.token_bytes(t) for t in tokens) == b"Hello, world 123", name


def test_pre_tokenizers_split_as_std_regex_does(programs: None) -> None:
    texts = [
        *(SOURCE / "models").glob("*-gpt-2.gguf.inp"),
        *(SOURCE / "models").glob("*-qwen35.gguf.inp"),
    ]
    run = subprocess.run(
        [str(ROOT / "build" / "texts" / "split_test"), "1", "50", *map(str, texts)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert len(texts) == 2


def test_no_text_takes_more_than_n_log_n(programs: None) -> None:
    rows = list(tokenizer_counts.count_all([2048, 4096]))
    assert len({row.tokenizer for row in rows}) > 80
    assert [row for row in rows if row.growth > GROWTH_MAX] == []
