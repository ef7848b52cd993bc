"""Tokenises texts that once ended the process or took n², on a thread with a small stack.

Run: `python tests/support/hostile_texts.py N_BYTES STACK_KIB FILE…`; the last line is `end`, or
says where it was.
"""

from __future__ import annotations

import sys
import threading

from drafthouse_engine import Model

PIECES = {
    "exclamation marks": "!",
    "letters": "a",
    "capitals": "A",
    "both": "aA",
    "digits": "1",
    "apostrophes": "'",
    "spaces": " ",
    "newlines": "\n",
    "spaces and newlines": " \n",
    "long spaces": " " * 511 + "x",
    "words": "a ",
    "ideographs": "\u4e2d",
    "accents": "\u0301",
    "in no vocabulary": "\ue000",
    "emoji": "\U0001f468\u200d",
    "zeros": "\0",
    "image tokens": "IMGIMGA",
    "special tokens": "<s></s><|endoftext|><|im_start|>x<0x0A>",
    "mixed scripts": "Don't 123 \u041f\u0440\u0438 \u4f60\u597d, \ud55c\uae00\r\n\t{x+1} \u0928",
}


def texts(n_bytes: int) -> dict[str, str]:
    """Returns texts of about `n_bytes` by what they consist of."""
    found = {kind: piece * (n_bytes // len(piece.encode()) or 1) for kind, piece in PIECES.items()}
    found["spaces, then a letter"] = " " * n_bytes + "x"
    found["newlines, spaces, then a letter"] = "\n" * n_bytes + " " * n_bytes + "x"
    return found


def tokenize(n_bytes: int, paths: list[str]) -> None:
    """Tokenises all texts with the vocabulary of each file."""
    for path in paths:
        with Model(path, vocab_only=True) as model:
            for kind, text in texts(n_bytes).items():
                print(path, kind, flush=True)
                model.tokenize(text, parse_special=True)
    print("end", flush=True)


if __name__ == "__main__":
    threading.stack_size(int(sys.argv[2]) * 1024)
    thread = threading.Thread(target=tokenize, args=(int(sys.argv[1]), sys.argv[3:]))
    thread.start()
    thread.join()
