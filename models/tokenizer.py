"""The tokenizer of all demo models, and the token streams that they are trained on."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from models.corpus import SourceFile
from models.vocabulary import SPECIAL_TOKENS, TEXT_END

__all__ = ["TokenStream", "encode_corpus", "train_tokenizer"]

ORDER_SEED = 0
"""Seed of the order of the files in a stream."""


@dataclass(frozen=True, slots=True)
class TokenStream:
    """A corpus as one row of tokens."""

    tokens: npt.NDArray[np.uint16]
    """All files, each ended by `TEXT_END`. Shape: `[n_tokens]`."""

    def batch(self, rng: np.random.Generator, n_batch: int, n_tokens: int) -> Tensor:
        """Cuts random windows, one token longer than asked for: every row has its successor.

        Args:
            rng: Source of the positions.
            n_batch: Windows, ≥ 1.
            n_tokens: Tokens to predict in each, ≥ 1.

        Returns:
            Shape: `[n_batch, n_tokens + 1]` int64.
        """
        starts = rng.integers(0, len(self.tokens) - n_tokens - 1, n_batch)
        rows = [self.tokens[start : start + n_tokens + 1] for start in starts]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def windows(self, n_tokens: int, n_windows: int | None = None) -> Tensor:
        """Cuts windows that do not overlap, evenly spread over the stream.

        Args:
            n_tokens: Tokens to predict in each, ≥ 1.
            n_windows: How many at most, ≥ 1; none: all that the stream has.

        Returns:
            Shape: `[n_windows, n_tokens + 1]` int64.
        """
        n_all = (len(self.tokens) - 1) // n_tokens
        chosen = np.linspace(0, n_all - 1, min(n_all, n_windows or n_all)).astype(np.int64)
        rows = [self.tokens[i * n_tokens : (i + 1) * n_tokens + 1] for i in chosen]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def train_tokenizer(files: list[SourceFile], n_vocab: int, path: Path) -> None:
    """Trains a byte-level BPE tokenizer and saves it; the same files give the same bytes.

    Args:
        files: Training files only, so that held-out text is not even in the merges.
        n_vocab: Size of the vocabulary, special tokens included.
        path: Where `tokenizer.json` goes.

    Raises:
        ValueError: The files have too few distinct pairs for that size.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((file.text for file in files), trainer)
    if tokenizer.get_vocab_size() != n_vocab:
        raise ValueError(f"corpus gives {tokenizer.get_vocab_size()} tokens, not {n_vocab}")
    tokenizer.save(str(path))


def encode_corpus(files: list[SourceFile], tokenizer: Path) -> TokenStream:
    """Encodes files into one stream, in a shuffled but fixed order.

    Args:
        files: Files of one side of the split.
        tokenizer: `tokenizer.json`.
    """
    order = np.random.default_rng(ORDER_SEED).permutation(len(files))
    texts = [files[i].text for i in order]
    encoded = Tokenizer.from_file(str(tokenizer)).encode_batch(texts, add_special_tokens=False)
    return TokenStream(
        np.concatenate([np.array([*file.ids, TEXT_END], np.uint16) for file in encoded])
    )
