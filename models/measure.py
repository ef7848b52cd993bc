"""Measures finished GGUF files in PyTorch: `python -m models.measure --family dense`.

Reads the weights back out of the files, so it checks the export as well: a wrong tensor name, order
or transform shows as a loss or an acceptance far from what the training printed.
"""

import argparse
import sys
from pathlib import Path

import torch

from models.acceptance import held_out_acceptance, held_out_loss
from models.architecture import DRAFT, FAMILIES, Architecture
from models.corpus import read_corpus, split_corpus, standard_library
from models.eagle3 import Eagle3Head
from models.export import read_tensors
from models.mtp import MTPHead
from models.tensors import eagle3_names, mtp_names, read_weights, trunk_names
from models.tokenizer import TokenStream, encode_corpus
from models.trunk import Trunk

__all__ = ["load_eagle3", "load_mtp", "load_trunk", "main"]


def load_trunk(path: Path, arch: Architecture) -> Trunk:
    """Reads a target or an ordinary draft from its GGUF."""
    trunk = Trunk(arch)
    read_weights(trunk, trunk_names(trunk), read_tensors(path))
    return trunk.requires_grad_(False).eval()


def load_mtp(path: Path, arch: Architecture) -> MTPHead:
    """Reads the MTP head from its target's GGUF."""
    head = MTPHead(arch)
    read_weights(head, mtp_names(head), read_tensors(path))
    return head.requires_grad_(False).eval()


def load_eagle3(path: Path, arch: Architecture) -> Eagle3Head:
    """Reads an EAGLE-3 draft from its GGUF.

    Args:
        path: The draft's file.
        arch: Dimensions of the target.
    """
    head = Eagle3Head(arch)
    read_weights(head, eagle3_names(), read_tensors(path))
    return head.requires_grad_(False).eval()


def main() -> int:
    """Prints loss and acceptance of a family's files on held-out text.

    Returns:
        Exit status.
    """
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(prog="python -m models.measure", description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, default="dense", help="which target")
    parser.add_argument("--models", type=Path, default=here, help="folder of the GGUF files")
    options = parser.parse_args()
    torch.manual_seed(0)
    arch, folder = FAMILIES[options.family], options.models
    _, held_out = split_corpus(read_corpus(standard_library()))
    stream = encode_corpus(held_out, folder / "tokenizer.json")
    target = folder / f"tiny-{arch.name}-f16.gguf"
    trunk, mtp = load_trunk(target, arch), load_mtp(target, arch)
    eagle3 = load_eagle3(folder / f"tiny-{arch.name}-eagle3-f16.gguf", arch)
    draft = load_trunk(folder / "tiny-draft-f16.gguf", DRAFT)
    _print_measures(stream, trunk, mtp, eagle3, draft)
    return 0


def _print_measures(
    stream: TokenStream, trunk: Trunk, mtp: MTPHead, eagle3: Eagle3Head, draft: Trunk
) -> None:
    for name, model in (("target", trunk), ("draft", draft)):
        print(f"{name}: held-out loss {held_out_loss(model, stream):.3f}")
    heads: tuple[tuple[str, MTPHead | Eagle3Head], ...] = (("mtp", mtp), ("eagle3", eagle3))
    for label, head in heads:
        rates = " ".join(f"{rate:.3f}" for rate in held_out_acceptance(trunk, head, stream))
        print(f"{label}: acceptance of each step {rates}")


if __name__ == "__main__":
    sys.exit(main())
