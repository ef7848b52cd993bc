"""Vocabularies drawn and damaged at random, each opened in a process of its own.

    python -m tests.proofs.vocabularies [files] [first seed]

A file may be refused, or be used: texts become tokens that are in the vocabulary, every token has
bytes, and grammars and DRY breakers are taken or refused. A process that dies, or that takes longer
than twenty seconds, is a finding.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gguf import GGUFValueType, GGUFWriter

KINDS = ("llama", "gpt2", "gemma4", "bert", "t5", "rwkv", "plamo2", "plamo3", "hybriddna", "none")
"""Names of llama.cpp's tokenizers."""

USE = r"""
import sys
from drafthouse_engine import Model, Sampler, SamplingParams
from drafthouse_engine.errors import EngineError

TEXTS = ("", "a", "hello world", "\n", "\0", "\u20ac", "\u2603\ufe0f", "<s>a</s>", " \t\r\n")
SAMPLERS = (
    {"grammar": 'root ::= "a"+'},
    {"grammar": "root ::= [^x]*"},
    {"dry_multiplier": 0.5, "dry_breakers": ("a\u2603", "\n")},
)

def attempt(call, *arguments, **options):
    try:
        return call(*arguments, **options)
    except EngineError:
        return ()

try:
    with Model(sys.argv[1], vocab_only=True) as model:
        for text in (*TEXTS, "<0x41>", "A" * 300, "\U0001f600", "\u2581x"):
            for options in ({}, {"parse_special": True}):
                ids = attempt(model.tokenize, text, **options)
                assert all(0 <= token < model.n_vocab for token in ids), (text, ids)
                attempt(model.detokenize, list(ids))
            attempt(model.tokenize_plain, text, [])
        for token in range(model.n_vocab):
            attempt(model.token_bytes, token)
        for params in SAMPLERS:
            attempt(lambda: Sampler(model, SamplingParams(**params)))
except EngineError as error:
    print(str(error).replace(sys.argv[1], "")[:100])
    sys.exit(3)
"""


@dataclass
class Vocabulary:
    """What a file says of its tokens."""

    kind: str
    """Name of the tokenizer."""
    texts: list[bytes] = field(default_factory=list)
    """Of the tokens."""
    types: list[int] = field(default_factory=list)
    """Of the tokens: 1 normal, 2 unknown, 3 control, 6 byte."""
    merges: list[str] = field(default_factory=lambda: ["h e", "l l", "he ll"])
    """Of pairs, for BPE."""
    scores: list[float] = field(default_factory=list)
    """Of the tokens; none: not in the file."""
    charsmap: bytes = b""
    """How a unigram vocabulary normalises; empty: not in the file."""
    values: dict[str, int | bool | str | None] = field(default_factory=dict)
    """Further values below `tokenizer.ggml.`; None: not in the file."""


def drawn(chance: random.Random, kind: str = "") -> Vocabulary:
    """Returns a vocabulary that is as it should be, of a kind that is given or drawn."""
    vocabulary = Vocabulary(kind or chance.choice(KINDS))
    words = [
        "he",
        "ll",
        "hello",
        "▁hello",
        "Ġworld",
        "wo",
        "rld",
        "##a",
        "\\n",
        "\n",
        "b'\\xe2'",
        " ",
    ]
    for text in ("<unk>", "<s>", "</s>", "[UNK]", "[CLS]", "[SEP]", "[PAD]"):
        vocabulary.texts.append(text.encode())
        vocabulary.types.append(2 if "unk" in text.lower() else 3)
    for byte in range(256):
        vocabulary.texts.append(b"<0x%02X>" % byte)
        vocabulary.types.append(1 if vocabulary.kind == "bert" else 6)
    for text in [*"abcdefghijklmnopqrstuvwxyzĠĊ▁", *words]:
        vocabulary.texts.append(text.encode())
        vocabulary.types.append(1)
    vocabulary.scores = [-float(i) for i in range(len(vocabulary.texts))]
    vocabulary.values = {"pre": "default", "bos_token_id": 1, "eos_token_id": 2}
    return vocabulary


def _twice(vocabulary: Vocabulary, chance: random.Random) -> str:
    first, second = (chance.randrange(len(vocabulary.texts)) for _ in "ab")
    vocabulary.texts[second] = vocabulary.texts[first]
    return f"text of {first} at {second}"


def _text(vocabulary: Vocabulary, chance: random.Random) -> str:
    texts = (
        b"",
        b"\0",
        b"\xff\xfe",
        b"<0x",
        b"<0xZZ>",
        b"<0x411>",
        b"x" * 5000,
        b"\\x",
        b"b''",
        b"'",
    )
    token = chance.randrange(len(vocabulary.texts))
    vocabulary.texts[token] = chance.choice(texts)
    return f"text {token}: {vocabulary.texts[token][:9]!r}"


def _type(vocabulary: Vocabulary, chance: random.Random) -> str:
    token = chance.randrange(len(vocabulary.types))
    vocabulary.types[token] = chance.choice((-1, *range(8), 99))
    return f"type {token}: {vocabulary.types[token]}"


def _id(vocabulary: Vocabulary, chance: random.Random) -> str:
    # "seperator" is how GGUF spells it.
    names = ("bos", "eos", "eot", "unknown", "seperator", "padding", "mask", "cls", "prefix")
    key = f"{chance.choice(names)}_token_id"
    value = chance.choice((None, 0, 5, len(vocabulary.texts), 2**31 - 1, 2**31, 2**32 - 1))
    vocabulary.values[key] = value
    return f"{key}: {value}"


def _flag(vocabulary: Vocabulary, chance: random.Random) -> str:
    key = chance.choice(("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix"))
    vocabulary.values[key] = value = chance.random() < 0.5
    return f"{key}: {value}"


def _score(vocabulary: Vocabulary, chance: random.Random) -> str:
    if chance.random() < 0.3:
        vocabulary.scores = vocabulary.scores[: chance.choice((0, 1, 100))]
        return f"{len(vocabulary.scores)} scores"
    edges = (float("nan"), float("inf"), -float("inf"), 1e38, -1e38)
    vocabulary.scores = [chance.choice((*edges, score)) for score in vocabulary.scores]
    return "scores"


def _merges(vocabulary: Vocabulary, chance: random.Random) -> str:
    vocabulary.merges = chance.choices(("", " ", "a", "a b", "a b c", "a  b", "h e", "Ġ a"), k=3)
    return f"merges {vocabulary.merges}"


def _charsmap(vocabulary: Vocabulary, chance: random.Random) -> str:
    n = chance.choice((0, 1, 4, 8, 16, 200))
    size = chance.choice((0, 4, 8, n, 2**32 - 1)).to_bytes(4, "little")
    vocabulary.charsmap = size + chance.randbytes(n) + chance.choice((b"", b"ab\0"))
    return f"charsmap of {n}"


def _pre(vocabulary: Vocabulary, chance: random.Random) -> str:
    names = (None, "x", "llama-bpe", "qwen2", "gpt-4o", "tekken", "viking", "falcon", "bloom")
    vocabulary.values["pre"] = chance.choice(names)
    return f"pre {vocabulary.values['pre']}"


def _cut(vocabulary: Vocabulary, chance: random.Random) -> str:
    n = chance.choice((1, 2, 5, 50, 256, 263))
    del vocabulary.texts[n:], vocabulary.types[n:], vocabulary.scores[n:]
    return f"{n} tokens"


DAMAGES: tuple[Callable[[Vocabulary, random.Random], str], ...] = (
    _twice,
    *(_text, _type, _id, _flag, _score, _merges, _charsmap, _pre, _cut) * 3,
)


def write(path: Path, vocabulary: Vocabulary) -> None:
    """Writes a file with a vocabulary and without weights."""
    writer = GGUFWriter(path, "llama")
    for name in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{name}", 32)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_token_list(vocabulary.texts)
    if vocabulary.types:
        writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.charsmap:
        writer.add_precompiled_charsmap(vocabulary.charsmap)
    types = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, str: GGUFValueType.STRING}
    for key, value in vocabulary.values.items():
        if value is not None:
            writer.add_key_value(f"tokenizer.ggml.{key}", value, types[type(value)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def verdict(path: Path) -> str:
    """Returns how a process that uses a file's vocabulary ends."""
    command = [sys.executable, "-c", USE, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return "TIMEOUT"
    if done.returncode == 0:
        return "used"
    if done.returncode == 3:
        return f"refused: {done.stdout.decode(errors='replace').strip()}"
    return f"DIED {done.returncode}: {done.stderr.decode(errors='replace').strip()[-300:]}"


def outcome(seed: int, path: Path) -> tuple[str, str]:
    """Returns what a seed's vocabulary has and how its use ends.

    Args:
        seed: Of the drawing.
        path: Where the file may be written.
    """
    chance = random.Random(seed)
    vocabulary = drawn(chance)
    damages = chance.choices(DAMAGES, k=chance.choice((0, 1, 1, 2, 3)))
    what = [damage(vocabulary, chance) for damage in damages]
    write(path, vocabulary)
    return "; ".join([vocabulary.kind, *what]), verdict(path)


def main() -> None:
    """Prints how many vocabularies ended in which way."""
    n_files = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        for seed in range(first, first + n_files):
            what, found = outcome(seed, path)
            counts[found.split(":")[0]] += 1
            if found.startswith(("DIED", "TIMEOUT")):
                print(f"{seed}: {what}: {found}", flush=True)
    for text, n in counts.most_common():
        print(f"{n:5}  {text}")


if __name__ == "__main__":
    main()
