"""A tree of draft tokens that hangs on the last committed token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from drafthouse_engine._spec import int32_array
from drafthouse_engine.errors import InvalidArgument

__all__ = ["DraftTree"]


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens and what each follows. Node 0 is the root, the last committed token.

    Raises:
        InvalidArgument: the tree is empty, or a node stands before its parent.

    Source:
        Miao et al., SpecInfer, arXiv:2305.09781, section 4.
    """

    tokens: tuple[int, ...]
    """Token of each node. Shape: [n_nodes]."""
    parents: tuple[int, ...]
    """Node that each node follows, −1 for the root; before the node itself. Shape: [n_nodes]."""

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents):
            raise InvalidArgument("a tree has as many parents as tokens, and at least one")
        if self.parents[0] != -1:
            raise InvalidArgument(f"node 0 is the root; its parent is −1, not {self.parents[0]}")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise InvalidArgument(f"node {node} must follow a node before it, not {parent}")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, root: int, drafts: Sequence[int]) -> Self:
        """Returns the tree without branches.

        Args:
            root: last committed token.
            drafts: what follows it, in order.
        """
        tokens = int32_array(drafts, "drafts").tolist()
        return cls((root, *tokens), tuple(range(-1, len(tokens))))

    @classmethod
    def from_paths(cls, root: int, paths: Sequence[Sequence[int]]) -> Self:
        """Returns the tree of several drafts; what they begin with alike is one node.

        Args:
            root: last committed token.
            paths: drafts, each in order.
        """
        nodes: dict[tuple[int, int], int] = {}
        tokens, parents = [root], [-1]
        for path in paths:
            at = 0
            for token in int32_array(path, "paths").tolist():
                if (at, token) not in nodes:
                    nodes[at, token] = len(tokens)
                    tokens.append(token)
                    parents.append(at)
                at = nodes[at, token]
        return cls(tuple(tokens), tuple(parents))

    @property
    def depths(self) -> tuple[int, ...]:
        """Steps from the root to each node. Shape: [n_nodes]."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def leaves(self) -> tuple[int, ...]:
        """Nodes that nothing follows, in order."""
        inner = set(self.parents)
        return tuple(node for node in range(len(self)) if node not in inner)

    @property
    def ancestor_mask(self) -> npt.NDArray[np.bool]:
        """Whether node i sees node j: its ancestors and itself. Shape: [n_nodes, n_nodes] bool."""
        mask = np.eye(len(self), dtype=np.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask

    def path_to(self, node: int) -> list[int]:
        """Returns the nodes from the root to a node, both included.

        Raises:
            InvalidArgument: there is no such node.
        """
        if not 0 <= node < len(self):
            raise InvalidArgument(f"node {node} is not in [0, {len(self)})")
        path = [node]
        while path[-1] > 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def child(self, node: int, token: int) -> int | None:
        """Returns the node that follows another with a token, None where there is none."""
        for child in range(node + 1, len(self)):
            if self.parents[child] == node and self.tokens[child] == token:
                return child
        return None

    def grown(self, tokens: Sequence[int], parents: Sequence[int]) -> DraftTree:
        """Returns the tree with further nodes.

        Args:
            tokens: their tokens.
            parents: nodes of this tree, or new ones before, that they follow.

        Raises:
            InvalidArgument: a node stands before its parent.
        """
        return DraftTree(
            (*self.tokens, *int32_array(tokens, "tokens").tolist()),
            (*self.parents, *int32_array(parents, "parents").tolist()),
        )
