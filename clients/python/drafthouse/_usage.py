"""Tokens counted, as results and errors tell them."""

from __future__ import annotations

from dataclasses import dataclass

from drafthouse.v1 import generation_pb2

__all__ = ["Usage", "usage_from"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted."""

    prompt_tokens: int
    """Tokens of the prompt as the model saw it."""
    output_tokens: int
    """Tokens in the stream's messages, the end token included: those that are billed."""
    reused_prompt_tokens: int = 0
    """Tokens of the prompt that were computed for an earlier request and not again."""


def usage_from(usage: generation_pb2.Usage) -> Usage:
    """Returns the counted tokens of a message."""
    return Usage(usage.prompt_tokens, usage.output_tokens, usage.reused_prompt_tokens)
