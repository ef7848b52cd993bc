"""The workshop: a folder in which one stage after the other is trained and kept."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from models.acceptance import held_out_acceptance, held_out_loss
from models.architecture import DRAFT, Architecture
from models.corpus import read_corpus, split_corpus, standard_library
from models.eagle3 import Eagle3Head
from models.losses import DraftLoss, Loss, NextTokenLoss
from models.mtp import MTPHead
from models.tokenizer import TokenStream, encode_corpus, train_tokenizer
from models.training import SEED, Schedule, train
from models.trunk import Trunk

__all__ = ["Workshop"]


@dataclass(frozen=True, slots=True)
class Workshop:
    """A folder with a tokenizer, checkpoints and the corpus as token streams."""

    folder: Path
    """Takes everything that is made."""

    training: TokenStream
    """Text to train on."""

    held_out: TokenStream
    """Text that no stage trains on."""

    say: Callable[[str], None]
    """Takes lines about the progress."""

    @classmethod
    def open(cls, folder: Path, say: Callable[[str], None]) -> "Workshop":
        """Reads the corpus, and trains the tokenizer where the folder has none yet.

        Args:
            folder: Created if missing.
            say: Takes lines about the progress.
        """
        folder.mkdir(parents=True, exist_ok=True)
        training, held_out = split_corpus(read_corpus(standard_library()))
        tokenizer = folder / "tokenizer.json"
        if not tokenizer.exists():
            train_tokenizer(training, DRAFT.n_vocab, tokenizer)
        streams = encode_corpus(training, tokenizer), encode_corpus(held_out, tokenizer)
        say(f"corpus: {len(streams[0].tokens):,} tokens, held out {len(streams[1].tokens):,}")
        return cls(folder, *streams, say)

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's file."""
        return self.folder / "tokenizer.json"

    def trunk(self, name: str, arch: Architecture, schedule: Schedule) -> Trunk:
        """Trains a target or an ordinary draft, and freezes it.

        Args:
            name: Name of its checkpoint.
            arch: Dimensions.
            schedule: Time, rate and batch.
        """
        torch.manual_seed(SEED)
        trunk = Trunk(arch)
        if not self._restore(name, trunk):
            self._train(name, trunk, NextTokenLoss(trunk), schedule)
        trunk.requires_grad_(False).eval()
        self.say(f"{name}: held-out loss {held_out_loss(trunk, self.held_out):.3f} nats a token")
        return trunk

    def mtp(self, name: str, trunk: Trunk, schedule: Schedule) -> MTPHead:
        """Trains an MTP head on a frozen trunk.

        Args:
            name: Name of its checkpoint.
            trunk: The trained trunk.
            schedule: Time, rate and batch.
        """
        torch.manual_seed(SEED)
        head = MTPHead(trunk.arch)
        self._head(name, head, trunk, schedule)
        return head

    def eagle3(self, name: str, trunk: Trunk, schedule: Schedule) -> Eagle3Head:
        """Trains an EAGLE-3 draft on a frozen target.

        Args:
            name: Name of its checkpoint.
            trunk: The trained target.
            schedule: Time, rate and batch.
        """
        torch.manual_seed(SEED)
        head = Eagle3Head(trunk.arch)
        self._head(name, head, trunk, schedule)
        return head

    def _head(
        self, name: str, head: MTPHead | Eagle3Head, trunk: Trunk, schedule: Schedule
    ) -> None:
        if not self._restore(name, head):
            with torch.no_grad():
                sample = self.training.batch(np.random.default_rng(SEED), 4, schedule.n_tokens)[
                    :, :-1
                ]
                head.start_from(trunk, trunk(sample))
            self._train(name, head, DraftLoss(trunk, head), schedule)
        rates = held_out_acceptance(trunk, head, self.held_out)
        self.say(f"{name}: acceptance of each step " + " ".join(f"{rate:.3f}" for rate in rates))

    def _train(self, name: str, module: nn.Module, loss: Loss, schedule: Schedule) -> None:
        n_weights = sum(parameter.numel() for parameter in module.parameters())
        self.say(f"{name}: {n_weights / 1e6:.2f} M weights, {schedule.seconds:.0f} s")
        train(module.parameters(), loss, self.training, schedule, self.say)
        # Written aside first: an interrupted write must not look like a finished stage.
        unfinished = self._checkpoint(name).with_suffix(".part")
        torch.save(module.state_dict(), unfinished)
        unfinished.replace(self._checkpoint(name))

    def _restore(self, name: str, module: nn.Module) -> bool:
        if not self._checkpoint(name).exists():
            return False
        module.load_state_dict(torch.load(self._checkpoint(name), weights_only=True))
        self.say(f"{name}: from its checkpoint")
        return True

    def _checkpoint(self, name: str) -> Path:
        return self.folder / f"{name}.pt"
