"""The shapes of the demo models: a dense target, a hybrid target, an ordinary draft."""

from dataclasses import dataclass

__all__ = ["DENSE", "DRAFT", "EAGLE3_LAYERS", "FAMILIES", "HYBRID", "Architecture"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Dimensions of a decoder-only transformer, in llama.cpp's vocabulary.

    Source: llama.cpp src/models/{mimo2,qwen35,qwen3}.cpp@b11549.
    """

    name: str
    """llama.cpp's architecture: `mimo2`, `qwen35` or `qwen3`."""

    n_vocab: int = 2048
    """Tokens in the vocabulary."""

    n_embd: int = 256
    """Width of the residual stream."""

    n_layer: int = 6
    """Layers of the trunk, without the MTP block."""

    n_head: int = 4
    """Query heads of an attention layer."""

    n_head_kv: int = 2
    """Key and value heads of an attention layer; divides `n_head`."""

    n_embd_head: int = 64
    """Width of a head; even."""

    n_ff: int = 512
    """Inner width of the feed-forward network."""

    n_ctx: int = 1024
    """Longest context in tokens, seen in training."""

    norm_eps: float = 1e-6
    """Added to the mean square in every RMS norm."""

    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""

    sliding_layers: frozenset[int] = frozenset()
    """Layers with sliding-window attention. llama.cpp refuses a `mimo2` without any."""

    n_window: int = 1024
    """Width of that window in tokens; at `n_ctx` it changes nothing."""

    recurrent_layers: frozenset[int] = frozenset()
    """Layers that mix tokens by a gated delta net in place of attention (`qwen35`)."""

    n_delta_key_heads: int = 2
    """Key heads of a delta net; divides `n_delta_value_heads`."""

    n_delta_value_heads: int = 4
    """Value heads of a delta net."""

    n_delta_state: int = 64
    """Head width of a delta net, for keys and values alike."""

    is_tied: bool = False
    """Whether the output head is the token embedding."""

    @property
    def is_gated(self) -> bool:
        """Whether attention multiplies its output by a sigmoid gate from the query projection."""
        return self.name == "qwen35"

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys pass an RMS norm per head before the rotation."""
        return self.name in {"qwen35", "qwen3"}

    @property
    def is_hidden_normed(self) -> bool:
        """Whether the MTP block sees the trunk's rows after `output_norm` (else before it)."""
        return self.name == "qwen35"


DENSE = Architecture("mimo2", sliding_layers=frozenset({1}))
"""The simplest dense graph of llama.cpp with an MTP block."""

HYBRID = Architecture("qwen35", recurrent_layers=frozenset({0, 1, 3, 4}))
"""Gated delta nets with full attention in every third layer, as Qwen3.5 has it."""

DRAFT = Architecture("qwen3", n_embd=128, n_layer=2, n_head=2, n_head_kv=1, n_ff=256, is_tied=True)
"""The ordinary draft model of both targets."""

FAMILIES = {"dense": DENSE, "hybrid": HYBRID}
"""The targets, by the name that `python -m models.make --family` takes."""

EAGLE3_LAYERS = (1, 3, 5)
"""Trunk layers whose inputs an EAGLE-3 draft reads. llama.cpp demands exactly three."""
