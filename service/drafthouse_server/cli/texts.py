"""Files of prompts."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["read_texts"]


def read_texts(path: Path) -> list[str]:
    """Returns the texts of a prompt file, as `models/prompts.json` is one.

    Args:
        path: A JSON object with `prompts`, a list of objects with `text`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else.
    """
    try:
        return [str(prompt["text"]) for prompt in json.loads(path.read_text("utf-8"))["prompts"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is not a file of prompts") from error
