"""The draft tree as a value: depths, mask, paths, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from drafthouse_engine import DraftTree, InvalidArgument

#       0
#     /   \
#    1     2
#   / \     \
#  3   4     5
TREE = DraftTree((9, 1, 2, 3, 4, 5), (-1, 0, 0, 1, 1, 2))


def test_depths_and_leaves() -> None:
    assert TREE.depths == (0, 1, 1, 2, 2, 2)
    assert TREE.leaves == (3, 4, 5)
    assert len(TREE) == 6


def test_a_node_sees_itself_and_its_ancestors_only() -> None:
    for node in range(len(TREE)):
        seen = np.flatnonzero(TREE.ancestor_mask[node]).tolist()
        assert seen == sorted(TREE.path_to(node))
    assert not TREE.ancestor_mask[4, 3]
    assert not TREE.ancestor_mask[5, 1]


def test_paths_and_children() -> None:
    assert TREE.path_to(5) == [0, 2, 5]
    assert TREE.child(1, 4) == 4
    assert TREE.child(2, 4) is None
    with pytest.raises(InvalidArgument, match="node 6 is not in"):
        TREE.path_to(6)


def test_chain_and_shared_beginnings() -> None:
    assert DraftTree.chain(7, [1, 2]) == DraftTree((7, 1, 2), (-1, 0, 1))
    assert DraftTree.from_paths(7, [[1, 2], [1, 3], [4]]) == DraftTree(
        (7, 1, 2, 3, 4), (-1, 0, 1, 1, 0)
    )


def test_grown_appends_nodes() -> None:
    grown = TREE.grown([6, 7], [5, 6])
    assert grown.path_to(7) == [0, 2, 5, 6, 7]
    assert grown.tokens[:6] == TREE.tokens


@pytest.mark.parametrize(
    ("tokens", "parents", "reason"),
    [
        ((), (), "at least one"),
        ((1, 2), (-1,), "as many parents as tokens"),
        ((1,), (0,), "its parent is"),
        ((1, 2), (-1, 1), "must follow a node before it"),
        ((1, 2), (-1, -1), "must follow a node before it"),
    ],
)
def test_what_is_no_tree_is_refused(
    tokens: tuple[int, ...], parents: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        DraftTree(tokens, parents)
