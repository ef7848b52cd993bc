"""The tokenizer inside a GGUF: tokens, merges, special ids and the chat template."""

import json
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

__all__ = ["CHAT_TEMPLATE", "PAD", "SPECIAL_TOKENS", "TEXT_END", "add_vocabulary"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
"""Tokens 0 … 3. Files are separated by the first; the ChatML pair is reserved and untrained."""

TEXT_END = 0
"""Ends a file of the corpus and a generation; also the first token of a text where one is asked
for."""

PAD = 3
"""Fills batches; never generated."""

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
"""Messages one after the other: the models continue code, no role was ever trained."""


def add_vocabulary(writer: GGUFWriter, tokenizer: Path, n_vocab: int) -> None:
    """Writes a byte-level BPE tokenizer into a GGUF.

    Args:
        writer: GGUF in its metadata phase.
        tokenizer: A `tokenizer.json` of the `tokenizers` library.
        n_vocab: Size to fill up to with unused tokens; at least the tokenizer's own.
    """
    content = json.loads(tokenizer.read_text(encoding="utf-8"))
    tokens, types = _tokens(content, n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(_merges(content))
    writer.add_bos_token_id(TEXT_END)
    writer.add_eos_token_id(TEXT_END)
    writer.add_pad_token_id(PAD)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _tokens(content: dict[str, Any], n_vocab: int) -> tuple[list[str], list[int]]:
    ids: dict[str, int] = content["model"]["vocab"]
    special = {added["id"] for added in content["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    unused = [f"[PAD{i}]" for i in range(len(tokens), n_vocab)]
    types = [
        int(TokenType.CONTROL if i in special else TokenType.NORMAL) for i in range(len(tokens))
    ]
    return tokens + unused, types + [int(TokenType.UNUSED)] * len(unused)


def _merges(content: dict[str, Any]) -> list[str]:
    # The library has written pairs both as "a b" and as ["a", "b"].
    merges = content["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
